"""From the arguments of paged attention to what the Hopper kernel reads, and back."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.contract import (
    Arguments,
    block_end,
    block_visible,
    oldest_slots,
    pages_inside,
)
from pallas_kernels.paged_attention.plan import (
    TILE,
    Plan,
    make_plan,
)


def plan_of(a: Arguments) -> Plan:
    return make_plan(
        queries=a.queries.shape,
        pages=a.k_pages.shape,
        table=a.block_table.shape,
        block_width=a.k_block.shape[1],
        itemsize=a.queries.dtype.itemsize,
        scale=a.scale,
        softcap=a.softcap,
        windowed=a.window is not None,
        converts=a.k_pages.dtype != a.queries.dtype,
    )


def operands_of(a: Arguments, plan: Plan) -> tuple[Array, ...]:
    """What `kernel_sm90.attend` takes.

    Returns queries `[B * Nkv * padded_rows, H]` (row t * G + g of a head is token t of query head
    g of its group); pages `[P * S, Nkv * H]`; the table; `rows` `[B, 5]` int32 (`RowScalar`);
    `seen` `[1 + words, B, padded]` int32 (`_Rows`); scales `[2]`; and the blocks of all rows,
    `[TILE + B * W + TILE, Nkv * H]`, with room for a tile that begins before the first.
    """

    def flat(pages: Array) -> Array:
        return pages.reshape(-1, pages.shape[2] * pages.shape[3])

    def flat_block(block: Array) -> Array:
        return jnp.pad(flat(block), [(TILE, TILE), (0, 0)])

    return (
        _by_head(a.queries, plan),
        flat(a.k_pages),
        flat(a.v_pages),
        a.block_table,
        _row_scalars(a),
        _seen(a, plan),
        jnp.stack([a.k_scale, a.v_scale]),
        flat_block(a.k_block),
        flat_block(a.v_block),
    )


def _by_head(queries: Array, plan: Plan) -> Array:
    B, T, _, H = queries.shape
    groups = queries.reshape(B, T, plan.num_kv_heads, -1, H).transpose(0, 2, 1, 3, 4)
    rows = groups.reshape(B, plan.num_kv_heads, -1, H)
    missing = plan.padded_rows - rows.shape[2]
    return jnp.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]).reshape(-1, H)


def by_token(out: Array, a: Arguments, plan: Plan) -> Array:
    """`[B, T, N, H]`: the kernel's result in the order of the queries."""
    B, T, N, H = a.queries.shape
    rows = T * (N // plan.num_kv_heads)
    out = out.reshape(B, plan.num_kv_heads, plan.padded_rows, H)[:, :, :rows]
    return out.reshape(B, plan.num_kv_heads, T, -1, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _row_scalars(a: Arguments) -> Array:
    end = a.lengths + block_end(a)
    oldest = jnp.maximum(oldest_slots(a), 0)
    size, columns = a.k_pages.shape[1], a.block_table.shape[1]
    starts = jnp.arange(columns, dtype=jnp.int32) * size
    first_outside = jnp.min(jnp.where(pages_inside(a), columns * size, starts), axis=1)
    clean_until = jnp.minimum(a.lengths, first_outside)
    first_tile = jnp.min(oldest, axis=1) // TILE
    return jnp.stack([a.lengths, end, first_tile, jnp.max(oldest, axis=1), clean_until], axis=1)


def _seen(a: Arguments, plan: Plan) -> Array:
    """Oldest slots of the query rows, and which tokens of the block each sees, as bits of words;
    padding sees nothing of it."""
    B, T, N, _ = a.queries.shape
    W = a.k_block.shape[1]
    visible = jnp.broadcast_to(block_visible(a), (B, T, W))
    visible = jnp.pad(visible, [(0, 0), (0, 0), (0, -W % 32)]).reshape(B, T, -1, 32)
    bits = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    words = jnp.sum(jnp.where(visible, bits, 0), axis=-1, dtype=jnp.uint32).astype(jnp.int32)
    columns = jnp.concatenate([oldest_slots(a)[None], jnp.moveaxis(words, -1, 0)])
    rows = jnp.repeat(columns, N // plan.num_kv_heads, axis=2)
    padded = plan.query_tiles * plan.row_groups * TILE
    return jnp.pad(rows, [(0, 0), (0, 0), (0, padded - rows.shape[2])])
