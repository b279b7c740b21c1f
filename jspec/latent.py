"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads come of one narrow vector a token, and what of a key turns with the
position is the same in all heads. Here both are written out, so that the cache and attention are
those of any other layer: heads of `nope + rope` numbers, as many key/value heads as query heads,
and values that zeros fill up to that size (`model.rest_of_layer` cuts them off). A cache of the
narrow vectors would be smaller; a head's one layer is not where memory goes.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from jspec.config import LatentConfig, ModelConfig, RopeScaling
from jspec.layers import linear, rms_norm
from jspec.params import LayerParams
from jspec.rope import apply_rope

_EPS = 1e-6
"""Of the norms of narrow vectors, whatever `rms_norm_eps` is: so in the authors' code."""


def project_latent(
    params: LayerParams, config: ModelConfig, normed: Array, positions: Array
) -> tuple[Array, Array, Array]:
    """Queries, keys and values `[B, T, N, H]` of what attention reads, `[B, T, *]`."""
    latent, sizes = params.latent, config.latent
    assert latent is not None
    assert sizes is not None
    rank, nope = sizes.kv_lora_rank, sizes.qk_nope_head_dim
    queries = _queries(params, normed)
    turned = apply_rope(queries[..., nope:], positions, config)
    queries = jnp.concatenate([queries[..., :nope], turned], axis=-1).astype(jnp.float32)
    queries = (queries * _sharpened(config.rope_scaling)).astype(normed.dtype)

    narrow = linear(normed, latent.kv_a, None)
    pairs = linear(rms_norm(narrow[..., :rank], latent.kv_a_norm, _EPS), latent.kv_b, None)
    shared = apply_rope(narrow[..., None, rank:], positions, config)
    shared = jnp.broadcast_to(shared, (*pairs.shape[:-1], shared.shape[-1]))
    keys = jnp.concatenate([pairs[..., :nope], shared], axis=-1)
    return queries, keys, _filled_up(pairs[..., nope:], sizes)


def _queries(params: LayerParams, normed: Array) -> Array:
    """`[B, T, N, H]`, by way of a narrow vector if the layer has the matrices."""
    latent = params.latent
    assert latent is not None
    if latent.q_a is None or latent.q_b is None:
        assert params.q is not None
        return linear(normed, params.q, None)
    narrow = linear(normed, latent.q_a, None)
    return linear(rms_norm(narrow, latent.q_a_norm, _EPS), latent.q_b, None)


def _filled_up(values: Array, sizes: LatentConfig) -> Array:
    missing = sizes.head_dim - sizes.v_head_dim
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])


def _sharpened(scaling: RopeScaling | None) -> float:
    """Factor on the scores where yarn stretches the context: DeepSeek multiplies the softmax scale
    by the square of yarn's magnitude (arXiv 2309.00071, equation 22) for `mscale_all_dim`."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
