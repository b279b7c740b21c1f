"""One step of training, and the same sums without learning: pure functions of arrays; the loss of
heads.

Entries, steps and anchors are those of `jspec.train.unroll`. Medusa's heads fit the same picture:
what head j says at entry t - j is about the token that entry t is about, so it counts as step j.
So do exits: all of them speak at entry t + 1 about that token, and exit j counts as a step j that
has its anchor at t itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jspec.exits import exit_of, exit_output
from jspec.head_params import AnyConfig, ExitsConfig, HeadConfig, MedusaConfig
from jspec.heads import carry, medusa_output
from jspec.layers import rms_norm
from jspec.train.losses import smooth_l1, soft_cross_entropy
from jspec.train.new_head import Frozen, whole_head
from jspec.train.unroll import anchored, earlier, later, unrolled


class Batch(NamedTuple):
    """Rows of whole texts behind one another; segment 0 is padding."""

    tokens: Array  # [B, S] int32
    segments: Array  # [B, S] int32
    positions: Array  # [B, S] int32, slots in a token's own text
    wanted: Array  # [B, S] bool: the token that the entry predicts is one to learn
    best: Array  # [B, S] int32: the target's likeliest next token
    hidden: dict[int, Array]  # of each tap [B, S, D] bfloat16; the last is the final one


class Loss(Protocol):
    """What a training makes small; static and hashable."""

    def zero(self) -> Any:
        """Sums of nothing yet: a pytree of arrays that adds up over batches, with `tokens` `[]`
        and `means()`, their plain numbers for people."""
        ...

    def measured(self) -> Self:
        """The same as it is measured on text held out."""
        ...

    def loss(self, trained: Any, frozen: Any, batch: Batch, step: Array) -> tuple[Array, Any]:
        """What is made small at `step` `[]` int32, and the sums of the batch."""
        ...


class Sums(flax.struct.PyTreeNode):
    """Over the entries of one batch or more, float32; divide by `places` for means."""

    logit_loss: Array  # [J]
    learned: Array  # [J]: entries that `logit_loss` is over
    hidden_loss: Array  # [J]
    agreed: Array  # [J]: the head's likeliest token is the target's
    chained: Array  # [J]: and so it was in all steps behind the same anchor
    places: Array  # [J]: entries that count
    tokens: Array  # [] int32: without padding
    num_drafts: int = flax.struct.field(pytree_node=False, default=1)
    """That the J steps are."""

    @classmethod
    def zero(cls, num_steps: int, num_drafts: int = 1) -> Sums:
        """Nothing added up yet."""
        whole = ("tokens", "num_drafts")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in whole]
        each = {name: jnp.zeros((num_steps,), jnp.float32) for name in names}
        return cls(**each, tokens=jnp.zeros((), jnp.int32), num_drafts=num_drafts)

    def means(self) -> dict[str, Any]:
        """Plain numbers of what was added up.

        `agreement` is the share of entries where the head's likeliest token is the target's, a
        number a step; `length` is 1 + the mean number of steps that agree one after the other:
        tokens a round if the target's text were greedy, on average over the drafts.
        """
        places, learned = np.maximum(self.places, 1), np.maximum(self.learned, 1)
        return {
            "logit_loss": rounded(self.logit_loss / learned),
            "hidden_loss": rounded(self.hidden_loss / places),
            "agreement": rounded(self.agreed / places),
            "length": round(1.0 + float(np.sum(self.chained / places)) / self.num_drafts, 5),
        }


def rounded(values: Any) -> list[float]:
    """Numbers for people."""
    return [round(float(x), 5) for x in values]


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes."""

    step: Array  # [] int32
    tokens: Array  # [] int32, seen since the start, without padding
    trained: Any  # the parameters that are learned, float32
    optimiser: Any


