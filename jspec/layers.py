"""What decoder layers are made of: norms, products with weights, the gated MLP.

Knows nothing of attention or of which layer it is in.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.quantised import QuantisedWeight, quantised_product

Weight = Array | QuantisedWeight


def rms_norm(x: Array, scale: Array | None, eps: float) -> Array:
    """Root-mean-square norm over the last axis, computed in float32 (arXiv 1910.07467). Without
    a `scale` there is no norm: `x` as it is."""
    if scale is None:
        return x
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


def linear(
    x: Array, weight: Weight, bias: Array | None, *, inputs: int = 1, dtype: Any = None
) -> Array:
    """`x @ weight.T + bias` over the last `inputs` axes of both; the other axes of `weight` are
    the output's, whose type is `dtype` (None: that of `x`). Done as one matrix product: XLA would
    transpose a weight of three axes."""
    leading, outer = x.shape[: x.ndim - inputs], weight.shape[: weight.ndim - inputs]
    rows = x.reshape(*leading, -1)
    is_single = math.prod(leading) == 1 and _is_slow_singly(x.dtype)
    if is_single:
        rows = jnp.concatenate([rows, rows], axis=-2)
    if isinstance(weight, QuantisedWeight):
        flat = quantised_product(rows, weight, dtype or x.dtype)
    else:
        flat = jax.lax.dot_general(
            rows,
            weight.reshape(math.prod(outer), -1),
            (((len(leading),), (1,)), ((), ())),
            preferred_element_type=dtype,
        )
    if is_single:
        flat = flat[..., :1, :]
    out = flat.reshape(*leading, *outer)
    return out if bias is None else out + bias


def _is_slow_singly(dtype: Any) -> bool:
    """Whether a product of one row is slower than one of two: XLA on a CPU, in 16-bit types."""
    return dtype.itemsize == 2 and jax.default_backend() == "cpu"


def gated_mlp(
    x: Array,
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    gate_bias: Array | None = None,
    up_bias: Array | None = None,
    down_bias: Array | None = None,
) -> Array:
    """`[..., D]` of `x` `[..., D]`: the gated MLP (SwiGLU, arXiv 2002.05202) with matrices
    `[F, D]`, `[F, D]` and `[D, F]`."""
    hidden = _gated(linear(x, gate, gate_bias), linear(x, up, up_bias))
    return linear(hidden, down, down_bias)


def _gated(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`, computed in float32 (also twice as fast on a CPU as in bfloat16)."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


def times_sigmoid(x: Array, gate: Array) -> Array:
    """`x * sigmoid(gate)`, computed in float32, in the dtype of `x`."""
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)
