"""One step of training, and the same sums without learning: pure functions of arrays.

Entries, steps and anchors are those of `jspec.train.unroll`. Medusa's heads fit the same picture:
what head j says at entry t - j is about the token that entry t is about, so it counts as step j.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from jspec.head_params import HeadConfig, MedusaConfig
from jspec.heads import carry, medusa_output
from jspec.model import rms_norm
from jspec.train.losses import smooth_l1, soft_cross_entropy, step_weights
from jspec.train.new_head import Config, Frozen, whole_head
from jspec.train.unroll import anchored, earlier, later, unrolled


class Batch(NamedTuple):
    """Rows of whole texts behind one another; segment 0 is padding."""

    tokens: Array  # [B, S] int32
    segments: Array  # [B, S] int32
    positions: Array  # [B, S] int32, slots in a token's own text
    wanted: Array  # [B, S] bool: the token that the entry predicts lies in an answer
    best: Array  # [B, S] int32: the target's likeliest next token
    hidden: dict[int, Array]  # of each tap [B, S, D] bfloat16; the last is the final one


class Sums(flax.struct.PyTreeNode):
    """Over the entries of one batch or more, float32; divide by `places` for means."""

    logit_loss: Array  # [J]
    learned: Array  # [J]: entries that `logit_loss` is over
    hidden_loss: Array  # [J]
    agreed: Array  # [J]: the head's likeliest token is the target's
    chained: Array  # [J]: and so it was in all steps behind the same anchor
    places: Array  # [J]: entries that count
    tokens: Array  # [] int32: without padding

    @classmethod
    def zero(cls, num_steps: int) -> Sums:
        """Nothing added up yet."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "tokens"]
        each = {name: jnp.zeros((num_steps,), jnp.float32) for name in names}
        return cls(**each, tokens=jnp.zeros((), jnp.int32))


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes."""

    step: Array  # [] int32
    tokens: Array  # [] int32, seen since the start, without padding
    trained: Any  # HeadParams or MedusaParams, float32
    optimiser: Any


@dataclasses.dataclass(frozen=True)
class Objective:
    """Static settings of the loss; how entries count."""

    config: Config
    num_steps: int
    """Unrolled steps J, or Medusa's heads."""
    logit_loss: float = 1.0
    hidden_loss: float = 0.0
    """Of families that carry features like the target's."""
    groups: int = 1
    """Devices that share a batch."""
    dtype: str = "bfloat16"
    """Of activations and products; sums and masters are float32."""


