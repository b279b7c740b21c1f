"""LayerSkip (arXiv 2404.16710, section 3.1): a model goes on learning, all of it, so that its first
layers alone say nearly what all of them say. Its final norm and output head are its exits.

- Layers are left out at random, the later the more often: layer l of L with probability
  p_max (exp(l ln 2 / (L - 1)) - 1), in each row of a batch apart (equations 1 and 2, S = 1).
- The loss is a mean of next-token cross entropies behind each layer (equations 4 to 6). Exits
  behind earlier layers take turns: a step trains one in R, and the last (rotational curriculum).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.config import ModelConfig
from jspec.layers import rms_norm
from jspec.params import Params
from jspec.train.losses import Lesson, certain_law, cross_entropy
from jspec.train.settings import LayerSkipSettings, Watching
from jspec.train.setup import Run, mesh_of, open_text
from jspec.train.states import TargetOfText
from jspec.train.step import Batch, TrainState, init_state, make_optimiser, rounded
from jspec.train.trainer import train_to_end
from jspec.train.unroll import earlier
from jspec.train.whole import PRODUCT, cast, export_model, output_head, streams


def dropout_rates(num_layers: int, most: float) -> tuple[float, ...]:
    """`[L]`: how often each layer is left out; the last one `most` often, the first never."""
    last = max(num_layers - 1, 1)
    return tuple(most * (math.exp(layer * math.log(2) / last) - 1) for layer in range(num_layers))


def exit_weights(num_layers: int, scale: float) -> tuple[float, ...]:
    """`[L]`: e(l), what the loss behind each layer weighs before the curriculum: `scale` times
    0 + 1 + ... + l, and L - 1 more behind the last, which is what the model says."""
    early = [scale * layer * (layer + 1) / 2 for layer in range(num_layers - 1)]
    return (*early, num_layers - 1 + scale * (num_layers - 2) * (num_layers - 1) / 2)


def exits_of(step: Array, num_layers: int, rotation: int) -> Array:
    """`[J]` int32: the layers whose exits `step` trains, the last always; -1 stands for none.

    Six layers, one in two: 0 2 4 5, then 1 3 -1 5.
    """
    early = step % rotation + rotation * jnp.arange(-(-(num_layers - 1) // rotation))
    early = jnp.where(early < num_layers - 1, early, -1)
    return jnp.append(early, num_layers - 1).astype(jnp.int32)


class ExitSums(flax.struct.PyTreeNode):
    """Over the entries of one batch or more, float32, behind each of L layers."""

    loss: Array  # [L]
    agreed: Array  # [L]: the exit's likeliest token is that of the last layer
    places: Array  # [L]: entries that the exit was asked for
    tokens: Array  # [] int32: without padding

    def means(self) -> dict[str, Any]:
        """Cross entropy of the text behind each layer, and how often it agrees with the last."""
        places = np.maximum(self.places, 1)
        return {
            "logit_loss": rounded(self.loss / places),
            "agreement": rounded(self.agreed / places),
        }


@dataclasses.dataclass(frozen=True)
class LayerSkipLoss:
    """Static settings of the loss."""

    config: ModelConfig
    dropout: float
    exit_scale: float
    rotation: int
    seed: int = 0
    groups: int = 1
    """Devices that share a batch."""
    dtype: str = "bfloat16"
    """Of activations and products; sums and masters are float32."""

    def zero(self) -> ExitSums:
        L = self.config.num_hidden_layers
        each = [jnp.zeros((L,), jnp.float32) for _ in range(3)]
        return ExitSums(*each, tokens=jnp.zeros((), jnp.int32))

    def measured(self) -> LayerSkipLoss:
        """All exits, and no layer left out."""
        return dataclasses.replace(self, dropout=0.0, rotation=1)

    def loss(
        self, trained: Params, frozen: tuple[()], batch: Batch, step: Array
    ) -> tuple[Array, ExitSums]:
        """Exit l weighs e(l) among those that `step` trains."""
        config, params = self.config, cast(trained, jnp.dtype(self.dtype))
        L, head = config.num_hidden_layers, output_head(params)
        hidden = jnp.stack(streams(params, config, batch, self.kept(step, len(batch.tokens)))[1:])
        exits = exits_of(step, L, self.rotation)
        outputs = rms_norm(hidden[exits], params.final_norm, config.rms_norm_eps)
        shares = jnp.where(exits < 0, 0.0, jnp.array(exit_weights(L, self.exit_scale))[exits])
        asked = batch.wanted & (exits >= 0)[:, None, None]
        count = jnp.maximum(batch.wanted.sum(dtype=jnp.float32), 1.0)
        losses, choices = cross_entropy(
            outputs,
            head,
            Lesson(earlier(batch.tokens, 1), jnp.arange(len(head), dtype=jnp.int32)),
            asked.astype(jnp.float32) / count,
            law=certain_law,
            groups=self.groups,
        )
        total = jnp.vdot(shares / shares.sum(), losses)
        return total, self._sums(batch, exits, losses, choices)

    def kept(self, step: Array, rows: int) -> Array | None:
        """`[L, B]` bool: whether each layer runs on each row at `step`."""
        if not self.dropout:
            return None
        rates = jnp.array(dropout_rates(self.config.num_hidden_layers, self.dropout))
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return jax.random.uniform(key, (len(rates), rows)) >= rates[:, None]

    def _sums(self, batch: Batch, exits: Array, losses: Array, choices: Array) -> ExitSums:
        count = batch.wanted.sum(dtype=jnp.float32)
        agreed = ((choices == choices[-1]) & batch.wanted).sum(axis=(1, 2), dtype=jnp.float32)
        nothing = jnp.zeros((self.config.num_hidden_layers,), jnp.float32)

        def by_layer(values: Array) -> Array:
            return nothing.at[exits].add(jnp.where(exits < 0, 0.0, values))

        return ExitSums(
            loss=by_layer(jax.lax.stop_gradient(losses) * count),
            agreed=by_layer(agreed),
            places=by_layer(jnp.full(exits.shape, count)),
            tokens=(batch.segments > 0).sum(dtype=jnp.int32),
        )


def train_layerskip(
    model: TargetOfText,
    text: Sequence[Path],
    folder: Path,
    settings: LayerSkipSettings,
    watching: Watching | None = None,
    *,
    tokenizer: Any = None,
    stop_after: int | None = None,
) -> None:
    """`folder` holds the model as it is then (`model/`, a folder in the Hugging Face layout with
    `tokenizer` if one is given), `metrics.jsonl`, `curves.png` and `checkpoints/`.

    Goes on and ends as `trainer.train` does, but keeps the last state: earlier exits gain what
    the last layer may lose. Raises JspecError as `trainer.train`.
    """
    run, first = begin(model, text, folder, settings, watching or Watching(), tokenizer)
    train_to_end(run, first, stop_after)


def begin(
    model: TargetOfText,
    text: Sequence[Path],
    folder: Path,
    settings: LayerSkipSettings,
    watching: Watching,
    tokenizer: Any,
) -> tuple[Run, TrainState]:
    """The run in `folder`, and the state before its first step."""
    mesh = mesh_of(settings, watching.data_parallel)
    objective = LayerSkipLoss(
        model.config,
        dropout=settings.dropout,
        exit_scale=settings.exit_scale,
        rotation=settings.rotation,
        seed=settings.seed,
        groups=watching.data_parallel,
        dtype=settings.dtype,
    )
    optimiser = make_optimiser(settings.learning_rate, warmup=settings.warmup, steps=settings.steps)
    run = Run(
        settings=settings,
        watching=watching,
        folder=folder,
        objective=objective,
        optimiser=optimiser,
        corpus=open_text(text, folder, settings),
        frozen=(),
        mesh=mesh,
        product=PRODUCT,
        export=functools.partial(export_model, model.config, model.params.embed.dtype, tokenizer),
    )
    # Copies: a step gives its state's memory away.
    learned = jax.tree.map(lambda x: jnp.array(x, jnp.float32), model.params)
    return run, init_state(learned, optimiser)
