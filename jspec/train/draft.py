"""The training of a draft model: a small model distilled from the target, on the target's text.

Entry t predicts the token at t + 1, against the target's whole law there. That law, and the
student's own, are over the most frequent tokens, which every step learns to say, and over a few of
all others, which take turns and stand for the rest of them (importance sampling of the sums over
the vocabulary, arXiv 1412.2007, section 3): so the student learns not to say them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.layers import rms_norm
from jspec.params import Params
from jspec.train import data
from jspec.train.losses import Lesson, cross_entropy, target_law
from jspec.train.new_draft import DraftFrozen, draft_config, draft_frozen, new_draft
from jspec.train.new_head import draft_vocabulary
from jspec.train.settings import DraftSettings, Watching
from jspec.train.setup import Run, check_target, mesh_of, open_states
from jspec.train.states import TargetOfText
from jspec.train.step import Batch, Sums, TrainState, init_state, make_optimiser
from jspec.train.trainer import train_to_end
from jspec.train.whole import PRODUCT, cast, export_model, output_head, streams


@dataclasses.dataclass(frozen=True)
class DraftLoss:
    """Static settings of the loss."""

    config: ModelConfig
    """The student's."""
    frequent: int
    """Tokens that every step looks at."""
    others: int
    """Of the rest, how many a step looks at."""
    groups: int = 1
    """Devices that share a batch."""
    dtype: str = "bfloat16"
    """Of activations and products; sums and masters are float32."""

    def zero(self) -> Sums:
        return Sums.zero(1)

    def measured(self) -> DraftLoss:
        """Over the whole vocabulary."""
        return dataclasses.replace(self, frequent=self.config.vocab_size)

    def loss(
        self, trained: Params, frozen: DraftFrozen, batch: Batch, step: Array
    ) -> tuple[Array, Sums]:
        """Entries whose likeliest token is not frequent are no part of the mean, but count as not
        agreed unless the student says that token."""
        dtype = jnp.dtype(self.dtype)
        params, head = cast(trained, dtype), cast(frozen.lm_head, dtype)
        final = rms_norm(
            streams(params, self.config, batch)[-1], params.final_norm, self.config.rms_norm_eps
        )
        rows, copies = self.looked_at(step)
        tokens = frozen.tokens[rows]
        learned = batch.wanted & (frozen.rank[batch.best] < self.frequent)
        count = learned.sum(dtype=jnp.float32)
        (target,) = batch.hidden.values()
        losses, choice = cross_entropy(
            final[None],
            output_head(params)[tokens],
            Lesson(target.astype(dtype), head[rows], copies),
            learned[None].astype(jnp.float32) / jnp.maximum(count, 1.0),
            law=target_law,
            groups=self.groups,
        )
        agreed = learned & (tokens[choice[0]] == batch.best)
        return losses.sum(), self._sums(batch, losses, learned, agreed)

    def looked_at(self, step: Array) -> tuple[Array, Array | None]:
        """The rows of the vocabulary that `step` looks at, and how many tokens each stands for.

        Ten tokens, four frequent, two others: 0 1 2 3 4 5, then 0 1 2 3 6 7, then 0 1 2 3 8 9;
        each of the last two stands for three.
        """
        rest = self.config.vocab_size - self.frequent
        others = min(self.others, rest)
        always = jnp.arange(self.frequent, dtype=jnp.int32)
        if not others:
            return always, None
        first = self.frequent + step % -(-rest // others) * others
        first = jnp.minimum(first, self.config.vocab_size - others)
        rows = jnp.concatenate([always, first + jnp.arange(others, dtype=jnp.int32)])
        ones = jnp.ones((self.frequent,), jnp.float32)
        return rows, jnp.append(ones, jnp.full((others,), rest / others, jnp.float32))

    def _sums(self, batch: Batch, losses: Array, learned: Array, agreed: Array) -> Sums:
        def count(places: Array) -> Array:
            return places.sum(dtype=jnp.float32)[None]

        return Sums(
            logit_loss=jax.lax.stop_gradient(losses) * count(learned),
            learned=count(learned),
            hidden_loss=jnp.zeros((1,), jnp.float32),
            agreed=count(agreed),
            chained=count(agreed),
            places=count(batch.wanted),
            tokens=(batch.segments > 0).sum(dtype=jnp.int32),
        )


def train_draft(
    target: TargetOfText,
    states: Sequence[Path],
    folder: Path,
    settings: DraftSettings,
    watching: Watching | None = None,
    *,
    tokenizer: Any = None,
    stop_after: int | None = None,
) -> None:
    """`folder` holds the draft model (`model/`, a folder in the Hugging Face layout with the
    target's `tokenizer` if one is given), `metrics.jsonl`, `curves.png` and `checkpoints/`.

    Goes on, ends and keeps the best as `trainer.train` does; raises JspecError as it does.
    """
    run, first = begin(target, states, folder, settings, watching or Watching(), tokenizer)
    train_to_end(run, first, stop_after)


def begin(
    target: TargetOfText,
    states: Sequence[Path],
    folder: Path,
    settings: DraftSettings,
    watching: Watching,
    tokenizer: Any,
) -> tuple[Run, TrainState]:
    """The run in `folder`, and the state before its first step."""
    check_target(states, target)
    vocab_size, size = target.config.vocab_size, settings.draft_vocab_size
    if not 0 < size <= vocab_size:
        raise JspecError(f"a draft vocabulary of {size}: the target has {vocab_size} tokens")
    if settings.hidden_size > target.config.hidden_size:
        raise JspecError(
            f"hidden_size is {settings.hidden_size}: the target has {target.config.hidden_size}"
        )
    config, mesh = draft_config(settings, target.config), mesh_of(settings, watching.data_parallel)
    taps = (target.config.num_hidden_layers,)
    corpus = open_states(states, folder, settings, taps, ahead=1)
    counts = data.answer_counts(corpus.shards, vocab_size)
    frequent = draft_vocabulary(counts, size, target.config.eos_token_ids)
    optimiser = make_optimiser(settings.learning_rate, warmup=settings.warmup, steps=settings.steps)
    run = Run(
        settings=settings,
        watching=watching,
        folder=folder,
        objective=DraftLoss(config, size, settings.others, watching.data_parallel, settings.dtype),
        optimiser=optimiser,
        corpus=corpus,
        frozen=draft_frozen(target.params, frequent),
        mesh=mesh,
        product=PRODUCT,
        export=functools.partial(export_model, config, target.params.embed.dtype, tokenizer),
    )
    run = run._replace(frozen=run.replicated(run.frozen))
    return run, init_state(new_draft(config, target.params, settings.seed), optimiser)
