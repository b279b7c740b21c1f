"""Which part of the work a block of threads does, and the pages of its row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.plan import TILE, Plan


class Place(NamedTuple):
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


class PageTable(NamedTuple):
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
