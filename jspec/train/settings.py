"""What is asked of a training: what its product depends on, and how the run is watched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jspec.errors import JspecError

Family = Literal["mtp", "eagle", "eagle3", "medusa", "exits"]
Progress = Callable[[str, int, int], None]
Evaluator = Callable[[Path], dict[str, Any]]
"""What the engine makes of the drafter in a folder, as `{"acceptance": [...], "length": x}`: a
number a position, or of exits one an exit."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What every training is asked: how much it learns from, and how fast."""

    steps: int = 1000
    batch_tokens: int = 4096
    sequence_length: int = 512
    learning_rate: float = 1e-3
    warmup: int = 100
    prompts_too: bool = False
    """Learn from prompts as well as from answers: more text, though not the target's own."""
    seed: int = 0
    dtype: str = "bfloat16"
    """Of activations and products; what is trained is float32."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "sequence_length")
        _at_least(self, 0, "learning_rate", "warmup", "seed")
        if self.batch_tokens < self.sequence_length:
            raise JspecError(
                f"a batch of {self.batch_tokens} tokens is smaller than a row of "
                f"{self.sequence_length}: raise batch_tokens or lower sequence_length"
            )

    @property
    def rows(self) -> int:
        """Of a batch."""
        return self.batch_tokens // self.sequence_length


@dataclasses.dataclass(frozen=True)
class Settings(Schedule):
    """All that the trained head is a function of, beside the states."""

    family: Family = "mtp"
    draft_vocab_size: int = 8192
    unroll: int = 3
    """Draft steps rehearsed, or the number of Medusa's heads."""
    layers: tuple[int, ...] | None = None
    """Of exits: layers of the target before each."""
    hidden_loss: float = 0.1
    logit_loss: float = 1.0
    norms: bool = True
    """Of mtp; without them it is EAGLE's first architecture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 1, "unroll")
        _at_least(self, 0, "hidden_loss", "logit_loss")
        if (self.family == "exits") != bool(self.layers):
            raise JspecError(
                f"family {self.family} with {self.layers=}: exits, and only they, need layers"
            )

    @property
    def num_steps(self) -> int:
        """J, as `train.step` counts: draft steps, heads or exits."""
        return len(self.layers) if self.layers else self.unroll


@dataclasses.dataclass(frozen=True)
class DraftSettings(Schedule):
    """All that a trained draft model is a function of, beside the states."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp_size: int = 384
    draft_vocab_size: int = 6144
    """The target's tokens, the most frequent, that every step learns to say."""
    others: int = 2048
    """Of all other tokens, how many a step looks at; they take turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 1, "hidden_size", "layers", "heads", "kv_heads", "mlp_size", "others")
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise JspecError(
                f"{self.heads} heads and {self.kv_heads} kv_heads at hidden_size "
                f"{self.hidden_size}: heads must be of one even size, and shared evenly"
            )


@dataclasses.dataclass(frozen=True)
class LayerSkipSettings(Schedule):
    """All that a LayerSkip training makes of a model, beside its text (arXiv 2404.16710)."""

    dropout: float = 0.1
    """p_max: how often the last layer is left out."""
    exit_scale: float = 0.2
    """e_scale: how much exits behind earlier layers weigh."""
    rotation: int = 4
    """R: every so many layers one exit is trained, at each step the next ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 0, "dropout", "exit_scale")
        _at_least(self, 1, "rotation")
        if not self.dropout < 1:
            raise JspecError(f"dropout is {self.dropout}: it must be below 1")


@dataclasses.dataclass(frozen=True)
class Watching:
    """How a run is watched and kept; nothing trained depends on it, but for rounding on a mesh."""

    log_every: int = 20
    eval_every: int = 200
    checkpoint_every: int = 200
    evaluator: Evaluator | None = None
    """Called at every evaluation with the folder of what is trained as it is then."""
    data_parallel: int = 1
    """Devices that share a batch."""
    progress: Progress = lambda label, done, total: None
    report: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        _at_least(self, 1, "log_every", "eval_every", "checkpoint_every", "data_parallel")


def _at_least(settings: Any, least: float, *names: str) -> None:
    for name in names:
        if not getattr(settings, name) >= least:
            raise JspecError(f"{name} is {getattr(settings, name)}: it must be at least {least}")
