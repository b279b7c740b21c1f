"""The memory warpgroup of paged attention: pages and block to shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.place_sm90 import PageTable, Place
from pallas_kernels.paged_attention.plan import TILE, WGMMA, Plan


class Source(NamedTuple):
    """Where the memory warpgroup reads (keys first, values second) and writes."""

    plan: Plan
    place: Place
    table: PageTable
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
            old, own = (
                load_tile(x.at[:, columns], out.dtype) for x in (out, self.smem["block_tile"])
            )
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


def load_tile(tile: Any, dtype: Any) -> Array:
    """A tile in registers; fp8 goes by way of float16, the one conversion that Hopper has."""
    x = plgpu.load(tile, layout=WGMMA, optimized=False)
    if x.dtype != dtype:
        x = x.astype(jnp.float16)
    return x if x.dtype == dtype else x.astype(jnp.float32).astype(dtype)


def fetch(source: Source) -> None:
    """All that the memory warpgroup does."""
    (_fetch_converted if source.plan.ahead else _fetch_direct)(source)
    source.drain()


def _fetch_direct(source: Source) -> None:
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


def _fetch_converted(source: Source) -> None:
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
            out[:, columns] = load_tile(pages.at[:, columns], out.dtype)

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
