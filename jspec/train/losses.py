"""What is trained to draft: say what the target says, and (some heads) carry on what it thinks.

Logits over a vocabulary exist for a few hundred entries at a time, in the forward pass only: the
gradients can be had there and then, and are all that the backward pass needs. Entries that do not
count (prompts, padding) have none at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.draws import largest

_CHUNK_TOKENS = 512
"""Entries whose logits exist at one time."""


class Lesson(NamedTuple):
    """What is to be said at each entry."""

    entries: Array
    """`[B, S, ...]`: of each entry, what its law is made of."""
    shared: Any
    """What all entries need for that."""
    copies: Array | None = None
    """`[V]` float32: tokens that each row of the vocabulary stands for; None: itself."""


Law = Callable[[Array, Any], Array]
"""`(entries, shared)` of a `Lesson` -> `[..., V]` float32, the law to learn but for `copies`."""


def target_law(hidden: Array, lm_head: Array) -> Array:
    """The target's law, up to a factor an entry and at most 1: of its final hidden states
    `[..., D]`, over the rows of its `lm_head` `[V, D]`."""
    logits = _logits(hidden, lm_head)
    return jnp.exp(logits - logits.max(axis=-1, keepdims=True))


def certain_law(tokens: Array, vocabulary: Array) -> Array:
    """All on the token that came `[...]`, of those in `vocabulary` `[V]`."""
    return (tokens[..., None] == vocabulary).astype(jnp.float32)


def soft_cross_entropy(
    outputs: Array, target: Array, lm_head: Array, weights: Array, groups: int = 1
) -> tuple[Array, Array]:
    """`cross_entropy` against the target's whole law, with an output head that is the target's
    own: `target` `[B, S, D]` its final hidden states, `lm_head` `[V, D]`, both frozen."""
    frozen = jax.lax.stop_gradient(lm_head)
    return cross_entropy(
        outputs, frozen, Lesson(target, frozen), weights, law=target_law, groups=groups
    )


def cross_entropy(
    outputs: Array, lm_head: Array, lesson: Lesson, weights: Array, *, law: Law, groups: int = 1
) -> tuple[Array, Array]:
    """Cross entropy of each step's law against the one to learn.

    Args:
      outputs: `[J, B, S, D]` normed outputs of J steps.
      lm_head: `[V, D]` rows of the vocabulary, which the outputs speak through.
      lesson: what to learn; no gradient.
      weights: `[J, B, S]` float32; no gradient either. What has none in any step costs nothing.
      law: makes the law to learn of the lesson.
      groups: into which B is split, devices of a mesh: each gathers its own entries.
    Returns:
      `[J]` float32, sums over the entries of weight times -sum_x law(x) log said(x), and
      `[J, B, S]` int32, the likeliest row of each step, void where no step has a weight. Where a
      row stands for several tokens, sums over the vocabulary count it as often.
    """
    return _cross_entropy(outputs, lm_head, lesson, weights, law, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(
    outputs: Array, lm_head: Array, lesson: Lesson, weights: Array, law: Law, groups: int
) -> tuple[Array, Array]:
    return _asked_for(outputs, lm_head, lesson, weights, law, groups, wanted=(False, False))[:2]


class _Gradients(NamedTuple):
    """Of the sum of a step's losses; arrays without entries where they are not asked for."""

    outputs: Array  # [J, B, S, D]
    lm_head: Array  # [J, V, D] float32


def _forward(
    outputs: Any, lm_head: Any, lesson: Any, weights: Any, law: Law, groups: int
) -> tuple[tuple[Array, Array], tuple[_Gradients, Array]]:
    wanted = (outputs.perturbed, lm_head.perturbed)
    lesson, weights = jax.tree.map(lambda x: x.value, (lesson, weights))
    losses, choices, gradients = _asked_for(
        outputs.value, lm_head.value, lesson, weights, law, groups, wanted=wanted
    )
    return (losses, choices), (gradients, jnp.zeros((0,), lm_head.value.dtype))


def _backward(
    law: Law, groups: int, found: tuple[_Gradients, Array], cotangents: Any
) -> tuple[Array | None, Array | None, None, None]:
    (by_outputs, by_lm_head), like = found
    per_step = cotangents[0]
    outputs = lm_head = None
    if by_outputs.size:
        outputs = by_outputs * per_step.astype(by_outputs.dtype)[:, None, None, None]
    if by_lm_head.size:
        lm_head = jnp.einsum("J,JVD->VD", per_step, by_lm_head).astype(like.dtype)
    return outputs, lm_head, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


