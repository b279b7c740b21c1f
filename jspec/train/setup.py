"""From settings, states and a target to everything that a training works with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.errors import JspecError
from jspec.head_params import HeadConfig
from jspec.train import data
from jspec.train.new_head import Config, Frozen, draft_vocabulary, head_config, new_head
from jspec.train.settings import Settings, Watching
from jspec.train.shards import Shards
from jspec.train.states import TargetOfText, digest_of, fingerprint, state_shards
from jspec.train.step import (
    Batch,
    Objective,
    TrainState,
    init_state,
    make_optimiser,
    uses_hidden_loss,
)


class Run(NamedTuple):
    """What a training works with; all but its state."""

    settings: Settings
    watching: Watching
    folder: Path
    objective: Objective
    optimiser: optax.GradientTransformation
    corpus: data.Corpus
    frozen: Frozen
    mesh: Mesh | None

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
    """A run in `folder`, which notes the settings, and the state before its first step.

    A folder that was begun before keeps the shards that it began with, of all folders of
    `states`. Raises JspecError for settings that do not fit one another, the states, the target,
    the devices or the folder.
    """
    sources = [state_shards(one).settings() for one in states]
    for one, source in zip(states, sources, strict=True):
        _check_target(one, source, target)
    config = head_config(
        settings.family,
        target.config,
        draft_vocab_size=settings.draft_vocab_size,
        norms=settings.norms,
        num_heads=settings.unroll,
    )
    taps = _taps(config, target)
    for one, source in zip(states, sources, strict=True):
        _check_taps(one, source, taps)
    mesh = _mesh(settings, watching.data_parallel)
    numbers = _numbers(states, folder)
    files = [
        state_shards(one).path(number)
        for one, mine in zip(states, numbers, strict=True)
        for number in mine
    ]
    corpus = data.open_corpus(files, taps, settings.sequence_length)
    digests = [digest_of(source) for source in sources]
    Shards(folder, "safetensors").open(
        {**dataclasses.asdict(settings), "states": digests, "shards": numbers}
    )
    counts = data.answer_counts(corpus.shards, target.config.vocab_size)
    token_ids = draft_vocabulary(counts, settings.draft_vocab_size, target.config.eos_token_ids)
    head = new_head(config, target.params, token_ids, settings.seed)
    optimiser = make_optimiser(settings.learning_rate, warmup=settings.warmup, steps=settings.steps)
    objective = _objective(settings, config, watching.data_parallel)
    run = Run(settings, watching, folder, objective, optimiser, corpus, head.frozen, mesh)
    run = run._replace(frozen=run.replicated(head.frozen))
    return run, init_state(head.trained, optimiser)


def _objective(settings: Settings, config: Config, devices: int) -> Objective:
    return Objective(
        config=config,
        num_steps=settings.unroll,
        logit_loss=settings.logit_loss,
        hidden_loss=settings.hidden_loss if uses_hidden_loss(config) else 0.0,
        groups=devices,
        dtype=settings.dtype,
    )


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


def _taps(config: Config, target: TargetOfText) -> tuple[int, ...]:
    """What is read: the features and the final hidden state, ascending."""
    features = config.taps if isinstance(config, HeadConfig) else (-1,)
    entries = target.config.num_hidden_layers + 1
    return tuple(sorted({tap % entries for tap in (*features, -1)}))


def _check_taps(states: Path, source: dict[str, Any], taps: tuple[int, ...]) -> None:
    missing = [tap for tap in taps if tap not in source["taps"]]
    if missing:
        raise JspecError(
            f"{states}: has no states of tap {missing[0]}, which this family reads; make them "
            "with --taps eagle3"
        )


def _mesh(settings: Settings, devices: int) -> Mesh | None:
    if devices == 1:
        return None
    there = jax.devices()
    if devices > len(there):
        raise JspecError(f"a mesh of {devices} devices: there are {len(there)}")
    if settings.rows % devices:
        raise JspecError(f"a mesh of {devices} devices does not divide {settings.rows} rows")
    return Mesh(np.array(there[:devices]), ("data",), axis_types=(AxisType.Auto,))


def _numbers(states: Sequence[Path], folder: Path) -> list[list[int]]:
    """The shards to learn from, of each folder."""
    if (folder / "settings.json").exists():
        begun = Shards(folder, "safetensors").settings().get("shards", [])
        if len(begun) == len(states):
            return begun
        raise JspecError(
            f"{folder}: was begun with {len(begun)} folders of states, not {len(states)}; give "
            "those, or another folder"
        )
    numbers = [state_shards(one).numbers() for one in states]
    for one, mine in zip(states, numbers, strict=True):
        if not mine:
            raise JspecError(f"{one}: no states in it yet; run jspec train states")
    return numbers
