"""What a user asks for and gets back. Knows nothing of arrays or models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from jspec.errors import JspecError
from jspec.metrics import Metrics

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one request; names and meanings as in vLLM.

    The filters apply in the order temperature, min_p, top_k, top_p.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this mass; in (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable; in [0, 1]."""
    seed: int | None = None
    """Draws are a function of (seed, position); None takes a fresh seed and reports it."""
    max_tokens: int = 256
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the request besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    verification: Literal["rejection", "coupled"] = "rejection"
    """How drafts are checked; both keep the target's law. Under "coupled" the text for a seed
    does not depend on the drafter at all."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise JspecError(f"{name}={getattr(self, name)!r}: {rule}")

        finite = isinstance(self.temperature, (int, float)) and math.isfinite(self.temperature)
        need(finite and self.temperature >= 0, "temperature", "must be 0 (greedy) or more")
        need(0 < self.top_p <= 1, "top_p", "must be in (0, 1]")
        need(self.top_k >= -1, "top_k", "must be 0 (off) or more")
        need(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]")
        need(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(
            self.verification in ("rejection", "coupled"),
            "verification",
            'must be "rejection" or "coupled"',
        )
        seed_ok = self.seed is None or 0 <= self.seed < 2**32
        need(seed_ok, "seed", "must be in 0 .. 2**32 - 1")
        need(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "must be token ids")


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """What was generated, an end token included."""
    text: str
    """The same as text, special tokens left out; empty without a tokenizer."""
    finish_reason: FinishReason
    """"stop": an end or stop token; "length": max_tokens."""
    metrics: Metrics
    seed: int
    """With it and the same settings the output can be had again."""


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """What one burst of rounds added to a streamed request."""

    text: str
    token_ids: list[int]
    output: RequestOutput | None = None
    """The whole result, on the last chunk only."""

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.output is None else self.output.finish_reason
