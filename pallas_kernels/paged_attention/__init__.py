"""Attention of the tokens in flight over pages and block."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.contract import Arguments, check, declined


def paged_attention(
    queries: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    lengths: Array,
    k_block: Array,
    v_block: Array,
    in_flight: Array | int = 0,
    *,
    mask: Array | None = None,
    depths: Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
    implementation: Implementation | str | None = None,
) -> Array:
    """Attends from the block's tokens to a row's pages and to the block itself.

    Args:
      queries: `[B, T, N, H]` of block tokens `in_flight` to `in_flight + T - 1`, rotated.
      k_pages, v_pages: `[P, S, Nkv, H]`; N is a multiple of Nkv. Of the type of the queries, or
        float8_e4m3fn with `k_scale`, `v_scale`.
      block_table: `[B, M]` int32: the page of each S slots of a row. Slots of a page outside
        0 .. P - 1 are seen by nobody.
      lengths: `[B]` int32: slots in pages; below 0, the block begins before slot 0, and what of
        it lies there is seen by nobody.
      k_block, v_block: `[B, W, Nkv, H]`: the tokens in flight, W >= T, of the type of the pages.
      in_flight: scalar int32: block tokens before the queries.
      mask: `[B, T, W]` bool: which tokens of the block a query sees (a tree's ancestors and
        itself). None: those up to its own (causal).
      depths: `[B, W]` int32: positions of the block's tokens after `lengths`, for the window.
        None: 0, 1, 2, ...
      window: a query at position p sees positions above p - window. None: all.
      softcap: scores s become softcap * tanh(s / softcap). None: they stay.
      scale: of the scores; None: H ** -0.5.
      k_scale, v_scale: scalars that the pages and the block are to be multiplied by.
      implementation: see `dispatch`. The Hopper kernel takes W <= 128.
    Returns:
      `[B, T, N, H]` in the type of the queries; zeros where a query sees nothing.
    """
    arguments = Arguments(
        queries,
        k_pages,
        v_pages,
        block_table,
        lengths,
        k_block,
        v_block,
        jnp.asarray(in_flight),
        mask,
        depths,
        window,
        softcap,
        queries.shape[-1] ** -0.5 if scale is None else scale,
        jnp.asarray(k_scale, jnp.float32),
        jnp.asarray(v_scale, jnp.float32),
    )
    check(arguments)
    return _attend(arguments, choose("paged_attention", implementation, declined(arguments)))


def _attend(arguments: Arguments, chosen: Implementation) -> Array:
    if chosen is Implementation.XLA:
        return reference.attend(arguments)
    # Where no Hopper kernel runs, nobody waits for Pallas to be imported.
    from pallas_kernels.paged_attention import kernel_sm90

    return kernel_sm90.attend(arguments, interpret=chosen is Implementation.INTERPRET)
