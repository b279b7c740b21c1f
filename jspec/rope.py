"""Rotary positions (Su et al., arXiv 2104.09864) and the ways of stretching them.

A token's angles are a function of its own position alone, in every kind. For `dynamic` this
means the frequencies of a context that ends at the token, which is what decoding token by token
gives elsewhere; a library that recomputes them from the longest position of a call lets them
depend on how the text was cut into calls.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.config import ModelConfig, RopeScaling


def apply_rope(heads: Array, positions: Array, config: ModelConfig) -> Array:
    """Rotates the first `config.rotary_dim` numbers R of `[B, T, heads, *]` by `positions`
    `[B, T]`.

    Numbers are paired half of R apart, as on Hugging Face, or side by side (`rope_interleave`);
    either way the pairs' first numbers come first in the result, since what meets it has been
    rotated, too."""
    cos, sin = _cos_sin(positions, config)
    turning, still = jnp.split(heads, [config.rotary_dim], axis=-1)
    first, second = _pairs(turning.astype(jnp.float32), config)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(heads.dtype), still], axis=-1)


def _pairs(turning: Array, config: ModelConfig) -> tuple[Array, Array]:
    """First and second numbers `[B, T, heads, R/2]` of the pairs that turn together."""
    if config.rope_interleave:
        return turning[..., 0::2], turning[..., 1::2]
    first, second = jnp.split(turning, 2, axis=-1)
    return first, second


def _cos_sin(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """`[B, T, 1, R/2]` float32 each."""
    where = positions.astype(jnp.float32)[..., None, None]
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        angles = where * _dynamic_frequencies(where + 1.0, scaling, config)
        return jnp.cos(angles), jnp.sin(angles)
    frequencies, magnitude = static_frequencies(config)
    angles = where * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def static_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """`[R/2]` frequencies and the factor on cos and sin, for every kind but `dynamic`."""
    half = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    plain = config.rope_theta**-half
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, scaling, config)
    raise ValueError(f"{scaling.kind=} has no fixed frequencies")


def _dynamic_frequencies(context: Array, scaling: RopeScaling, config: ModelConfig) -> Array:
    """NTK-aware base for a context of that many tokens; unscaled up to the trained one."""
    trained = config.max_position_embeddings  # as transformers has it, whatever else is set
    stretch = scaling.factor * jnp.maximum(context, trained) / trained - (scaling.factor - 1.0)
    exponent = config.rotary_dim / (config.rotary_dim - 2)
    base = config.rope_theta * stretch**exponent
    half = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    return base**-half


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long waves divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> tuple[np.ndarray, float]:
    """Interpolates slow dimensions, keeps fast ones (arXiv 2309.00071, section 3.2)."""
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings

    def dimension(turns: float) -> float:
        """The (fractional) pair index that turns that often over the trained context."""
        log_base = math.log(config.rope_theta)
        return config.rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * log_base)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    pair = np.arange(config.rotary_dim // 2)
    interpolated = np.clip((pair - low) / max(high - low, 1e-3), 0.0, 1.0)
    mixed = plain / scaling.factor * interpolated + plain * (1 - interpolated)
    return mixed, _yarn_magnitude(scaling)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    """The attention temperature, as a factor on cos and sin (arXiv 2309.00071, eq. 22)."""

    def of(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return of(scaling.mscale) / of(scaling.mscale_all_dim)
    return of(1.0)
