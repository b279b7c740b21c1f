"""What a user asks for and gets back. Knows nothing of arrays or models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jspec.errors import JspecError
from jspec.metrics import Metrics

FinishReason = Literal["stop", "length"]

MAX_SEED = 2**32 - 1
_LONGEST_VALUE = 60  # characters of a wrong value that a message repeats


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one request; names and meanings as in vLLM.

    They apply in the order allowed_token_ids, bad_words, min_tokens, logit_bias, the engine's
    logits processor, penalties, temperature, min_p, top_k, top_p, at every position alike,
    whether a draft stood there or not. typical_p is left out on purpose.
    """

    n: int = 1
    """Outputs for the prompt, which is read once. Output j has the seed `seed + j`."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this mass; in (0, 1]."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 (or -1) keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by it if positive, else multiplied."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from them as often as the token is there; in [-2, 2]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """No other tokens are emitted."""
    bad_words: Sequence[str] = ()
    """Texts whose tokens are not completed in the output, with and without a space before."""
    seed: int | None = None
    """Draws are a function of (seed, position); None takes a fresh seed and reports it."""
    max_tokens: int = 256
    min_tokens: int = 0
    """Nothing but max_tokens ends the output before it has this many tokens."""
    stop: str | Sequence[str] = ()
    """Texts that end the output, wherever in a token they begin and end."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, in the text."""
    logprobs: int | None = None
    """Report the log probability of each token of the output, and of this many of the most
    probable tokens in its place."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """The model's own, or (of the output) those after all of the settings above; temperature 0
    counts as 1 there."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    verification: Literal["rejection", "coupled"] = "rejection"
    """How drafts are checked; both keep the target's law. Under "coupled" the text for a seed
    does not depend on the drafter at all."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name, ok, rule in _RULES:
            try:
                fine = ok(getattr(self, name))
            except (TypeError, AttributeError, ValueError):
                fine = False
            if not fine:
                raise self.error(name, rule)
        if self.min_tokens > self.max_tokens:
            raise self.error("min_tokens", f"is above max_tokens={self.max_tokens}")

    def error(self, name: str, rule: str) -> JspecError:
        """An error about the value of a parameter."""
        value = repr(getattr(self, name))
        if len(value) > _LONGEST_VALUE:
            value = value[: _LONGEST_VALUE - 3] + "..."
        return JspecError(f"{name}={value}: {rule}")

    def check(self, vocab_size: int, max_logprobs: int) -> None:
        """Raises where the values do not suit the engine at hand."""
        ids = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in ids.items():
            wrong = [token for token in tokens if token >= vocab_size]
            if wrong:
                rule = f"token id {wrong[0]} is outside the vocabulary of {vocab_size}"
                raise self.error(name, rule)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > max_logprobs:
                raise self.error(name, f"is above the engine's max_logprobs={max_logprobs}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _are_texts(values: Any) -> bool:
    return not isinstance(values, str) and all(isinstance(v, str) and v for v in values)


def _is_count(value: Any) -> bool:
    return value is None or _is_id(value)


_RULES: tuple[tuple[str, Any, str], ...] = (
    ("n", lambda v: _is_id(v) and v >= 1, "must be at least 1"),
    ("temperature", lambda v: _is_number(v) and v >= 0, "must be 0 (greedy) or more"),
    ("top_p", lambda v: 0 < v <= 1, "must be in (0, 1]"),
    ("top_k", lambda v: isinstance(v, int) and v >= -1, "must be 0 (off) or more"),
    ("min_p", lambda v: 0 <= v <= 1, "must be in [0, 1]"),
    ("repetition_penalty", lambda v: _is_number(v) and v > 0, "must be above 0 (1 is none)"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "must be in [-2, 2]"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "must be in [-2, 2]"),
    (
        "logit_bias",
        lambda v: v is None or all(_is_id(t) and _is_number(b) for t, b in v.items()),
        "must map token ids to numbers",
    ),
    (
        "allowed_token_ids",
        lambda v: v is None or (len(v) > 0 and all(map(_is_id, v))),
        "must hold at least one token id",
    ),
    ("bad_words", _are_texts, "must be a list of texts, none empty"),
    ("seed", lambda v: v is None or (_is_id(v) and v <= MAX_SEED), "must be in 0 .. 2**32 - 1"),
    ("max_tokens", lambda v: _is_id(v) and v >= 1, "must be at least 1"),
    ("min_tokens", _is_id, "must be 0 or more"),
    ("stop", _are_texts, "must be a text or a list of texts, none empty"),
    ("stop_token_ids", lambda v: all(map(_is_id, v)), "must be token ids"),
    ("logprobs", _is_count, "must be None or 0 or more"),
    ("prompt_logprobs", _is_count, "must be None or 0 or more"),
    (
        "logprobs_mode",
        lambda v: v in ("raw_logprobs", "processed_logprobs"),
        'must be "raw_logprobs" or "processed_logprobs"',
    ),
    (
        "verification",
        lambda v: v in ("rejection", "coupled"),
        'must be "rejection" or "coupled"',
    ),
)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log probability of one token in one place."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None


TokenLogprob = dict[int, Logprob]
"""By token id: the token that stands in a place, and the most probable ones in its place."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    """0 .. n - 1."""
    text: str
    """The text of `token_ids`, special tokens and the stop string left out unless the request
    says otherwise; empty without a tokenizer."""
    token_ids: list[int]
    """What was generated, an end token included; up to and with the token that completed a stop
    string."""
    finish_reason: FinishReason
    """"stop": an end or stop token, or a stop string; "length": max_tokens."""
    stop_reason: int | str | None
    """The stop token or stop string that ended it; None for the model's own end tokens."""
    logprobs: list[TokenLogprob] | None
    """An entry a token, if asked for."""
    cumulative_logprob: float | None
    """Their sum over the tokens of the output."""
    metrics: Metrics
    seed: int
    """With it, n=1 and the same settings this output can be had again."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The result of one request. `text`, `token_ids` and so on are those of `outputs[0]`."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt: str | None = None
    """The prompt, if it was given as a text."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """An entry a prompt token, if asked for; None for the first, which nothing predicts."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def metrics(self) -> Metrics:
        return self.outputs[0].metrics

    @property
    def seed(self) -> int:
        return self.outputs[0].seed


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """What one burst of rounds added to one output of a streamed request."""

    text: str
    """Text that nothing can take back: what might begin a stop string is held until it is sure."""
    token_ids: list[int]
    index: int = 0
    """Which output."""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    """On the output's last chunk."""
    output: RequestOutput | None = None
    """The whole result, on the request's last chunk only."""
