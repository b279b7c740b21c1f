"""Attention of the tokens in flight over pages and block, in tiles at absolute slots.

Keys are read tile by tile; a tile holds KEY_TILE consecutive slots, from pages below a row's
length and from the block above it, each key at its absolute slot. A token's result therefore
does not depend on which of its predecessors are committed already, on the other rows, or on the
capacity of the cache, bit for bit (DESIGN, invariant 5): tiles beyond a row's last token add
exact zeros. The number of tiles is read on the device, so one compiled program serves every
length and costs what the longest row needs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache, KeysValues

KEY_TILE = 256
"""Slots a tile. On a CPU 128 to 512 measure alike; shorter pays overhead, longer pays masking."""

_MASKED = -1e30  # finite, so that a row with nothing to read gives a number, not NaN


def attend(
    cache: Cache, layer: int, queries: Array, keys: Array, values: Array
) -> tuple[Array, Cache]:
    """Appends keys and values to the block in flight and attends causally over row and block.

    Args:
      cache: with an open block (`cache.open_block`).
      layer: whose pages and block to use.
      queries: `[B, T, N, H]`, rotated, of the tokens at `cache.positions(T)`.
      keys, values: `[B, T, Nkv, H]` of the same tokens; N is a multiple of Nkv.
    Returns:
      `[B, T, N, H]` in the dtype of `queries`, and the cache with the block extended.
    """
    positions = cache.positions(queries.shape[1])
    cache = cache_lib.append(cache, layer, keys, values)
    paged, block = cache.pages[layer], cache.block[layer]
    out = _tiled_attention(queries, positions, paged, block, cache.table, cache.lengths)
    return out, cache


@jax.jit  # traced once, not once a layer: half of the time to a first token is tracing
@jax.named_scope("attention")
def _tiled_attention(
    queries: Array,
    positions: Array,
    paged: KeysValues,
    block: KeysValues,
    table: Array,
    lengths: Array,
) -> Array:
    """Online softmax over the tiles (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3)."""
    B, T, N, H = queries.shape
    Nkv = paged.keys.shape[2]
    grouped = queries.reshape(B, T, Nkv, N // Nkv, H)
    num_tiles = jnp.max(positions) // KEY_TILE + 1  # the last query's slot is the last key

    def add_tile(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        kv = KeysValues(
            *(_tile(p, b, table, lengths, i) for p, b in zip(paged, block, strict=True))
        )
        scores = jnp.einsum(
            "BTKGH,BSKH->BKTGS", grouped, kv.keys, preferred_element_type=jnp.float32
        )
        slots = i * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)
        visible = (slots <= positions[:, :, None])[:, None, :, None, :]
        scores = jnp.where(visible, scores * H**-0.5, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + jnp.einsum(
            "BKTGS,BSKH->BKTGH",
            weights.astype(kv.values.dtype),
            kv.values,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, acc

    shape = (B, Nkv, T, N // Nkv)
    start = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, num_tiles, add_tile, start)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(queries.dtype)


def _tile(paged: Array, block: Array, table: Array, lengths: Array, index: Array) -> Array:
    """Keys or values `[B, KEY_TILE, Nkv, H]` of the slots of a tile, block included."""
    B, pages_a_row = table.shape
    page_size = paged.shape[1]
    # The last tile may reach beyond the table; those slots are masked, whatever is read there.
    columns = index * (KEY_TILE // page_size) + jnp.arange(KEY_TILE // page_size, dtype=jnp.int32)
    gathered = paged[table[:, jnp.minimum(columns, pages_a_row - 1)]]
    offsets = lengths[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32) - index * KEY_TILE
    offsets = jnp.where(offsets < 0, KEY_TILE, offsets)  # out of range: dropped
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    return gathered.reshape(B, KEY_TILE, *paged.shape[2:]).at[rows, offsets].set(block, mode="drop")
