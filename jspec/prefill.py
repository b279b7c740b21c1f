"""Filling a cache with the prompt, in chunks of one fixed width.

A chunk is a block in flight like any other: a forward pass, then a commit. One compiled width
serves prompts of every length, and a row's pages do not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache
from jspec.model import Model


def prefill(
    model: Model, params: Any, cache: Cache, tokens: Array, upto: Array, *, chunk: int
) -> Cache:
    """The cache with the first `upto[b]` tokens of row b of `tokens` `[B, S]` in pages.

    A row that holds them already is left alone; `upto` may be -1 (see `Cache.lengths`).
    """

    def behind(cache: Cache) -> Array:
        return jnp.any(cache.lengths < upto)

    def add_chunk(cache: Cache) -> Cache:
        where = jnp.clip(cache.lengths[:, None] + jnp.arange(chunk), 0, tokens.shape[1] - 1)
        block = jnp.take_along_axis(tokens, where, axis=1)
        out = model.forward(params, block, cache_lib.open_block(cache, chunk))
        count = jnp.clip(upto - cache.lengths, 0, chunk)
        # Every layer but the last, whose attention nobody needs, has read its pages once the
        # last layer's keys are there: tie the writes to them (see `cache.commit`).
        count, block = jax.lax.optimization_barrier((count, out.cache.block))
        return cache_lib.commit(out.cache.replace(block=block), count)

    with jax.named_scope("prefill"):
        return jax.lax.while_loop(behind, add_chunk, cache)
