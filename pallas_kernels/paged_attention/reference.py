"""Paged attention in plain JAX: the contract, and what runs on every device but Hopper GPUs.

Keys are read in tiles of `KEY_TILE` slots at absolute multiples, from pages below a row's length
and from the block above it, each key at its absolute slot. A token's result therefore does not
depend on which of its predecessors are committed already, on the other rows, or on the capacity
of the cache, bit for bit (invariant 5): tiles beyond a row's last token add exact zeros. The
number of tiles is read on the device, so one compiled program serves every length and costs what
the longest row needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.contract import (
    Arguments,
    block_end,
    block_visible,
    oldest_slots,
    pages_inside,
)

KEY_TILE = 256
"""Slots a tile. On a CPU 128 to 512 measure alike; shorter pays overhead, longer pays masking."""

_Sums = tuple[Array, Array, Array]
"""Over the tiles so far: the greatest score, the total weight, the weighted values."""

_MASKED = -1e30  # finite, so that a row with nothing to read gives a number, not NaN


def attend(a: Arguments) -> Array:
    """`[B, T, N, H]` in the type of the queries. Online softmax over the tiles (Milakov and
    Gimelshein, arXiv 1805.02867, algorithm 3)."""
    B, T, N, H = a.queries.shape
    Nkv = a.k_pages.shape[2]
    grouped = a.queries.reshape(B, T, Nkv, N // Nkv, H)

    def add_tile(visible_in: Callable[[Arguments, Array], Array], i: Array, carry: _Sums) -> _Sums:
        top, total, acc = carry
        keys, values = (
            _tile(a, p, b, i) for p, b in ((a.k_pages, a.k_block), (a.v_pages, a.v_block))
        )
        scores = jnp.einsum("BTKGH,BSKH->BKTGS", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * (a.scale * a.k_scale)
        if a.softcap is not None:
            scores = jnp.tanh(scores / a.softcap) * a.softcap
        visible = visible_in(a, i)[:, None, :, None, :]
        scores = jnp.where(visible, scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + jnp.einsum(
            "BKTGS,BSKH->BKTGH",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return new_top, total, acc

    shape = (B, Nkv, T, N // Nkv)
    start = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    first, mixed, last = _tile_range(a)
    carry = jax.lax.fori_loop(first, mixed, functools.partial(add_tile, _prefix_visible), start)
    top, total, acc = jax.lax.fori_loop(mixed, last, functools.partial(add_tile, _visible), carry)
    saw_any = top > _MASKED
    norm = jnp.where(saw_any, a.v_scale / jnp.where(saw_any, total, 1.0), 0.0)
    out = acc * norm[..., None]
    return out.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(a.queries.dtype)


def _tile_range(a: Arguments) -> tuple[Array, Array, Array]:
    """The tiles that any row sees, from the first to before the last; those before the number
    between lie in every row's prefix."""
    last = (jnp.max(a.lengths) + block_end(a) - 1) // KEY_TILE + 1
    first = jnp.int32(0)
    if a.window is not None:
        first = jnp.maximum(jnp.min(oldest_slots(a)), 0) // KEY_TILE
    return first, jnp.maximum(jnp.min(a.lengths) // KEY_TILE, first), last


def _slots(index: Array) -> Array:
    """`[KEY_TILE]` int32: the slots of a tile."""
    return index * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)


def _inside(a: Arguments, index: Array) -> Array:
    """`[B, KEY_TILE]` bool: which slots of a tile the block table puts into the pool."""
    return jnp.repeat(pages_inside(a)[:, _columns(a, index)], a.k_pages.shape[1], axis=1)


def _prefix_visible(a: Arguments, index: Array) -> Array:
    """`[B, T or 1, KEY_TILE]` bool: which slots of a tile in every row's prefix each query sees.
    No mask is looked at: a tree sees what a chain does."""
    inside = _inside(a, index)
    if a.window is None:
        return inside[:, None]
    return inside[:, None] & (_slots(index) >= oldest_slots(a)[..., None])


def _visible(a: Arguments, index: Array) -> Array:
    """`[B, T, KEY_TILE]` bool: which slots of a tile, prefix or block, each query sees."""
    slots = _slots(index)
    token = slots - a.lengths[:, None]
    exists = _inside(a, index) | (token >= 0)
    if a.mask is None and a.depths is None:
        query = (a.in_flight + jnp.arange(a.queries.shape[1], dtype=jnp.int32))[:, None]
        age = query - token[:, None]
        visible = age >= 0 if a.window is None else (age >= 0) & (age < a.window)
        return visible & exists[:, None]
    W = a.k_block.shape[1]
    allowed = jnp.broadcast_to(block_visible(a), (*a.queries.shape[:2], W))
    in_block = jnp.take_along_axis(allowed, jnp.clip(token, 0, W - 1)[:, None], axis=2)
    in_prefix = slots >= oldest_slots(a)[..., None]
    visible = jnp.where(token[:, None] < 0, in_prefix, in_block & (token < W)[:, None])
    return visible & exists[:, None]


def _columns(a: Arguments, index: Array) -> Array:
    """The columns of the block table that a tile covers. The last may reach beyond the table;
    those slots are masked, whatever is read there."""
    pages_a_tile = KEY_TILE // a.k_pages.shape[1]
    columns = index * pages_a_tile + jnp.arange(pages_a_tile, dtype=jnp.int32)
    return jnp.minimum(columns, a.block_table.shape[1] - 1)


def _tile(a: Arguments, pages: Array, block: Array, index: Array) -> Array:
    """Keys or values `[B, KEY_TILE, Nkv, H]` of the slots of a tile, block included."""
    B = a.lengths.size
    table = jnp.clip(a.block_table[:, _columns(a, index)], 0, pages.shape[0] - 1)
    offsets = a.lengths[:, None] + jnp.arange(block.shape[1], dtype=jnp.int32) - index * KEY_TILE
    offsets = jnp.where(offsets < 0, KEY_TILE, offsets)  # out of range: dropped
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]
    tile = (
        pages[table]
        .reshape(B, KEY_TILE, *pages.shape[2:])
        .at[rows, offsets]
        .set(block, mode="drop")
    )
    return tile.astype(a.queries.dtype)
