"""Keys and values of a batch: committed tokens in pages, tokens in flight in a block beside them.

A cache is a value. A forward pass reads `pages` and writes only `block`; `commit` is the one
function that writes pages, and it writes accepted tokens only, so a rejected token has never
been in a page and nothing is ever rewound. Knows nothing of models or of tokens as text.

Slots are absolute: token number s of a row lies in slot s, which is slot `s % page_size` of page
`table[row, s // page_size]`. Block token j of a row lies in slot `lengths[row] + j`, which in a
chain is its position; tokens of a tree have positions of their own (`depths`). A slot outside
the table is nowhere: writes to it vanish, reads of it are masked.

    lengths = [3], page_size = 2, table = [[5, 0, 7]], block of two tokens x, y
    slot    0     1     2     3       4
    lies in 5[0]  5[1]  0[0]  block 0  block 1
    commit(cache, count=[1]) copies x to 0[1]; lengths = [4]; y is forgotten
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

PAGE_AXES = (None, None, "kv_heads", None)
"""Logical names of the axes of pages (rules: `sharding.RULES`)."""


class CacheSpec(NamedTuple):
    """What a model needs of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KeysValues(NamedTuple):
    """Keys and values of one layer, either as pages or as a block."""

    keys: Array
    values: Array


class Cache(flax.struct.PyTreeNode):
    """Keys and values of B rows in L layers."""

    pages: tuple[KeysValues, ...]
    """Per layer, `[num_pages, page_size, Nkv, H]`; committed tokens only."""
    page_size: int = flax.struct.field(pytree_node=False)
    """Slots a page."""
    table: Array
    """`[B, pages of a row]` int32: the page that holds the slots of each page-sized stretch."""
    lengths: Array
    """`[B]` int32: slots in pages. -1 is allowed: block token 0 is then nowhere."""
    block: tuple[KeysValues, ...] = ()
    """Per layer, `[B, T, Nkv, H]`: the tokens in flight. Empty between rounds."""
    in_flight: Array | int = 0
    """Scalar: block tokens before the ones that the next forward pass appends."""
    depths: Array | None = None
    """`[B, T]` int32: how many positions each block token stands behind `lengths`; None: as many
    as there are block tokens before it, a chain."""
    mask: Array | None = None
    """`[B, T, T]` bool: which block tokens each of them sees; None: those before it and itself."""
    held: Array | None = None
    """`[B, R]` bool: which of the first R block tokens stand (see `hold`); None: R = 0."""

    @property
    def num_held(self) -> int:
        """R: tokens of the block that an open one stands behind."""
        return 0 if self.held is None else self.held.shape[1]

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.table.shape[1] * self.page_size

    def positions(self, width: int) -> Array:
        """`[B, width]` positions of the tokens that the next forward pass appends."""
        if self.depths is None:
            return (self.lengths + self.in_flight)[:, None] + jnp.arange(width, dtype=jnp.int32)
        depths = jax.lax.dynamic_slice_in_dim(self.depths, self.in_flight, width, axis=1)
        return self.lengths[:, None] + depths


