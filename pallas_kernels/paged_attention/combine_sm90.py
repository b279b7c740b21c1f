"""Combination of the splits of a row's context: the second half of Flash-Decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.plan import (
    BY_ROW,
    LOWEST,
    TILE,
    WGMMA,
    Plan,
    tiles_of_row,
    transforms,
)


def combine(plan: Plan, queries, rows, scales, values, tops, totals) -> Array:
    """The result of all splits of a row, in their order."""
    grid = {
        "batch": plan.batch,
        "head": plan.num_kv_heads,
        "tile": plan.query_tiles * plan.row_groups,
        "part": plan.head_dim // plan.part_width,
    }
    smem = plgpu.SMEM(
        (TILE, plan.part_width),
        queries.dtype,
        transforms=transforms(plan.part_width, queries.dtype),
    )
    return plgpu.kernel(
        functools.partial(_body, plan),
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        scratch_types={"smem": smem},
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_combine",
    )(rows, scales, values, tops, totals)


def _body(plan: Plan, rows, scales, values, tops, totals, out, *, smem) -> None:
    batch, head, tile, part = map(lax.axis_index, ("batch", "head", "tile", "part"))
    first, last = tiles_of_row(rows, batch)
    first_split = lax.div(first, jnp.int32(plan.tiles_a_split))
    last_split = lax.div(last + (plan.tiles_a_split - 1), jnp.int32(plan.tiles_a_split))
    head = batch * plan.num_kv_heads + head
    start = (head * plan.query_tiles * plan.row_groups + tile) * TILE
    these = pl.ds(pl.multiple_of(start, TILE), TILE)
    columns = plan.part(part)

    def by_row(x: Array, like: Array) -> Array:
        return lax.broadcast_in_dim(x, like.shape, [0])

    def add(split, carry):
        acc, top, total = carry
        new = plgpu.load(values.at[split, these, columns], layout=WGMMA, optimized=False)
        other_top = plgpu.load(tops.at[split, these], layout=BY_ROW, optimized=False)
        other = plgpu.load(totals.at[split, these], layout=BY_ROW, optimized=False)
        new_top = jnp.maximum(top, other_top)
        keep, take = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        acc = acc * by_row(keep, acc) + new * by_row(take, acc)
        return acc, new_top, total * keep + other * take

    acc = plgpu.layout_cast(jnp.zeros((TILE, plan.part_width), jnp.float32), WGMMA)
    top = plgpu.layout_cast(jnp.full((TILE,), LOWEST, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
    acc, _, total = lax.fori_loop(first_split, last_split, add, (acc, top, total))
    norm = scales[1] / jnp.maximum(total, 1e-30)
    smem[...] = (acc * by_row(norm, acc)).astype(smem.dtype)
    plgpu.commit_smem()
    start = pl.multiple_of(head * plan.padded_rows + tile * TILE, 8)
    fetched = plan.fetched_rows
    plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, fetched)], out.at[pl.ds(start, fetched), columns])
    plgpu.wait_smem_to_gmem(0)
