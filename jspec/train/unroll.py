"""A head run over whole texts as it will run when it drafts: the training-time test.

Step 0 reads the target's features everywhere. Step j reads, at entry t, what step j - 1 put out at
entry t - 1, as the j-th draft step behind the entry t - j (its anchor) will (EAGLE-3, arXiv
2503.01840, section 3.2). What it may see is what is there then: features up to the anchor, its own
path behind it.

    5 tokens, step 2    entry 3 stands for drafting behind entry 1: it reads what step 1 put out at
                        entry 2, and sees step 0 at 0 and 1, step 1 at 2, step 2 at 3 (itself)

Whatever the step, entry t predicts token t + 2. Knows nothing of losses or data.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import heads
from jspec.head_params import HeadConfig, HeadParams


class Path(NamedTuple):
    """Keys and values of the steps so far, for `attend`; the memory of `heads.forward`."""

    segments: Array
    """`[B, S]` int32: entries see entries of their own segment only."""
    keys: tuple[tuple[Array, ...], ...]
    """Of each layer, of each step: `[B, S, Nkv, H]`."""
    values: tuple[tuple[Array, ...], ...]


def unrolled(
    params: HeadParams,
    config: HeadConfig,
    features: tuple[Array, ...],
    tokens: Array,
    *,
    positions: Array,
    segments: Array,
    num_steps: int,
) -> tuple[Array, ...]:
    """Outputs `[B, S, D]` of each step; entry t of step j is void unless t - j is in its segment.

    Args:
      features: of the target at each token, each `[B, S, target D]`.
      tokens, positions, segments: `[B, S]` int32; positions are slots in a token's own text.
    """
    following = earlier(tokens, 1)
    carried = heads.fuse(params, config, features)
    nothing = ((),) * config.layers.num_hidden_layers
    path, outputs = Path(segments, nothing, nothing), []
    for _ in range(num_steps):
        hidden, path = heads.forward(
            params, config, following, carried, path, positions=positions, attend=attend
        )
        outputs.append(hidden)
        carried = later(heads.carry(params, config, hidden), 1)
    return tuple(outputs)


def attend(
    path: Path, layer: int, queries: Array, keys: Array, values: Array
) -> tuple[Array, Path]:
    """Attends from the next step of a layer over the steps before it and itself.

    Args:
      queries: `[B, S, N, H]`.
      keys, values: `[B, S, Nkv, H]`.
    Returns:
      `[B, S, N, H]` in the dtype of `queries`, and the path with the step added.
    """
    path = path._replace(
        keys=_added(path.keys, layer, keys), values=_added(path.values, layer, values)
    )
    with jax.named_scope("attention"):
        return _attended(queries, path.keys[layer], path.values[layer], path.segments), path


def _added(
    layers: tuple[tuple[Array, ...], ...], layer: int, new: Array
) -> tuple[tuple[Array, ...], ...]:
    return (*layers[:layer], (*layers[layer], new), *layers[layer + 1 :])


def _attended(
    queries: Array, keys: tuple[Array, ...], values: tuple[Array, ...], segments: Array
) -> Array:
    """Softmax in two parts: a causal matrix over step 0, and one key of each later step.

    Heads stand before entries throughout, so that no matrix is transposed."""
    (B, S, N, H), step = queries.shape, len(keys) - 1
    keys, values = (tuple(jnp.swapaxes(x, 1, 2) for x in xs) for xs in (keys, values))
    Nkv = keys[0].shape[1]
    scaled = (queries * jnp.asarray(H**-0.5, queries.dtype)).reshape(B, S, Nkv, -1, H)
    scaled = jnp.moveaxis(scaled, 1, 3)  # [B, Nkv, G, S, H]
    scores = jnp.einsum("BNGSH,BNUH->BNGSU", scaled, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(_seen(segments, step)[:, None, None], scores, -jnp.inf)
    own_keys, own_values = (
        [_later(x, step - i, axis=2)[:, :, None] for i, x in enumerate(xs[1:], 1)]
        for xs in (keys, values)
    )
    wide = scaled.astype(jnp.float32)
    own = [jnp.sum(wide * x.astype(jnp.float32), axis=-1) for x in own_keys]
    peak = functools.reduce(jnp.maximum, own, scores.max(axis=-1))
    peak = jax.lax.stop_gradient(peak)[..., None]
    weights = jnp.exp(scores - peak)
    own_weights = [jnp.exp(x[..., None] - peak) for x in own]
    total = sum(own_weights, weights.sum(axis=-1, keepdims=True))
    attended = jnp.einsum(
        "BNGSU,BNUH->BNGSH",
        weights.astype(values[0].dtype),
        values[0],
        preferred_element_type=jnp.float32,
    )
    for weight, value in zip(own_weights, own_values, strict=True):
        attended += weight * value.astype(jnp.float32)
    attended = jnp.moveaxis((attended / total).astype(queries.dtype), 3, 1)
    return attended.reshape(B, S, N, H)


def _seen(segments: Array, step: int) -> Array:
    """`[B, S, S]` bool: which entries of step 0 an entry of `step` sees."""
    index = jnp.arange(segments.shape[1])
    return (index <= index[:, None] - step) & (segments[:, :, None] == segments[:, None])


def later(x: Array, places: int) -> Array:
    """`x` `[B, S, ...]` with what stood at entry t at t + `places`; zeros before it."""
    return _later(x, places, axis=1)


def _later(x: Array, places: int, *, axis: int) -> Array:
    zeros = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, places, axis=axis))
    kept = jax.lax.slice_in_dim(x, 0, x.shape[axis] - places, axis=axis)
    return jnp.concatenate([zeros, kept], axis=axis)


def earlier(x: Array, places: int) -> Array:
    """`x` `[B, S, ...]` with what stood at entry t at t - `places`; zeros behind it."""
    return jnp.concatenate([x[:, places:], jnp.zeros_like(x[:, :places])], axis=1)


def anchored(segments: Array, step: int) -> Array:
    """`[B, S]` bool: the entry `step` places before is in the same text (segment 0 is none)."""
    return (later(segments, step) == segments) & (segments > 0)
