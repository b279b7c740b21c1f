"""What a head is trained to do: say what the target says, and carry on what it thinks.

Logits over the draft vocabulary exist for a few hundred entries at a time, in the forward pass
only: the output head is frozen, so the gradient of its inputs can be had there and then, and is
all that the backward pass needs. Entries that do not count (prompts, padding) have none at all.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from jspec.draws import largest

_CHUNK_TOKENS = 512
"""Entries whose logits exist at one time."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def soft_cross_entropy(
    outputs: Array, target: Array, lm_head: Array, weights: Array, groups: int = 1
) -> tuple[Array, Array]:
    """Cross entropy of each step's law against the target's, over the draft vocabulary.

    Args:
      outputs: `[J, B, S, D]` normed outputs of J steps.
      target: `[B, S, D]` the target's final hidden states that lead to the laws to learn.
      lm_head: `[V, D]` rows of the draft tokens; frozen, as `target`: no gradient for either.
      weights: `[J, B, S]` float32; no gradient either. What has none in any step costs nothing.
      groups: into which B is split, devices of a mesh: each gathers its own entries.
    Returns:
      `[J]` float32, sums over the entries of weight times -sum_x target(x) log head(x), and
      `[J, B, S]` int32, the likeliest draft token of each step (numbers of the draft vocabulary),
      void where no step has a weight.
    """
    return _asked_for(outputs, target, lm_head, weights, groups, with_gradient=False)[:2]


def _forward(
    outputs: Array, target: Array, lm_head: Array, weights: Array, groups: int
) -> tuple[tuple[Array, Array], Array]:
    losses, choices, gradient = _asked_for(
        outputs, target, lm_head, weights, groups, with_gradient=True
    )
    return (losses, choices), gradient


def _backward(
    groups: int, gradient: Array, cotangents: tuple[Array, Array]
) -> tuple[Array, None, None, None]:
    per_step = cotangents[0].astype(gradient.dtype)
    return gradient * per_step[:, None, None, None], None, None, None


soft_cross_entropy.defvjp(_forward, _backward)


def _asked_for(
    outputs: Array,
    target: Array,
    lm_head: Array,
    weights: Array,
    groups: int,
    *,
    with_gradient: bool,
) -> tuple[Array, Array, Array]:
    """Losses, choices and (or nothing) the gradient by `outputs`: the entries with a weight are
    brought to the front of their group and run chunk by chunk."""
    J, B, S, D = outputs.shape
    outputs, weights = outputs.reshape(J, groups, -1, D), weights.reshape(J, groups, -1)
    target = target.reshape(groups, -1, D)
    asked = jnp.any(weights > 0, axis=0)  # [G, n]
    order = jnp.argsort(~asked, axis=1, stable=True).astype(jnp.int32)
    size = _divisor(asked.shape[1], max(_CHUNK_TOKENS // groups, 1))
    num_chunks = -(-asked.sum(axis=1, dtype=jnp.int32).max() // size)
    group = jnp.arange(groups)[:, None]

    def one(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        number, losses, choices, gradients = carry
        place = jax.lax.dynamic_slice_in_dim(order, number * size, size, axis=1)
        loss, choice, gradient = _chunk(
            jnp.take_along_axis(outputs, place[None, :, :, None], axis=2),
            jnp.take_along_axis(target, place[:, :, None], axis=1),
            jnp.take_along_axis(weights, place[None], axis=2),
            lm_head,
            with_gradient=with_gradient,
        )
        choices = choices.at[:, group, place].set(choice, unique_indices=True)
        if with_gradient:
            gradients = gradients.at[:, group, place].set(gradient, unique_indices=True)
        return number + 1, losses + loss, choices, gradients

    nothing = (
        jnp.zeros((), jnp.int32),
        jnp.zeros((J,), jnp.float32),
        jnp.zeros((J, *asked.shape), jnp.int32),
        jnp.zeros((J, *asked.shape, D if with_gradient else 0), outputs.dtype),
    )
    _, losses, choices, gradients = jax.lax.while_loop(lambda c: c[0] < num_chunks, one, nothing)
    return losses, choices.reshape(J, B, S), gradients.reshape(J, B, S, -1)


def _chunk(
    outputs: Array, target: Array, weights: Array, lm_head: Array, *, with_gradient: bool
) -> tuple[Array, Array, Array]:
    """Losses `[J]`, choices `[J, G, c]` and the gradient `[J, G, c, D]` of some entries."""
    law = jax.nn.softmax(_logits(target, lm_head), axis=-1)
    losses, choices, gradients = [], [], []
    for output, weight in zip(outputs, weights, strict=True):
        logits = _logits(output, lm_head)
        peak, choice = largest(logits)
        grown = jnp.exp(logits - peak[..., None])
        total = grown.sum(axis=-1)
        entropy = peak + jnp.log(total) - jnp.sum(law * logits, axis=-1)
        losses.append(jnp.sum(weight * entropy))
        choices.append(choice)
        if with_gradient:
            wrong = grown * (weight / total)[..., None] - law * weight[..., None]
            gradients.append(jnp.einsum("GcV,VD->GcD", wrong.astype(output.dtype), lm_head))
    return (
        jnp.stack(losses),
        jnp.stack(choices),
        jnp.stack(gradients) if with_gradient else jnp.zeros((0,), outputs.dtype),
    )


def _logits(x: Array, lm_head: Array) -> Array:
    return jnp.einsum("GcD,VD->GcV", x, lm_head, preferred_element_type=jnp.float32)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`."""
    return max(d for d in range(1, min(most, size) + 1) if size % d == 0)


def smooth_l1(carried: Array, target: Array, weights: Array) -> Array:
    """Sum over entries of weight times the mean over `D` of the Huber loss with its bend at 1
    (EAGLE, arXiv 2401.15077, equation for L_reg): half the square below, the distance less a half
    above. `carried`, `target` `[B, S, D]`; `weights` `[B, S]` float32; float32."""
    distance = jnp.abs(carried.astype(jnp.float32) - target.astype(jnp.float32))
    bent = jnp.where(distance < 1, 0.5 * distance * distance, distance - 0.5)
    return jnp.sum(weights * bent.mean(axis=-1))


def step_weights(num_steps: int, decay: float = 0.8) -> tuple[float, ...]:
    """Of each step in the loss: 1, 0.8, 0.64, ..."""
    return tuple(math.pow(decay, j) for j in range(num_steps))