@dataclasses.dataclass(frozen=True)
class Objective:
    """Static settings of the loss; how entries count."""

    config: AnyConfig
    eps: float
    """Of the target's norms."""
    anchors: tuple[int, ...]
    """Of each of J steps (unrolled ones, Medusa's heads, exits), how many entries before it its
    anchor is."""
    weights: tuple[float, ...]
    """Of each step in the loss."""
    logit_loss: float = 1.0
    hidden_loss: float = 0.0
    """Of families that carry features like the target's."""
    groups: int = 1
    """Devices that share a batch."""
    dtype: str = "bfloat16"
    """Of activations and products; sums and masters are float32."""

    @property
    def num_steps(self) -> int:
        """J."""
        return len(self.anchors)

    @property
    def num_drafts(self) -> int:
        """Drafts that the steps are: all steps behind one anchor are one, each exit is one."""
        return self.anchors.count(0)

    def zero(self) -> Sums:
        return Sums.zero(self.num_steps, self.num_drafts)

    def measured(self) -> Objective:
        return self

    def loss(self, trained: Any, frozen: Frozen, batch: Batch, step: Array) -> tuple[Array, Sums]:
        return loss(trained, self, frozen, batch)


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
    objective: Loss,
    optimiser: optax.GradientTransformation,
    state: TrainState,
    sums: Any,
    frozen: Any,
    batch: Batch,
) -> tuple[TrainState, Any]:
    """The state after one more batch, and `sums` with the batch's own added."""
    gradient, new = jax.grad(objective.loss, has_aux=True)(state.trained, frozen, batch, state.step)
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
def measure_step(objective: Loss, trained: Any, sums: Any, frozen: Any, batch: Batch) -> Any:
    """`sums` with those of a batch added; nothing is learned."""
    _, new = objective.loss(trained, frozen, batch, jnp.zeros((), jnp.int32))
    return jax.tree.map(jnp.add, sums, new)


def loss(trained: Any, objective: Objective, frozen: Frozen, batch: Batch) -> tuple[Array, Sums]:
    """What is made small, and the sums of the batch.

    Of each step, times its weight: a mean over its entries of the cross entropy, and one of the
    distance between what it carries and what the target thinks there. Entries whose likeliest
    token the head does not know are no part of the first mean, but count as not agreed.
    """
    dtype = jnp.dtype(objective.dtype)
    frozen = frozen.replace(embed=frozen.embed.astype(dtype), lm_head=frozen.lm_head.astype(dtype))
    head = whole_head(objective.config, trained, frozen)
    hidden = {tap: values.astype(dtype) for tap, values in batch.hidden.items()}
    final = hidden[max(hidden)]
    spoken, carried = _outputs(objective, head, hidden, final, batch)

    best = frozen.draft_ids[earlier(batch.best, 1)]
    counted = jnp.stack([batch.wanted & anchored(batch.segments, n) for n in objective.anchors])
    learned = counted & (best >= 0)
    weights = jnp.asarray(objective.weights, jnp.float32)[:, None, None]

    def shares(places: Array) -> Array:
        count = places.sum(axis=(1, 2), keepdims=True, dtype=jnp.float32)
        return places.astype(jnp.float32) * weights / jnp.maximum(count, 1.0)

    target = earlier(final, 1)
    logit_losses, choice = soft_cross_entropy(
        jnp.stack(spoken), target, frozen.lm_head, shares(learned), objective.groups
    )
    total = objective.logit_loss * logit_losses.sum()
    hidden_losses = jnp.zeros((objective.num_steps,), jnp.float32)
    if objective.hidden_loss:
        pairs = zip(carried, shares(counted), strict=True)
        hidden_losses = jnp.stack([smooth_l1(x, target, share) for x, share in pairs])
        total += objective.hidden_loss * hidden_losses.sum()
    agreed = counted & (choice == best)
    return total, _sums(objective, batch, counted, learned, agreed, logit_losses, hidden_losses)


def _outputs(
    objective: Objective, head: Any, hidden: dict[int, Array], final: Array, batch: Batch
) -> tuple[list[Array], list[Array]]:
    """Of each step what goes into the lm_head, and what is carried on, `[B, S, D]`."""
    config, J = objective.config, objective.num_steps
    if isinstance(config, MedusaConfig):
        spoken = [later(medusa_output(head, final, j), j) for j in range(J)]
        return spoken, []
    if isinstance(config, ExitsConfig):
        exits = ((exit_of(config, head, layer), hidden[layer]) for layer in config.layers)
        said = (exit_output(params, stream, eps=objective.eps) for params, stream in exits)
        return [earlier(x, 1) for x in said], []
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
    objective: Objective,
    batch: Batch,
    counted: Array,
    learned: Array,
    agreed: Array,
    logit_losses: Array,
    hidden_losses: Array,
) -> Sums:
    """Sums of a batch whose losses are means weighted by step: undone, so that batches add up."""
    weights = jnp.asarray(objective.weights, jnp.float32)
    chained: list[Array] = []
    for one, anchor in zip(agreed, objective.anchors, strict=True):
        chained.append(one & later(chained[-1], 1) if anchor else one)

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
        num_drafts=objective.num_drafts,
    )


def uses_hidden_loss(config: AnyConfig) -> bool:
    """Whether what a head carries stands for the target's final hidden state."""
    return isinstance(config, HeadConfig) and config.family != "eagle3"
