"""Paged attention for Hopper GPUs, in Pallas Mosaic GPU.

One block of threads does query rows of one key/value head (group size x block tokens) against
one split of one row's context. A memory warpgroup fetches keys and values in tiles of 64 slots,
page by page with TMA, into rings in shared memory; one or two compute warpgroups multiply them
with wgmma and keep an online softmax in registers (Milakov and Gimelshein, arXiv 1805.02867;
split over the context as in Flash-Decoding).

Tiles lie at absolute multiples of 64 slots and splits at absolute multiples of tiles. The memory
warpgroup composes the tiles at the end of a row in shared memory, from the pages below `length`
and the block's tokens from there on, so that the others find a token in the same place whether
it was committed or is in flight: a result does not depend on that, to the last bit. Only tiles
that hold slots outside [clean_from, clean_until) are masked.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.combine_sm90 import combine
from pallas_kernels.paged_attention.contract import Arguments
from pallas_kernels.paged_attention.fetch_sm90 import Source, fetch
from pallas_kernels.paged_attention.operands import by_token, operands_of, plan_of
from pallas_kernels.paged_attention.place_sm90 import PageTable, Place
from pallas_kernels.paged_attention.plan import (
    BY_ROW,
    LOWEST,
    TILE,
    WGMMA,
    Plan,
    RowScalar,
    tiles_of_row,
    transforms,
)

_COMPUTE_REGISTERS, _FETCH_REGISTERS = 200, 104
"""Of a thread, where three warpgroups share a processor's 512 for each lane. With fewer for
either, heads of 256 spill (tests/hopper)."""


def attend(a: Arguments, *, interpret: bool) -> Array:
    """`[B, T, N, H]`; `interpret`: on a CPU, to test."""
    plan = plan_of(a)
    with plgpu.force_gpu_interpret_mode() if interpret else contextlib.nullcontext():
        out = _attend(plan, operands_of(a, plan))
    return by_token(out, a, plan)


def _attend(plan: Plan, operands: tuple[Array, ...]) -> Array:
    """`[B * Nkv * plan.padded_rows, H]`: the attention of what `operands_of` returns."""
    queries, page_dtype, rows, scales = operands[0], operands[1].dtype, operands[4], operands[6]
    grid = {  # the last is next to each other in time: they read the same pages
        "batch": plan.batch,
        "head": plan.num_kv_heads,
        "split": plan.splits,
        "query": plan.query_tiles,
    }
    out = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=_out_types(plan, queries.dtype),
        scratch_types=_scratch(plan, queries.dtype, page_dtype),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention",
    )(*operands)
    return out[0] if plan.splits == 1 else combine(plan, queries, rows, scales, *out)


def _out_types(plan: Plan, dtype: Any) -> list[Any]:
    """The result, or for several splits the sums of each: values, largest scores, weights."""
    rows = plan.batch * plan.num_kv_heads
    if plan.splits == 1:
        return [jax.ShapeDtypeStruct((rows * plan.padded_rows, plan.head_dim), dtype)]
    rows = plan.splits, rows * plan.query_tiles * plan.row_groups * TILE
    return [
        jax.ShapeDtypeStruct((*rows, plan.head_dim), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    ]


def _scratch(plan: Plan, dtype: Any, page_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a block of threads."""
    tiling = transforms(plan.head_dim, dtype)

    def tiles(*count: int, width: int = plan.head_dim) -> Any:
        return plgpu.SMEM((*count, TILE, width), dtype, transforms=tiling)

    def barriers(count: int, arrivals: int = 1) -> Any:
        return plgpu.Barrier(num_barriers=count, num_arrivals=arrivals)

    pages_a_tile = TILE // plan.page_size
    scratch = {
        "q_tile": tiles(plan.row_groups),
        "k_tile": tiles(plan.stages),
        "v_tile": tiles(plan.stages),
        "p_tile": tiles(plan.warpgroups, width=TILE),  # an operand pair must be tiled alike
        "block_tile": plgpu.SMEM((TILE, plan.head_dim), page_dtype),  # TMA starts at any row of it
        "q_full": barriers(plan.row_groups),
        "k_full": barriers(plan.stages, pages_a_tile),
        "v_full": barriers(plan.stages, pages_a_tile),
        "k_free": barriers(plan.stages, plan.warpgroups),
        "v_free": barriers(plan.stages, plan.warpgroups),
        "block_full": barriers(1, 1 if plan.ahead else 1 + pages_a_tile),
        "done": barriers(1, plan.warpgroups),
    }
    if plan.ahead:
        ring = (plan.ahead, TILE, plan.head_dim)
        for name in ("k", "v"):
            scratch[f"{name}_pages"] = plgpu.SMEM(
                ring, page_dtype, transforms=transforms(plan.part_width, page_dtype)
            )
            scratch[f"{name}_arrived"] = barriers(plan.ahead, pages_a_tile)
    return scratch