class _Carry(NamedTuple):
    """What the loop over chunks adds to."""

    number: Array
    losses: Array
    choices: Array
    gradients: _Gradients


def _asked_for(
    outputs: Array,
    lm_head: Array,
    lesson: Lesson,
    weights: Array,
    law: Law,
    groups: int,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Array, Array, _Gradients]:
    """Losses, choices and, as far as `wanted`, the gradients by `outputs` and `lm_head`: the
    entries with a weight are brought to the front of their group and run chunk by chunk."""
    J, B, S, D = outputs.shape
    outputs, weights = outputs.reshape(J, groups, -1, D), weights.reshape(J, groups, -1)
    entries = lesson.entries.reshape(groups, -1, *lesson.entries.shape[2:])
    asked = jnp.any(weights > 0, axis=0)  # [G, n]
    order = jnp.argsort(~asked, axis=1, stable=True).astype(jnp.int32)
    size = _divisor(asked.shape[1], max(_CHUNK_TOKENS // groups, 1))
    num_chunks = -(-asked.sum(axis=1, dtype=jnp.int32).max() // size)
    group = jnp.arange(groups)[:, None]

    def one(carry: _Carry) -> _Carry:
        place = jax.lax.dynamic_slice_in_dim(order, carry.number * size, size, axis=1)
        loss, choice, gradients = _chunk(
            outputs[:, group, place],
            lm_head,
            lesson._replace(entries=entries[group, place]),
            weights[:, group, place],
            law,
            wanted=wanted,
        )
        by_outputs, by_lm_head = carry.gradients
        if wanted[0]:
            by_outputs = by_outputs.at[:, group, place].set(gradients.outputs, unique_indices=True)
        return _Carry(
            number=carry.number + 1,
            losses=carry.losses + loss,
            choices=carry.choices.at[:, group, place].set(choice, unique_indices=True),
            gradients=_Gradients(by_outputs, by_lm_head + gradients.lm_head),
        )

    nothing = _Carry(
        number=jnp.zeros((), jnp.int32),
        losses=jnp.zeros((J,), jnp.float32),
        choices=jnp.zeros((J, *asked.shape), jnp.int32),
        gradients=_Gradients(
            outputs=jnp.zeros((J, *asked.shape, D if wanted[0] else 0), outputs.dtype),
            lm_head=jnp.zeros((J, len(lm_head), D if wanted[1] else 0), jnp.float32),
        ),
    )
    end = jax.lax.while_loop(lambda carry: carry.number < num_chunks, one, nothing)
    by_outputs = end.gradients.outputs.reshape(J, B, S, -1)
    return end.losses, end.choices.reshape(J, B, S), end.gradients._replace(outputs=by_outputs)


def _chunk(
    outputs: Array,
    lm_head: Array,
    lesson: Lesson,
    weights: Array,
    law: Law,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Array, Array, _Gradients]:
    """Losses `[J]`, choices `[J, G, c]` and the gradients of some entries."""
    J, V = len(outputs), len(lm_head)
    copies = 1.0 if lesson.copies is None else lesson.copies
    right = law(lesson.entries, lesson.shared) * copies
    right = right / right.sum(axis=-1, keepdims=True)
    losses, choices, by_outputs, by_lm_head = [], [], [], []
    for output, weight in zip(outputs, weights, strict=True):
        logits = _logits(output, lm_head)
        peak, choice = largest(logits)
        grown = jnp.exp(logits - peak[..., None]) * copies
        total = grown.sum(axis=-1)
        entropy = peak + jnp.log(total) - jnp.sum(right * logits, axis=-1)
        losses.append(jnp.sum(weight * entropy))
        choices.append(choice)
        wrong = grown * (weight / total)[..., None] - right * weight[..., None]
        wrong = wrong.astype(output.dtype)
        if wanted[0]:
            by_outputs.append(jnp.einsum("GcV,VD->GcD", wrong, lm_head))
        if wanted[1]:
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            by_lm_head.append(product("GcV,GcD->VD", wrong, output))
    gradients = _Gradients(
        jnp.stack(by_outputs) if wanted[0] else jnp.zeros((J, 0), outputs.dtype),
        jnp.stack(by_lm_head) if wanted[1] else jnp.zeros((J, V, 0), jnp.float32),
    )
    return jnp.stack(losses), jnp.stack(choices), gradients


def _logits(x: Array, lm_head: Array) -> Array:
    return jnp.einsum("...D,VD->...V", x, lm_head, preferred_element_type=jnp.float32)


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
