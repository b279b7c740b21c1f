"""From settings, states and a target to everything that a training works with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.errors import JspecError
from jspec.head_params import AnyConfig, ExitsConfig
from jspec.train import data
from jspec.train.losses import step_weights
from jspec.train.new_head import Frozen, draft_vocabulary, head_config, new_head, whole_head
from jspec.train.settings import Schedule, Settings, Watching
from jspec.train.shards import Shards
from jspec.train.states import TargetOfText, digest_of, fingerprint, state_shards
from jspec.train.step import (
    Batch,
    Loss,
    Objective,
    TrainState,
    init_state,
    make_optimiser,
    uses_hidden_loss,
)
from jspec.train.text import text_shards


class Run(NamedTuple):
    """What a training works with; all but its state."""

    settings: Schedule
    watching: Watching
    folder: Path
    objective: Loss
    optimiser: optax.GradientTransformation
    corpus: data.Corpus
    frozen: Any
    """What the loss reads and does not learn."""
    mesh: Mesh | None
    product: str
    """Where in `folder` what was trained stands."""
    export: Callable[[Path, Any], None]
    """Writes a new folder with what was trained."""

    def replicated(self, tree: Any) -> Any:
        """`tree` on every device of the mesh."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def batch(self, rows: dict[str, Any]) -> Batch:
        """A batch on the devices, its rows split over the mesh."""
        batch = Batch(**rows)
        if self.mesh is None:
            return jax.device_put(batch)
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))


def begin(
    target: TargetOfText,
    states: Sequence[Path],
    folder: Path,
    settings: Settings,
    watching: Watching,
) -> tuple[Run, TrainState]:
    """The run of a head in `folder`, which notes the settings, and the state before its first step.

    A folder that was begun before keeps the shards that it began with, of all folders of
    `states`. Raises JspecError for settings that do not fit one another, the states, the target,
    the devices or the folder.
    """
    check_target(states, target)
    config = head_config(
        settings.family,
        target.config,
        draft_vocab_size=settings.draft_vocab_size,
        norms=settings.norms,
        num_heads=settings.unroll,
        exits=settings.layers or (),
    )
    taps, mesh = _taps(config, target), mesh_of(settings, watching.data_parallel)
    corpus = open_states(states, folder, settings, taps)
    counts = data.answer_counts(corpus.shards, target.config.vocab_size)
    token_ids = draft_vocabulary(counts, settings.draft_vocab_size, target.config.eos_token_ids)
    head = new_head(config, target.params, token_ids, settings.seed)
    optimiser = make_optimiser(settings.learning_rate, warmup=settings.warmup, steps=settings.steps)
    objective = _objective(settings, config, target, watching.data_parallel)
    export = functools.partial(_export, settings, config, head.frozen)
    run = Run(
        settings, watching, folder, objective, optimiser, corpus, head.frozen, mesh, "head", export
    )
    run = run._replace(frozen=run.replicated(head.frozen))
    return run, init_state(head.trained, optimiser)


def _export(
    settings: Settings, config: AnyConfig, frozen: Frozen, folder: Path, trained: Any
) -> None:
    """`folder` is the head, in the target's dtype."""
    import checkpoints  # late: brings transformers' names along

    head = whole_head(config, trained, frozen)
    shares = True if settings.family == "medusa" else None
    checkpoints.save_head(folder, config, head, shares_lm_head=shares)


def open_states(
    states: Sequence[Path],
    folder: Path,
    settings: Schedule,
    taps: tuple[int, ...],
    *,
    ahead: int = 2,
) -> data.Corpus:
    """What a run in `folder` learns from, of some folders of states; `folder` notes it."""
    sources = [state_shards(one).settings() for one in states]
    for one, source in zip(states, sources, strict=True):
        _check_taps(one, source, taps)
    shards = [state_shards(one) for one in states]
    numbers = _numbers(shards, folder, "states")
    corpus = data.open_corpus(_files(shards, numbers), taps, settings.sequence_length, ahead=ahead)
    _note(folder, settings, states=[digest_of(source) for source in sources], shards=numbers)
    return corpus


