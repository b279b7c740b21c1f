"""How well a drafter drafts, by the engine that will use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jspec.drafters.early_exit import EarlyExit
from jspec.engine.requests import SamplingParams
from jspec.errors import JspecError
from jspec.exits import exit_of
from jspec.head_params import ExitsConfig, ExitsParams
from jspec.llm import LLM
from jspec.metrics import Metrics
from jspec.model import llama
from jspec.train.settings import Evaluator, Progress
from jspec.train.states import TargetOfText


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


def evaluator_of(
    target: TargetOfText,
    tokenizer: Any,
    texts: Sequence[str],
    max_tokens: int,
    *,
    exit_layer: int | None = None,
) -> Evaluator | None:
    """Runs the engine on `texts` with what is in a folder: a head or a draft model, by position of
    its drafts; exits, each drafting one token; or a whole model whose first `exit_layer` layers
    draft for it. None where there is nothing to run it on."""
    if not texts:
        return None
    options: dict[str, Any] = {"tokenizer": tokenizer, "dtype": str(target.params.embed.dtype)}

    def engines(folder: Path) -> list[dict[str, Any]]:
        if exit_layer is not None:
            return [{"model": folder, "drafter": f"early_exit:{exit_layer}"}]
        of_target = {"model": llama(target.config), "params": target.params}
        drafters = _exits_in(folder, target) or [(folder, ())]
        return [of_target | {"drafter": one, "drafter_params": params} for one, params in drafters]

    def run(folder: Path) -> dict[str, Any]:
        found = [
            _evaluated(LLM(**engine, **options), texts, max_tokens) for engine in engines(folder)
        ]
        shares = [round(share, 5) for one in found for share in one.per_position]
        length = sum(one.mean_length for one in found) / len(found)
        return {"acceptance": shares, "length": round(length, 5)}

    return run


def _exits_in(folder: Path, target: TargetOfText) -> list[tuple[EarlyExit, Any]]:
    """A drafter for each exit in a folder and its parameters; none of a head or a model."""
    import checkpoints

    if not checkpoints.is_head(folder):
        return []
    config, params = checkpoints.load_head(
        folder,
        target_config=target.config,
        target_params=target.params,
        dtype=str(target.params.embed.dtype),
    )
    if not (isinstance(config, ExitsConfig) and isinstance(params, ExitsParams)):
        return []
    return [
        (EarlyExit(target.config, layer, 1), (target.params, exit_of(config, params, layer)))
        for layer in config.layers
    ]


def _evaluated(llm: LLM, texts: Sequence[str], max_tokens: int) -> Acceptance:
    room = max_tokens + llm.drafter.num_speculative_tokens
    asked = chat_prompts(llm, texts, room=room, longest=llm.max_model_len)
    return evaluate(llm, asked, max_tokens)