@functools.cache  # equal settings share compiled steps
def make_optimiser(
    learning_rate: float, *, warmup: int, steps: int, clip: float = 1.0, weight_decay: float = 0.01
) -> optax.GradientTransformation:
    """AdamW with a linear warm-up, then a cosine to a tenth; gradients clipped to a global norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(steps, warmup + 1), 0.1 * learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_matrices),
    )


def _matrices(tree: Any) -> Any:
    """Weight decay is for matrices: not for norms and biases."""
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def init_state(trained: Any, optimiser: optax.GradientTransformation) -> TrainState:
    """Before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((), jnp.int32),
        trained=trained,
        optimiser=optimiser.init(trained),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    objective: Objective,
    optimiser: optax.GradientTransformation,
    state: TrainState,
    sums: Sums,
    frozen: Frozen,
    batch: Batch,
) -> tuple[TrainState, Sums]:
    """The state after one more batch, and `sums` with the batch's own added."""
    gradient, new = jax.grad(loss, has_aux=True)(state.trained, objective, frozen, batch)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
        updates, memory = optimiser.update(gradient, state.optimiser, state.trained)
    return (
        state.replace(
            step=state.step + 1,
            tokens=state.tokens + new.tokens,
            trained=optax.apply_updates(state.trained, updates),
            optimiser=memory,
        ),
        jax.tree.map(jnp.add, sums, new),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def measure_step(
    objective: Objective, trained: Any, sums: Sums, frozen: Frozen, batch: Batch
) -> Sums:
    """`sums` with those of a batch added; nothing is learned."""
    _, new = loss(trained, objective, frozen, batch)
    return jax.tree.map(jnp.add, sums, new)


def loss(trained: Any, objective: Objective, frozen: Frozen, batch: Batch) -> tuple[Array, Sums]:
    """What is made small, and the sums of the batch.

    Step j weighs 0.8^j: a mean over its entries of the cross entropy, and one of the distance
    between what it carries and what the target thinks there. Entries whose likeliest token the
    head does not know are no part of the first mean, but count as not agreed.
    """
    J, dtype = objective.num_steps, jnp.dtype(objective.dtype)
    frozen = frozen.replace(embed=frozen.embed.astype(dtype), lm_head=frozen.lm_head.astype(dtype))
    head = whole_head(objective.config, trained, frozen)
    hidden = {tap: values.astype(dtype) for tap, values in batch.hidden.items()}
    final = hidden[max(hidden)]
    spoken, carried = _outputs(objective, head, hidden, final, batch)

    best = frozen.draft_ids[earlier(batch.best, 1)]
    counted = jnp.stack([batch.wanted & anchored(batch.segments, j) for j in range(J)])
    learned = counted & (best >= 0)
    weights = jnp.asarray(step_weights(J), jnp.float32)[:, None, None]

    def shares(places: Array) -> Array:
        count = places.sum(axis=(1, 2), keepdims=True, dtype=jnp.float32)
        return places.astype(jnp.float32) * weights / jnp.maximum(count, 1.0)

    target = earlier(final, 1)
    logit_losses, choice = soft_cross_entropy(
        jnp.stack(spoken), target, frozen.lm_head, shares(learned), objective.groups
    )
    total = objective.logit_loss * logit_losses.sum()
    hidden_losses = jnp.zeros((J,), jnp.float32)
    if objective.hidden_loss:
        pairs = zip(carried, shares(counted), strict=True)
        hidden_losses = jnp.stack([smooth_l1(x, target, share) for x, share in pairs])
        total += objective.hidden_loss * hidden_losses.sum()
    agreed = counted & (choice == best)
    return total, _sums(batch, counted, learned, agreed, logit_losses, hidden_losses)


def _outputs(
    objective: Objective, head: Any, hidden: dict[int, Array], final: Array, batch: Batch
) -> tuple[list[Array], list[Array]]:
    """Of each step what goes into the lm_head, and what is carried on, `[B, S, D]`."""
    config, J = objective.config, objective.num_steps
    if isinstance(config, MedusaConfig):
        spoken = [later(medusa_output(head, final, j), j) for j in range(J)]
        return spoken, []
    taps = sorted(hidden)
    features = tuple(hidden[taps[-1] if tap < 0 else tap] for tap in config.taps)
    outputs = unrolled(
        head,
        config,
        features,
        batch.tokens,
        positions=batch.positions,
        segments=batch.segments,
        num_steps=J,
    )
    eps = config.layers.rms_norm_eps
    spoken = [rms_norm(x, head.final_norm, eps) for x in outputs]
    return spoken, [carry(head, config, x) for x in outputs]


def _sums(
    batch: Batch,
    counted: Array,
    learned: Array,
    agreed: Array,
    logit_losses: Array,
    hidden_losses: Array,
) -> Sums:
    """Sums of a batch whose losses are means weighted by step: undone, so that batches add up."""
    weights = jnp.asarray(step_weights(len(counted)), jnp.float32)
    chained = [agreed[0]]
    for one in agreed[1:]:
        chained.append(one & later(chained[-1], 1))

    def count(places: Array) -> Array:
        return places.sum(axis=(1, 2), dtype=jnp.float32)

    return Sums(
        logit_loss=jax.lax.stop_gradient(logit_losses) / weights * count(learned),
        learned=count(learned),
        hidden_loss=jax.lax.stop_gradient(hidden_losses) / weights * count(counted),
        agreed=count(agreed),
        chained=count(jnp.stack(chained)),
        places=count(counted),
        tokens=(batch.segments > 0).sum(dtype=jnp.int32),
    )


def uses_hidden_loss(config: Config) -> bool:
    """Whether what a head carries stands for the target's final hidden state."""
    return isinstance(config, HeadConfig) and config.family != "eagle3"