def _body(plan: Plan, q, keys, values, table, rows, seen, scales, k_block, v_block, *refs, **s):
    batch, head, query_tile, split = map(lax.axis_index, ("batch", "head", "query", "split"))
    first, last = tiles_of_row(rows, batch)
    place = Place(
        batch,
        head,
        query_tile,
        split,
        first=jnp.maximum(split * plan.tiles_a_split, first),
        last=jnp.minimum((split + 1) * plan.tiles_a_split, last),
        length=rows[batch, RowScalar.LENGTH],
        end=rows[batch, RowScalar.END],
        clean_from=rows[batch, RowScalar.CLEAN_FROM],
        clean_until=rows[batch, RowScalar.CLEAN_UNTIL],
    )
    warpgroup = lax.axis_index("warpgroup")

    pages = PageTable(plan, batch, table)

    def work():
        @pl.when(warpgroup < plan.warpgroups)
        def _compute():
            if plan.warpgroups > 1:
                plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            _compute_tiles(plan, place, pages, warpgroup, q, seen, scales, refs, s)

        @pl.when(warpgroup == plan.warpgroups)
        def _fetch():
            if plan.warpgroups > 1:
                plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
            source = Source(plan, place, pages, (keys, values), (k_block, v_block), s)
            fetch(source)

    if plan.splits == 1:
        work()  # a row that sees nothing gets its zeros, too
    else:
        pl.when(place.first < place.last)(work)


# The compute warpgroups ----------------------------------------------------------------------


class _Rows(NamedTuple):
    """The 64 query rows of a warpgroup, and its share of the head's columns."""

    group: Any
    first_part: Any
    """Of its columns of the values."""
    start: Any
    """First of the rows, among the `padded_rows` of the head."""
    oldest: Array
    """`[64]` int32: the first slot that each sees."""
    words: tuple[Array, ...]
    """Each `[64]` int32: bit i of word w says whether a row sees block token 32 w + i."""


