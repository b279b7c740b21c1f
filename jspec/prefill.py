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
from jspec.model import Model, Output

_PASS_TOKENS, _LEAST_CHUNK = 1024, 32
"""Tokens of a pass at most, and of a row and pass at least. Larger passes are no faster a token,
and short prompts of many rows would be mostly padding."""


def prefill[Seen](
    model: Model,
    params: Any,
    cache: Cache,
    tokens: Array,
    upto: Array,
    *,
    chunk: int,
    observe: Callable[[Seen, Output, Array, Array], Seen] = lambda seen, *_: seen,
    seen: Seen = None,
) -> tuple[Cache, Seen]:
    """The cache with the first `upto[b]` tokens of row b of `tokens` `[B, S]` in pages.

    A row that holds them already is left alone; `upto` may be -1 (see `Cache.lengths`).
    `observe(seen, output, slots, count)` gets what the model says of every chunk, the slots
    `[B, chunk]` of its tokens and how many `[B]` of a row count; what it does not read is not
    computed. Where many rows share a pass, a chunk has less than `chunk` tokens.
    """
    B, nowhere = tokens.shape
    chunk = min(chunk, max(_PASS_TOKENS // B, _LEAST_CHUNK))

    def behind(carry: tuple[Cache, Seen]) -> Array:
        return jnp.any(carry[0].lengths < upto)

    def add_chunk(carry: tuple[Cache, Seen]) -> tuple[Cache, Seen]:
        cache, seen = carry
        slots = cache.lengths[:, None] + jnp.arange(chunk)
        block = jnp.take_along_axis(tokens, jnp.clip(slots, 0, nowhere - 1), axis=1)
        out = model.forward(params, block, cache_lib.open_block(cache, chunk))
        count = jnp.clip(upto - cache.lengths, 0, chunk)
        seen = observe(seen, out, slots, count)
        return cache_lib.commit_read(out.cache, count), seen

    with jax.named_scope("prefill"):
        return jax.lax.while_loop(behind, add_chunk, (cache, seen))
