"""What paged attention takes and gives, whoever computes it: arguments, checks, visibility.

Slots are absolute. Slot s of row b lies in page `block_table[b, s // page_size]` while it is
below `lengths[b]`; token j of the block in flight lies in slot `lengths[b] + j`. A query sees all
slots of its row below `lengths[b]`, and those tokens of the block that the mask allows; with a
window, of these only tokens less than `window` positions before it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

PAGE_TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")

# What the Hopper kernel takes:
MAX_BLOCK = 128
"""Tokens of a block. Beyond, the words that say which of them a query sees fill registers."""
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64)


class Arguments(NamedTuple):
    """The arguments of `paged_attention`, which explains them; defaults filled in."""

    queries: Array
    k_pages: Array
    v_pages: Array
    block_table: Array
    lengths: Array
    k_block: Array
    v_block: Array
    in_flight: Array
    mask: Array | None
    depths: Array | None
    window: int | None
    softcap: float | None
    scale: float
    k_scale: Array
    v_scale: Array


def check(a: Arguments) -> None:
    """Raises a ValueError or TypeError that names the first argument out of contract."""
    if a.queries.ndim != 4:
        raise ValueError(f"queries: [B, T, N, H] is needed, not {a.queries.shape}")
    B, T, N, H = a.queries.shape
    if a.k_pages.ndim != 4 or a.k_pages.shape[3] != H or N % a.k_pages.shape[2]:
        raise ValueError(
            f"k_pages: [P, S, Nkv, {H}] is needed, with {N} a multiple of Nkv, "
            f"not {a.k_pages.shape}"
        )
    Nkv = a.k_pages.shape[2]
    W = a.k_block.shape[1] if a.k_block.ndim == 4 else 0
    shapes = {
        "v_pages": (a.v_pages, a.k_pages.shape),
        "lengths": (a.lengths, (B,)),
        "k_block": (a.k_block, (B, max(W, T), Nkv, H)),
        "v_block": (a.v_block, a.k_block.shape),
        "in_flight": (a.in_flight, ()),
        "mask": (a.mask, (B, T, W)),
        "depths": (a.depths, (B, W)),
        "k_scale": (a.k_scale, ()),
        "v_scale": (a.v_scale, ()),
    }
    for name, (x, shape) in shapes.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: {list(shape)} is needed, not {list(x.shape)}")
    if a.block_table.ndim != 2 or a.block_table.shape[0] != B or a.block_table.shape[1] == 0:
        raise ValueError(f"block_table: [{B}, M] is needed, not {list(a.block_table.shape)}")
    _check_types(a)
    for name, value in (("window", a.window), ("softcap", a.softcap), ("scale", a.scale)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: a number above 0 is needed, not {value}")


def _check_types(a: Arguments) -> None:
    if a.queries.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"queries: bfloat16, float16 or float32, not {a.queries.dtype}")
    if a.k_pages.dtype not in PAGE_TYPES:
        raise TypeError(f"k_pages: {', '.join(PAGE_TYPES)}, not {a.k_pages.dtype}")
    for name in ("v_pages", "k_block", "v_block"):
        dtype = getattr(a, name).dtype
        if dtype != a.k_pages.dtype:
            raise TypeError(f"{name}: {a.k_pages.dtype} as k_pages, not {dtype}")
    for name in ("block_table", "lengths", "in_flight"):
        dtype = getattr(a, name).dtype
        if dtype != jnp.int32:
            raise TypeError(f"{name}: int32 is needed, not {dtype}")
    if a.mask is not None and a.mask.dtype != jnp.bool_:
        raise TypeError(f"mask: bool is needed, not {a.mask.dtype}")
    if a.depths is not None and a.depths.dtype != jnp.int32:
        raise TypeError(f"depths: int32 is needed, not {a.depths.dtype}")


def declined(a: Arguments) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    head_dim, width, page_size = a.queries.shape[3], a.k_block.shape[1], a.k_pages.shape[1]
    if a.queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, not {a.queries.dtype}"
    if a.k_pages.dtype not in (a.queries.dtype, jnp.float8_e4m3fn):
        return f"pages of {a.k_pages.dtype} with queries of {a.queries.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim}, not of {', '.join(map(str, HEAD_DIMS))}"
    if page_size not in PAGE_SIZES:
        return f"pages of {page_size} slots, not of {', '.join(map(str, PAGE_SIZES))}"
    if width > MAX_BLOCK:
        return f"{width} tokens in flight, more than {MAX_BLOCK}"
    return None


def block_visible(a: Arguments) -> Array:
    """`[B or 1, T, W]` bool: which tokens of the block each query sees."""
    T, W = a.queries.shape[1], a.k_block.shape[1]
    queries = a.in_flight + jnp.arange(T, dtype=jnp.int32)
    visible = a.mask
    if visible is None:
        visible = (jnp.arange(W, dtype=jnp.int32) <= queries[:, None])[None]
    if a.window is not None:
        depths = _depths(a)
        visible = visible & (depths[:, queries, None] - depths[:, None] < a.window)
    return visible


def oldest_slots(a: Arguments) -> Array:
    """`[B, T]` int32: the first slot that each query sees; without a window below all."""
    T = a.queries.shape[1]
    if a.window is None:
        return jnp.zeros((a.lengths.size, T), jnp.int32)
    queries = a.in_flight + jnp.arange(T, dtype=jnp.int32)
    return a.lengths[:, None] + _depths(a)[:, queries] - (a.window - 1)


def _depths(a: Arguments) -> Array:
    """`[B or 1, W]`: the position of each block token after `lengths`."""
    return jnp.arange(a.k_block.shape[1], dtype=jnp.int32)[None] if a.depths is None else a.depths


def pages_inside(a: Arguments) -> Array:
    """`[B, M]` bool: which entries of the block table point into the pool."""
    return (a.block_table >= 0) & (a.block_table < a.k_pages.shape[0])


def block_end(a: Arguments) -> Array:
    """Scalar int32: tokens of the block up to the last that any query may see."""
    if a.mask is not None:
        return jnp.int32(a.k_block.shape[1])
    return a.in_flight + a.queries.shape[1]