def open_text(text: Sequence[Path], folder: Path, settings: Schedule) -> data.Corpus:
    """The same of folders of text."""
    shards = [text_shards(one) for one in text]
    sources = [one.settings() for one in shards]
    numbers = _numbers(shards, folder, "text")
    corpus = data.open_text(_files(shards, numbers), settings.sequence_length)
    _note(folder, settings, text=[digest_of(source) for source in sources], shards=numbers)
    return corpus


def _files(shards: Sequence[Shards], numbers: Sequence[Sequence[int]]) -> list[Path]:
    pairs = zip(shards, numbers, strict=True)
    return [one.path(number) for one, mine in pairs for number in mine]


def _note(folder: Path, settings: Schedule, **learned: Any) -> None:
    Shards(folder, "safetensors").open({**dataclasses.asdict(settings), **learned})


def _objective(
    settings: Settings, config: AnyConfig, target: TargetOfText, devices: int
) -> Objective:
    """Draft steps stand one behind the other, and later ones weigh less; exits stand side by
    side, and are equals."""
    J, are_equals = settings.num_steps, isinstance(config, ExitsConfig)
    return Objective(
        config=config,
        eps=target.config.rms_norm_eps,
        anchors=(0,) * J if are_equals else tuple(range(J)),
        weights=step_weights(J, decay=1.0) if are_equals else step_weights(J),
        logit_loss=settings.logit_loss,
        hidden_loss=settings.hidden_loss if uses_hidden_loss(config) else 0.0,
        groups=devices,
        dtype=settings.dtype,
    )


def check_target(states: Sequence[Path], target: TargetOfText) -> None:
    """Raises JspecError for states that are not of `target`."""
    for one in states:
        _check_target(one, state_shards(one).settings(), target)


def _check_target(states: Path, source: dict[str, Any], target: TargetOfText) -> None:
    if source["hidden_size"] != target.config.hidden_size:
        raise JspecError(
            f"{states}: states of a model of width {source['hidden_size']}, not of {target.name}, "
            f"whose width is {target.config.hidden_size}"
        )
    if source["weights"] != fingerprint(target.params):
        raise JspecError(
            f"{states}: states of another model ({source['model']}), not of {target.name}"
        )


def _taps(config: AnyConfig, target: TargetOfText) -> tuple[int, ...]:
    """What is read: the features and the final hidden state, ascending."""
    entries = target.config.num_hidden_layers + 1
    return tuple(sorted({tap % entries for tap in (*config.taps, -1)}))


def _check_taps(states: Path, source: dict[str, Any], taps: tuple[int, ...]) -> None:
    missing = [tap for tap in taps if tap not in source["taps"]]
    if missing:
        raise JspecError(
            f"{states}: has no states of tap {missing[0]}, which this family reads; make them "
            f"with --taps {','.join(map(str, taps[:-1])) or 'final'}"
        )


def mesh_of(settings: Schedule, devices: int) -> Mesh | None:
    """The devices that share a batch; None: one, the default."""
    if devices == 1:
        return None
    there = jax.devices()
    if devices > len(there):
        raise JspecError(f"a mesh of {devices} devices: there are {len(there)}")
    if settings.rows % devices:
        raise JspecError(f"a mesh of {devices} devices does not divide {settings.rows} rows")
    return Mesh(np.array(there[:devices]), ("data",), axis_types=(AxisType.Auto,))


def _numbers(shards: Sequence[Shards], folder: Path, kind: str) -> list[list[int]]:
    """The shards to learn from, of each folder; `kind` is what `jspec train` calls them."""
    if (folder / "settings.json").exists():
        begun = Shards(folder, "safetensors").settings().get("shards", [])
        if len(begun) == len(shards):
            return begun
        raise JspecError(
            f"{folder}: was begun with {len(begun)} folders of {kind}, not {len(shards)}; give "
            "those, or another folder"
        )
    numbers = [one.numbers() for one in shards]
    for one, mine in zip(shards, numbers, strict=True):
        if not mine:
            raise JspecError(f"{one.folder}: no {kind} in it yet; run jspec train {kind}")
    return numbers