def init_cache(spec: CacheSpec, batch: int, capacity: int, *, page_size: int, dtype: Any) -> Cache:
    """An empty cache in which row b owns the pages `b*m .. (b+1)*m - 1`, m pages a row."""
    pages_a_row = -(-capacity // page_size)
    num_pages = batch * pages_a_row
    shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    return Cache(
        pages=tuple(
            KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
            for _ in range(spec.num_layers)
        ),
        page_size=page_size,
        table=jnp.arange(num_pages, dtype=jnp.int32).reshape(batch, pages_a_row),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def fork(cache: Cache, parent: Array) -> Cache:
    """A cache of `parent.size` rows in which row b goes on from row `parent[b]`.

    A row's first child takes over its pages. The others share those that it has filled; the one
    it is in the middle of is copied, and the rest are their own: of a row without a child, or of
    the pool, which grows in proportion to the rows. For caches that were not forked before,
    between rounds, with no fewer rows than they have.
    """
    rows, (old_rows, pages_a_row) = parent.size, cache.table.shape
    index, old_index = (jnp.arange(n, dtype=jnp.int32) for n in (rows, old_rows))
    is_first = jnp.argmax(parent[:, None] == parent, axis=1) == index
    lengths = cache.lengths[parent]
    has_child = jnp.any(parent == old_index[:, None], axis=1)
    free = jnp.concatenate([jnp.argsort(has_child), jnp.arange(old_rows, rows + old_rows)])
    nth = jnp.cumsum(~is_first, dtype=jnp.int32) - 1  # of the children that are not first
    num_free = old_rows - jnp.sum(has_child, dtype=jnp.int32)
    own_row = free[jnp.where(nth < num_free, nth, nth - num_free + old_rows)]
    own = own_row[:, None] * pages_a_row + jnp.arange(pages_a_row, dtype=jnp.int32)
    filled = jnp.maximum(lengths, 0)[:, None] // cache.page_size
    shared = is_first[:, None] | (jnp.arange(pages_a_row) < filled)
    table = jnp.where(shared, cache.table[parent], own)
    half_filled = jnp.minimum(filled, pages_a_row - 1)
    source, copy = (
        jnp.take_along_axis(x, half_filled, axis=1)[:, 0] for x in (cache.table[parent], table)
    )

    def widen(pages: Array) -> Array:
        room = jnp.zeros(((rows - old_rows) * pages_a_row, *pages.shape[1:]), pages.dtype)
        return jnp.concatenate([pages, room]).at[copy].set(pages[source])

    pages = tuple(KeysValues(widen(kv.keys), widen(kv.values)) for kv in cache.pages)
    return cache.replace(pages=pages, table=table, lengths=lengths)


def open_block(
    cache: Cache, width: int, *, depths: Array | None = None, mask: Array | None = None
) -> Cache:
    """The cache with an empty block that has room for `width` tokens in flight: a chain, or what
    `depths` `[B, width]` and `mask` `[B, width, width]` say. It stands behind the tokens that the
    cache holds (see `hold`)."""
    batch = cache.table.shape[0]
    room = tuple(
        KeysValues(*(jnp.zeros((batch, width, *x.shape[2:]), x.dtype) for x in kv))
        for kv in cache.pages
    )
    if cache.held is None:
        return cache.replace(block=room, in_flight=0, depths=depths, mask=mask)
    assert cache.depths is not None
    held, index = cache.held, jnp.arange(width, dtype=jnp.int32)
    own_depths = jnp.broadcast_to(index, (batch, width)) if depths is None else depths
    own_mask = jnp.broadcast_to(index <= index[:, None], (batch, width, width))
    seen = jnp.broadcast_to(held[:, None], (batch, width, held.shape[1]))
    rows = jnp.concatenate([seen, own_mask if mask is None else mask], axis=2)
    before = jnp.sum(held, axis=1, dtype=jnp.int32)[:, None]
    return cache.replace(
        block=jax.tree.map(_behind, cache.block, room),
        in_flight=held.shape[1],
        depths=_behind(cache.depths, before + own_depths),
        mask=jnp.pad(rows, [(0, 0), (held.shape[1], 0), (0, 0)]),
    )


def hold(cache: Cache, block: tuple[KeysValues, ...], count: Array) -> Cache:
    """The cache with tokens in flight that stand until further notice, behind those that do
    already: the first `count[b]` of `block`, keys and values `[B, R, Nkv, H]` of the layers that
    they have been through. Blocks that are opened later stand behind them; `commit` of what such
    a block becomes is not for this cache, whose pages know none of it.
    """
    batch, width = count.size, block[0].keys.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)
    stand, depths = index < count[:, None], jnp.broadcast_to(index, (batch, width))
    room = tuple(
        KeysValues(*(jnp.zeros((batch, width, *x.shape[2:]), x.dtype) for x in kv))
        for kv in cache.pages[len(block) :]
    )
    new = (*block, *room)
    if cache.held is not None:
        assert cache.depths is not None
        before = jnp.sum(cache.held, axis=1, dtype=jnp.int32)[:, None]
        new = jax.tree.map(_behind, cache.block, new)
        stand, depths = _behind(cache.held, stand), _behind(cache.depths, before + depths)
    return cache.replace(block=new, held=stand, depths=depths, in_flight=stand.shape[1])


def newest_keys(cache: Cache, layer: int) -> Array:
    """`[B, Nkv, H]`: a layer's keys of the last token that a row holds or has committed; zeros
    where there is none."""
    slot = cache.lengths - 1
    page = jnp.take_along_axis(cache.table, slot[:, None] // cache.page_size, 1, mode="clip")[:, 0]
    committed = cache.pages[layer].keys[page, slot % cache.page_size]
    committed = jnp.where((slot >= 0)[:, None, None], committed, jnp.zeros_like(committed))
    if cache.held is None:
        return committed
    index = jnp.arange(cache.held.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(cache.held, index, -1), axis=1)
    block = cache.block[layer].keys
    held = jnp.take_along_axis(block, jnp.maximum(last, 0)[:, None, None, None], axis=1)[:, 0]
    return jnp.where((last >= 0)[:, None, None], held, committed)


def own_block(cache: Cache) -> tuple[KeysValues, ...]:
    """The open block without the tokens that it stands behind."""
    return jax.tree.map(lambda x: x[:, cache.num_held :], cache.block)


def _behind(first: Array, second: Array) -> Array:
    return jnp.concatenate([first, second], axis=1)


def append(cache: Cache, layer: int, keys: Array, values: Array) -> Cache:
    """Writes `[B, T, Nkv, H]` keys and values of one layer behind those in flight.

    The tokens count as in flight for later passes once the caller has raised `in_flight`.
    """
    old = cache.block[layer]
    start = (0, cache.in_flight, 0, 0)
    new = KeysValues(
        _update(old.keys, keys.astype(old.keys.dtype), start),
        _update(old.values, values.astype(old.values.dtype), start),
    )
    return cache.replace(block=(*cache.block[:layer], new, *cache.block[layer + 1 :]))


def commit(cache: Cache, count: Array) -> Cache:
    """Copies the first `count[b]` block tokens of each row into its pages and drops the block.

    Give a `count` that depends on the outputs of every pass that reads the pages: XLA then knows
    that all reads come first, and updates the pages in place.
    """

    width = cache.block[0].keys.shape[1] if cache.block else 0
    page, offset = _places(cache, count, width)
    pages = tuple(
        KeysValues(*(_write(p, b, page, offset) for p, b in zip(kv, new, strict=True)))
        for kv, new in zip(cache.pages, cache.block, strict=True)
    )
    return cache.replace(
        pages=pages, lengths=cache.lengths + count, block=(), in_flight=0, depths=None, mask=None
    )


def commit_read(cache: Cache, count: Array) -> Cache:
    """`commit` behind a pass that is there for its keys and values alone.

    Every layer but the last, whose attention nobody needs, has read its pages once the last
    layer's keys are there: the writes are tied to them.
    """
    count, block = jax.lax.optimization_barrier((count, cache.block))
    return commit(cache.replace(block=block), count)


def _places(cache: Cache, count: Array, width: int) -> tuple[Array, Array]:
    """Page and offset `[B, width]` of the block tokens; for those not kept, a page beyond all."""
    index = jnp.arange(width, dtype=jnp.int32)
    slots = cache.lengths[:, None] + index
    keep = (index < count[:, None]) & (slots >= 0) & (slots < cache.capacity)
    page = jnp.take_along_axis(cache.table, slots // cache.page_size, axis=1, mode="clip")
    return jnp.where(keep, page, jnp.iinfo(jnp.int32).max), slots % cache.page_size


@jax.jit  # traced once, not once a layer
def _write(pages: Array, block: Array, page: Array, offset: Array) -> Array:
    return pages.at[page, offset].set(block, mode="drop")


def _update(block: Array, new: Array, start: tuple[Any, ...]) -> Array:
    if new.shape == block.shape:
        return new
    return jnp.asarray(block).at[:, jnp.arange(new.shape[1]) + start[1]].set(new)
