"""Filling a cache with the prompt, in chunks of one fixed width.

A chunk is a block in flight like any other: a forward pass, then a commit. One compiled width
serves prompts of every length, and a row's pages do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache
from jspec.model import Model


def prefill[Seen](
    model: Model,
    params: Any,
    cache: Cache,
    tokens: Array,
    upto: Array,
    *,
    chunk: int,
    observe: Callable[[Seen, Array, Array], Seen] | None = None,
    seen: Seen = None,
) -> tuple[Cache, Seen]:
    """The cache with the first `upto[b]` tokens of row b of `tokens` `[B, S]` in pages.

    A row that holds them already is left alone; `upto` may be -1 (see `Cache.lengths`).
    `observe(seen, logits, places)` gets the logits `[B, chunk, V]` of every chunk and the places
    `[B, chunk]` of the tokens that they predict, S where there is none; without it no logits are
    computed.
    """
    nowhere = tokens.shape[1]

    def behind(carry: tuple[Cache, Seen]) -> Array:
        return jnp.any(carry[0].lengths < upto)

    def add_chunk(carry: tuple[Cache, Seen]) -> tuple[Cache, Seen]:
        cache, seen = carry
        slots = cache.lengths[:, None] + jnp.arange(chunk)
        block = jnp.take_along_axis(tokens, jnp.clip(slots, 0, nowhere - 1), axis=1)
        out = model.forward(params, block, cache_lib.open_block(cache, chunk))
        if observe is not None:
            wanted = (slots >= 0) & (slots < upto[:, None])
            seen = observe(seen, out.logits, jnp.where(wanted, slots + 1, nowhere))
        count = jnp.clip(upto - cache.lengths, 0, chunk)
        # Every layer but the last, whose attention nobody needs, has read its pages once the
        # last layer's keys are there: tie the writes to them (see `cache.commit`).
        count, block = jax.lax.optimization_barrier((count, out.cache.block))
        return cache_lib.commit(out.cache.replace(block=block), count), seen

    with jax.named_scope("prefill"):
        return jax.lax.while_loop(behind, add_chunk, (cache, seen))
