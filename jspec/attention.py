"""Attention of the tokens in flight over a cache: what a model calls, once a layer.

The computation is `pallas_kernels.paged_attention`: the Hopper kernel or plain JAX behind one
contract. Under a mesh each device attends with its own heads and rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jspec import cache as cache_lib
from jspec.cache import PAGE_AXES, Cache, KeysValues
from jspec.sharding import partition_spec
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import paged_attention


def attend(
    cache: Cache, layer: int, queries: Array, keys: Array, values: Array
) -> tuple[Array, Cache]:
    """Appends keys and values to the block in flight and attends over the row and what the
    tokens see of the block: those before them, or what `cache.mask` says.

    Args:
      cache: with an open block (`cache.open_block`).
      layer: whose pages and block to use.
      queries: `[B, T, N, H]`, rotated, of the tokens at `cache.positions(T)`.
      keys, values: `[B, T, Nkv, H]` of the same tokens; N is a multiple of Nkv.
    Returns:
      `[B, T, N, H]` in the dtype of `queries`, and the cache with the block extended.
    """
    cache = cache_lib.append(cache, layer, keys, values)
    mask = cache.mask
    if mask is not None:
        mask = jax.lax.dynamic_slice_in_dim(mask, cache.in_flight, queries.shape[1], axis=1)
    out = _attend(
        queries,
        cache.pages[layer],
        cache.block[layer],
        cache.table,
        cache.lengths,
        jnp.asarray(cache.in_flight),
        mask,
        cache.depths,
        implementation=dispatch.current(),
    )
    return out, cache


@functools.partial(jax.jit, static_argnames="implementation")
@jax.named_scope("attention")
def _attend(
    queries: Array,
    pages: KeysValues,
    block: KeysValues,
    table: Array,
    lengths: Array,
    in_flight: Array,
    mask: Array | None,
    depths: Array | None,
    *,
    implementation: dispatch.Implementation,
) -> Array:
    """Traced once, not once a layer: half of the time to a first token is tracing."""

    def attend_locally(*arguments: Any) -> Array:
        *others, mask, depths = arguments
        return paged_attention(*others, mask=mask, depths=depths, implementation=implementation)

    arguments = (queries, *pages, table, lengths, *block, in_flight, mask, depths)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend_locally(*arguments)
    num_kv_heads = pages.keys.shape[2]

    def spec(axes: tuple[str | None, ...], x: Array | None) -> PartitionSpec:
        if x is None:
            return PartitionSpec()
        sizes = (
            num_kv_heads if axis == "kv_heads" else n for axis, n in zip(axes, x.shape, strict=True)
        )
        return partition_spec(mesh, tuple(sizes), axes)

    tokens = ("batch", None, "kv_heads", None)  # query heads go with their key/value heads
    rows, tree = ("batch", None), (("batch", None, None), ("batch", None))
    axes = (tokens, PAGE_AXES, PAGE_AXES, rows, ("batch",), tokens, tokens, (), *tree)
    specs = tuple(map(spec, axes, arguments))
    return jax.shard_map(
        attend_locally, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False
    )(*arguments)
