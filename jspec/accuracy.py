"""How much of a text is what the target itself would have chosen: what a lossy drafter costs."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.engine.requests import SamplingParams
from jspec.errors import JspecError
from jspec.llm import LLM


def greedy_share(target: LLM, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """The share of `token_ids` that are `target`'s likeliest token behind `prompt` and those before
    them, in 0..1. One pass reads them all as a prompt, so in 16 bits near ties may fall otherwise
    than they did in decoding; greedy text of the target itself shows how many do.
    """
    if not prompt or not token_ids:
        raise JspecError("greedy_share: give a prompt and a text of at least one token each")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = target.generate([[*prompt, *token_ids]], params)
    assert output.prompt_logprobs is not None
    scores = output.prompt_logprobs[len(prompt) :]
    ranks = [entry[token].rank for entry, token in zip(scores, token_ids, strict=True) if entry]
    return sum(rank == 1 for rank in ranks) / len(token_ids)