def _compute_tiles(plan: Plan, place: Place, pages, warpgroup, q, seen, scales, refs, s) -> None:
    group = lax.div(warpgroup, jnp.int32(plan.column_groups))
    share = lax.rem(warpgroup, jnp.int32(plan.column_groups))
    start = (place.query_tile * plan.row_groups + group) * TILE
    oldest, *words = (
        plgpu.load(seen.at[i, place.batch, pl.ds(start, TILE)], layout=BY_ROW, optimized=False)
        for i in range(seen.shape[0])
    )
    num_parts = plan.columns // plan.part_width
    rows = _Rows(group, share * num_parts, start, oldest, tuple(words))

    @pl.when(share == 0)
    def _():
        tile = q.at[_head_rows(plan, place, rows)]
        fetched = pl.ds(0, plan.fetched_rows)
        plgpu.copy_gmem_to_smem(tile, s["q_tile"].at[group, fetched], s["q_full"].at[group])

    plgpu.barrier_wait(s["q_full"].at[group])
    k_scale, v_scale = scales[0], scales[1]
    step = functools.partial(_step, plan, place, pages, warpgroup, rows, k_scale, s)
    part = plgpu.layout_cast(jnp.zeros((TILE, plan.part_width), jnp.float32), WGMMA)
    top = plgpu.layout_cast(jnp.full((TILE,), LOWEST, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
    parts = (part,) * num_parts
    parts, top, total = lax.fori_loop(place.first, place.last, step, (parts, top, total))
    if plan.splits == 1:
        _write(plan, place, rows, parts, v_scale / jnp.maximum(total, 1e-30), refs[0], s)
    else:
        _write_partial(plan, place, rows, parts, top, total, refs)


def _head_rows(plan: Plan, place: Place, rows: _Rows) -> Any:
    """Of queries and of the result."""
    start = (place.batch * plan.num_kv_heads + place.head) * plan.padded_rows + rows.start
    return pl.ds(pl.multiple_of(start, 8), plan.fetched_rows)


def _step(plan: Plan, place: Place, pages, warpgroup, rows: _Rows, k_scale, s, tile, carry):
    """One tile: scores, their weights against the largest so far, weighted values."""
    parts, top, total = carry
    slot = lax.rem(tile - place.first, jnp.int32(plan.stages))
    plgpu.barrier_wait(s["k_full"].at[slot])
    scores = _product(s["q_tile"].at[rows.group], s["k_tile"].at[slot].transpose((1, 0)))
    plgpu.barrier_arrive(s["k_free"].at[slot])
    if plan.softcap is None:
        scores = scores * (k_scale * (plan.scale * math.log2(math.e)))
    else:
        # The tanh of the hardware errs by 2^-11: this one does not.
        powers = jnp.exp2(scores * (k_scale * (plan.scale / plan.softcap * 2 * math.log2(math.e))))
        scores = (1.0 - 2.0 / (1.0 + powers)) * (plan.softcap * math.log2(math.e))
    scores = lax.cond(
        place.is_clean(tile),
        lambda scores: scores,
        lambda scores: jnp.where(_visible(plan, place, pages, rows, tile), scores, -jnp.inf),
        scores,
    )
    new_top = jnp.maximum(top, scores.max(axis=1))
    keep = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total = total * keep + weights.sum(axis=1)
    p = s["p_tile"].at[warpgroup]
    p[...] = weights.astype(p.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(s["v_full"].at[slot])
    parts = tuple(
        part * lax.broadcast_in_dim(keep, part.shape, [0])
        + _product(p, s["v_tile"].at[slot, :, plan.part(rows.first_part + i)])
        for i, part in enumerate(parts)
    )
    plgpu.barrier_arrive(s["v_free"].at[slot])
    return parts, new_top, total


def _product(a: Any, b: Any) -> Array:
    def multiply(out):
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _visible(plan: Plan, place: Place, pages: PageTable, rows: _Rows, tile: Any) -> Array:
    """`[64, 64]` bool: which slots of a tile the query rows see."""
    shape = (TILE, TILE)
    offset = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    slots = tile * TILE + offset
    token = slots - place.length
    oldest, word, *others = (
        lax.broadcast_in_dim(x, shape, [0]) for x in (rows.oldest, *rows.words)
    )
    for i, other in enumerate(others, start=1):
        word = jnp.where(token < 32 * i, word, other)
    is_set = (lax.shift_right_logical(word, token & 31) & 1) == 1
    in_block = (token >= 0) & (slots < place.end) & is_set
    in_pages = (token < 0) & pages.holds(tile, offset)
    if plan.windowed:
        in_pages = in_pages & (slots >= oldest)
    return in_pages | in_block


def _write(plan: Plan, place: Place, rows: _Rows, parts, norm, out, s) -> None:
    """Stores the rows that there are, by way of the shared memory that held the queries."""

    def wait_for_each_other():
        plgpu.barrier_arrive(s["done"].at[0])
        plgpu.barrier_wait(s["done"].at[0])

    tile = s["q_tile"].at[rows.group]
    wait_for_each_other()  # the other warpgroup of these rows may still read the queries
    for i, part in enumerate(parts):
        part = part * lax.broadcast_in_dim(norm, part.shape, [0])
        tile[:, plan.part(rows.first_part + i)] = part.astype(tile.dtype)
    plgpu.commit_smem()
    wait_for_each_other()

    @pl.when(rows.first_part == 0)
    def _():
        fetched = tile.at[pl.ds(0, plan.fetched_rows)]
        plgpu.copy_smem_to_gmem(fetched, out.at[_head_rows(plan, place, rows)])
        plgpu.wait_smem_to_gmem(0)


def _write_partial(plan: Plan, place: Place, rows: _Rows, parts, top, total, refs) -> None:
    values, tops, totals = refs
    head = place.batch * plan.num_kv_heads + place.head
    start = pl.multiple_of(head * plan.query_tiles * plan.row_groups * TILE + rows.start, TILE)
    these = pl.ds(start, TILE)
    for i, part in enumerate(parts):
        values[place.split, these, plan.part(rows.first_part + i)] = part

    @pl.when(rows.first_part == 0)
    def _():
        tops[place.split, these] = top
        totals[place.split, these] = total
