"""What is asked of a training: what the head depends on, and how the run is watched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jspec.errors import JspecError

Family = Literal["mtp", "eagle", "eagle3", "medusa"]
Progress = Callable[[str, int, int], None]
Evaluator = Callable[[Path], dict[str, Any]]
"""What the engine makes of the head in a folder, as `{"acceptance": [...], "length": x}`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that the trained head is a function of, beside the states."""

    family: Family = "mtp"
    steps: int = 1000
    batch_tokens: int = 4096
    sequence_length: int = 512
    learning_rate: float = 1e-3
    warmup: int = 100
    draft_vocab_size: int = 8192
    unroll: int = 3
    """Draft steps rehearsed, or the number of Medusa's heads."""
    hidden_loss: float = 0.1
    logit_loss: float = 1.0
    norms: bool = True
    """Of mtp; without them it is EAGLE's first architecture."""
    prompts_too: bool = False
    """Learn from prompts as well as from answers: more text, though not the target's own."""
    seed: int = 0
    dtype: str = "bfloat16"
    """Of activations and products; what is trained is float32."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "sequence_length", "unroll")
        _at_least(self, 0, "learning_rate", "warmup", "hidden_loss", "logit_loss", "seed")
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
class Watching:
    """How a run is watched and kept; the head does not depend on it, but for rounding on a mesh."""

    log_every: int = 20
    eval_every: int = 200
    checkpoint_every: int = 200
    evaluator: Evaluator | None = None
    """Called at every evaluation with the folder of the head as it is then."""
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
