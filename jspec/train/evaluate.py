"""How well a drafter drafts, by the engine that will use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jspec.engine.requests import SamplingParams
from jspec.errors import JspecError
from jspec.llm import LLM
from jspec.metrics import Metrics
from jspec.train.settings import Progress


class Acceptance(NamedTuple):
    """Over all rounds of all prompts."""

    num_prompts: int
    num_tokens: int
    num_rounds: int
    per_position: tuple[float, ...]
    """Share of the tokens drafted at each position that were accepted."""
    mean_length: float
    """Tokens a round, the extra one included."""


def evaluate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    progress: Progress | None = None,
) -> Acceptance:
    """Answers `prompts` (token ids) with `llm` and its drafter; seeds are 0, 1, ..."""
    if not prompts:
        raise JspecError("no prompts to evaluate on: they must leave room for max_tokens")
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        for seed in range(len(prompts))
    ]
    outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=progress)
    total = sum((output.metrics for output in outputs), Metrics())
    return Acceptance(
        num_prompts=len(prompts),
        num_tokens=total.num_tokens,
        num_rounds=total.num_rounds,
        per_position=total.acceptance_per_position,
        mean_length=total.mean_acceptance_length,
    )


def chat_prompts(llm: Any, texts: Sequence[str], *, room: int, longest: int) -> list[list[int]]:
    """Token ids of each text as a chat message, those left out that are longer than `longest`
    less `room`."""
    asked = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    return [ids for ids in asked if len(ids) + room <= longest]
