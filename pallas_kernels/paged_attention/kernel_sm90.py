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
from pallas_kernels.paged_attention.operands import by_token, operands_of, plan_of
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


class _Place(NamedTuple):
    """Which part of the work a block of threads does, and scalars of its row."""

    batch: Any
    head: Any
    query_tile: Any
    split: Any
    first: Any
    last: Any
    """Tiles [first, last)."""
    length: Any
    end: Any
    """Slots below `length` are in pages, [length, end) in the block."""
    clean_from: Any
    clean_until: Any

    def is_clean(self, tile: Any) -> Any:
        return (tile * TILE >= self.clean_from) & self.is_paged(tile)

    def is_paged(self, tile: Any) -> Any:
        return (tile + 1) * TILE <= self.clean_until


class _PageTable(NamedTuple):
    """A row's pages."""

    plan: Plan
    batch: Any
    table: Any

    def page(self, tile: Any, nth: int) -> tuple[Any, Any]:
        """The nth page of a tile, clamped to the pool, and whether it was in it."""
        plan = self.plan
        column = jnp.minimum(tile * (TILE // plan.page_size) + nth, plan.pages_a_row - 1)
        page = self.table[self.batch, column]
        inside = jnp.minimum(jnp.maximum(page, 0), plan.num_pages - 1)
        return inside, page == inside

    def holds(self, tile: Any, offset: Array) -> Array:
        """Whether the pages at these slots of a tile are in the pool."""
        size = self.plan.page_size
        found = offset >= 0
        for nth in range(TILE // size):
            missing = jnp.where(self.page(tile, nth)[1], 0, size)  # slots of it
            found = found & ((offset < nth * size) | (offset >= nth * size + missing))
        return found


def _body(plan: Plan, q, keys, values, table, rows, seen, scales, k_block, v_block, *refs, **s):
    batch, head, query_tile, split = map(lax.axis_index, ("batch", "head", "query", "split"))
    first, last = tiles_of_row(rows, batch)
    place = _Place(
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

    pages = _PageTable(plan, batch, table)

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
            source = _Source(plan, place, pages, (keys, values), (k_block, v_block), s)
            (_fetch_converted if plan.ahead else _fetch_direct)(source)
            source.drain()

    if plan.splits == 1:
        work()  # a row that sees nothing gets its zeros, too
    else:
        pl.when(place.first < place.last)(work)


# The memory warpgroup ------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where the memory warpgroup reads (keys first, values second) and writes."""

    plan: Plan
    place: _Place
    table: _PageTable
    pages: tuple[Any, Any]
    blocks: tuple[Any, Any]
    smem: dict[str, Any]

    def columns(self) -> Any:
        width = self.plan.head_dim
        return pl.ds(pl.multiple_of(self.place.head * width, width), width)

    def copy_pages(self, which: int, tile: Any, out: Any, barrier: Any) -> None:
        size = self.plan.page_size
        for nth in range(TILE // size):
            start = pl.multiple_of(self.table.page(tile, nth)[0] * size, size)
            page = self.pages[which].at[pl.ds(start, size), self.columns()]
            plgpu.copy_gmem_to_smem(page, out.at[pl.ds(nth * size, size)], barrier)

    def copy_block(self, which: int, tile: Any) -> None:
        """The block's tokens, each to its place in the tile, and what else lies around them."""
        before = tile * TILE - self.place.length  # block tokens before the tile, or less than 0
        start = jnp.maximum(TILE + self.place.batch * self.plan.block_width + before, 0)
        tokens = self.blocks[which].at[pl.ds(start, TILE), self.columns()]
        plgpu.copy_gmem_to_smem(tokens, self.smem["block_tile"], self.smem["block_full"].at[0])

    def compose(self, tile: Any, out: Any) -> None:
        """Leaves in `out`, which holds the pages, what they hold below `length`; writes the block's
        tokens up to `end`; and zeros beyond, and where the table points outside the pool: what
        lies there may be NaN."""
        place, plan = self.place, self.plan
        shape = (TILE, plan.part_width)

        @pl.loop(0, plan.head_dim // plan.part_width)  # unrolled, the parts' registers spill
        def _(part):
            columns = plan.part(part)
            offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
            slots = offset + tile * TILE
            in_pages = (slots < place.length) & self.table.holds(tile, offset)
            in_block = (slots >= place.length) & (slots < place.end)
            old, own = (_load(x.at[:, columns], out.dtype) for x in (out, self.smem["block_tile"]))
            zeros = plgpu.layout_cast(jnp.zeros(shape, out.dtype), WGMMA)
            out[:, columns] = jnp.where(in_pages, old, jnp.where(in_block, own, zeros))

        plgpu.commit_smem()

    def slot(self, tile: Any, name: str) -> Any:
        """The place of a tile in a ring, once the compute warpgroups have left it."""
        stages = jnp.int32(self.plan.stages)
        count = tile - self.place.first
        slot = lax.rem(count, stages)

        @pl.when(count >= stages)
        def _():
            plgpu.barrier_wait(self.smem[f"{name}_free"].at[slot])

        return slot

    def drain(self) -> None:
        """Waits until the compute warpgroups have left all tiles."""
        place, stages = self.place, jnp.int32(self.plan.stages)

        @pl.loop(jnp.maximum(place.first, place.last - stages), place.last)
        def _(tile):
            slot = lax.rem(tile - place.first, stages)
            plgpu.barrier_wait(self.smem["k_free"].at[slot])
            plgpu.barrier_wait(self.smem["v_free"].at[slot])

    def hand_over(self, slot: Any, name: str) -> None:
        """Says that a tile that this warpgroup wrote is there, in as many words as TMA would."""
        for _ in range(TILE // self.plan.page_size):
            plgpu.barrier_arrive(self.smem[f"{name}_full"].at[slot])


def _load(tile: Any, dtype: Any) -> Array:
    """A tile in registers; fp8 goes by way of float16, the one conversion that Hopper has."""
    x = plgpu.load(tile, layout=WGMMA, optimized=False)
    if x.dtype != dtype:
        x = x.astype(jnp.float16)
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def _fetch_direct(source: _Source) -> None:
    """Keeps the rings of key and value tiles full; TMA writes all but the composed tiles."""
    s = source.smem

    def fetch(which: int, name: str, tile: Any) -> None:
        slot = source.slot(tile, name)

        @pl.when(source.place.is_paged(tile))
        def _():
            source.copy_pages(which, tile, s[f"{name}_tile"].at[slot], s[f"{name}_full"].at[slot])

        @pl.when(jnp.logical_not(source.place.is_paged(tile)))
        def _():
            source.copy_pages(which, tile, s[f"{name}_tile"].at[slot], s["block_full"].at[0])
            source.copy_block(which, tile)
            plgpu.barrier_wait(s["block_full"].at[0])
            source.compose(tile, s[f"{name}_tile"].at[slot])
            source.hand_over(slot, name)

    @pl.loop(source.place.first, source.place.last)
    def _(tile):
        fetch(0, "k", tile)
        fetch(1, "v", tile)


def _fetch_converted(source: _Source) -> None:
    """As `_fetch_direct` for fp8 pages: all tiles pass through this warpgroup's registers."""
    s, place, plan = source.smem, source.place, source.plan

    def start(which: int, name: str, tile: Any) -> None:
        @pl.when(tile < place.last)
        def _():
            slot = lax.rem(tile - place.first, jnp.int32(plan.ahead))
            barrier = s[f"{name}_arrived"].at[slot]
            source.copy_pages(which, tile, s[f"{name}_pages"].at[slot], barrier)

    def convert(which: int, name: str, tile: Any) -> None:
        start(which, name, tile + (plan.ahead - 1))
        arrived = lax.rem(tile - place.first, jnp.int32(plan.ahead))
        plgpu.barrier_wait(s[f"{name}_arrived"].at[arrived])
        slot = source.slot(tile, name)
        pages, out = s[f"{name}_pages"].at[arrived], s[f"{name}_tile"].at[slot]

        @pl.loop(0, plan.head_dim // plan.part_width)
        def _(part):
            columns = plan.part(part)
            out[:, columns] = _load(pages.at[:, columns], out.dtype)

        plgpu.commit_smem()

        @pl.when(jnp.logical_not(place.is_paged(tile)))
        def _():
            source.copy_block(which, tile)
            plgpu.barrier_wait(s["block_full"].at[0])
            source.compose(tile, out)

        source.hand_over(slot, name)

    for ahead in range(plan.ahead - 1):
        start(0, "k", place.first + ahead)
        start(1, "v", place.first + ahead)

    @pl.loop(place.first, place.last)
    def _(tile):
        convert(0, "k", tile)
        convert(1, "v", tile)


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


def _compute_tiles(plan: Plan, place: _Place, pages, warpgroup, q, seen, scales, refs, s) -> None:
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


def _head_rows(plan: Plan, place: _Place, rows: _Rows) -> Any:
    """Of queries and of the result."""
    start = (place.batch * plan.num_kv_heads + place.head) * plan.padded_rows + rows.start
    return pl.ds(pl.multiple_of(start, 8), plan.fetched_rows)


def _step(plan: Plan, place: _Place, pages, warpgroup, rows: _Rows, k_scale, s, tile, carry):
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


def _visible(plan: Plan, place: _Place, pages: _PageTable, rows: _Rows, tile: Any) -> Array:
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


def _write(plan: Plan, place: _Place, rows: _Rows, parts, norm, out, s) -> None:
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


def _write_partial(plan: Plan, place: _Place, rows: _Rows, parts, top, total, refs) -> None:
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
