"""What a Hopper paged-attention kernel is compiled for, and pieces that its parts share."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Slots a tile, and query rows of a warpgroup: the rows of a wgmma instruction."""
WGMMA = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
LOWEST = -1e30
"""The largest score so far of a query that has seen nothing. Finite: masked scores are -inf."""
_SMEM_BYTES = 220 * 1024  # of 227 KiB; the rest is for barriers and reductions
_MAX_STAGES = 4
_MAX_AHEAD = 4
_TARGET_BLOCKS = 2 * 132  # of threads: two for each of an H100's processors


class RowScalar(enum.IntEnum):
    """The columns of `rows` `[B, 5]`."""

    LENGTH = 0
    """Slots in pages."""
    END = 1
    """The slot after the row's last."""
    FIRST_TILE = 2
    """Of those that anything sees."""
    CLEAN_FROM = 3
    CLEAN_UNTIL = 4
    """Tiles inside [CLEAN_FROM, CLEAN_UNTIL) need no mask; below CLEAN_UNTIL all is in pages."""


class Plan(NamedTuple):
    """Static shapes and choices."""

    batch: int
    head_dim: int
    num_kv_heads: int
    page_size: int
    num_pages: int
    pages_a_row: int
    block_width: int
    padded_rows: int
    """Query rows of a key/value head, with padding."""
    fetched_rows: int
    """Of the 64 of a warpgroup, those that exist and are fetched and stored."""
    query_tiles: int
    """Blocks of threads for the query rows of a head."""
    row_groups: int
    """Sets of 64 query rows of a block of threads."""
    column_groups: int
    """Warpgroups that share 64 rows, each with some columns of the values."""
    splits: int
    """Of the context."""
    tiles_a_split: int
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    scale: float
    softcap: float | None
    windowed: bool
    ahead: int
    """fp8 tiles of keys, and of values, on their way to be converted; 0: pages are not fp8."""

    @property
    def warpgroups(self) -> int:
        """Those that compute; one more fetches."""
        return self.row_groups * self.column_groups

    @property
    def columns(self) -> int:
        """Of the values, for one warpgroup."""
        return self.head_dim // self.column_groups

    @property
    def part_width(self) -> int:
        """Columns of one product with the values."""
        return TILE if self.columns % TILE == 0 else self.columns

    def part(self, index: Any) -> Any:
        """The columns of the part of that index."""
        return pl.ds(pl.multiple_of(index * self.part_width, self.part_width), self.part_width)

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of the tiles of a block of threads."""
        tiles = (self.row_groups + 2 * self.stages) * self.head_dim + self.warpgroups * TILE
        pages = (1 + 2 * self.ahead) * self.head_dim
        return TILE * (tiles * itemsize + pages * (1 if self.ahead else itemsize))


def make_plan(
    *,
    queries: tuple[int, ...],
    pages: tuple[int, ...],
    table: tuple[int, ...],
    block_width: int,
    itemsize: int,
    scale: float,
    softcap: float | None,
    windowed: bool,
    converts: bool,
) -> Plan:
    """The plan for shapes `[B, T, N, H]`, `[P, S, Nkv, H]`, `[B, M]` and queries' bytes a number.

    A split is so many tiles that a full context gives every processor two blocks of threads, 8 to
    64. It is a function of shapes only, so a row's bits do not depend on the other rows.
    """
    batch, num_tokens, num_heads, head_dim = queries
    num_pages, page_size, num_kv_heads, _ = pages
    rows = num_tokens * (num_heads // num_kv_heads)
    column_groups = 2 if head_dim > 128 else 1  # registers hold 64 x 128 sums
    row_groups = 1 if rows <= TILE or column_groups == 2 else 2
    query_tiles = -(-rows // (row_groups * TILE))
    padded_rows = -(-rows // 8) * 8 if rows <= TILE else query_tiles * row_groups * TILE
    num_tiles = -(-(table[1] * page_size + block_width) // TILE)
    tiles_a_split = 64
    blocks = batch * num_kv_heads * query_tiles
    while tiles_a_split > 8 and blocks * -(-num_tiles // tiles_a_split) < _TARGET_BLOCKS:
        tiles_a_split //= 2
    plan = Plan(
        batch=batch,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        num_pages=num_pages,
        pages_a_row=table[1],
        block_width=block_width,
        padded_rows=padded_rows,
        fetched_rows=min(padded_rows, TILE),
        query_tiles=query_tiles,
        row_groups=row_groups,
        column_groups=column_groups,
        splits=-(-num_tiles // tiles_a_split),
        tiles_a_split=tiles_a_split,
        stages=_MAX_STAGES,
        scale=scale,
        softcap=softcap,
        windowed=windowed,
        ahead=_MAX_AHEAD if converts else 0,
    )
    while plan.ahead > 2 and plan.smem_bytes(itemsize) > _SMEM_BYTES:
        plan = plan._replace(ahead=plan.ahead - 1)
    while plan.smem_bytes(itemsize) > _SMEM_BYTES:
        plan = plan._replace(stages=plan.stages - 1)
    return plan


def transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    """Tiling and swizzle of shared memory that is read `width` columns at a time, so that wgmma
    can read it and registers load it without bank conflicts; none for rows of odd 16 bytes (fp8
    heads of 80, which no wgmma reads)."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(width * bits)
    if swizzle == 16:
        return ()
    # pyright takes both for abstract classes
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def tiles_of_row(rows: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The tiles [first, last) that hold what a row sees."""
    last = lax.div(jnp.maximum(rows[batch, RowScalar.END], 0) + (TILE - 1), jnp.int32(TILE))
    return rows[batch, RowScalar.FIRST_TILE], last
