"""From what requests ask for to the arrays of a batch: `SamplingParams` to `Sampling`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.engine.requests import SamplingParams
from jspec.sampling import PAD_TOKEN, LogitsProcessor, Sampling


class Request(NamedTuple):
    """A prompt and the rows that go on from it."""

    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    """Of the model and of `params`."""
    bad_words: tuple[tuple[int, ...], ...]
    """`params.bad_words` as token ids."""
    seeds: tuple[int, ...]
    """One a row."""


def check_possible(request: Request, vocab_size: int) -> None:
    """Raises where the settings leave no token to emit at the very first position."""
    params, allowed = request.params, request.params.allowed_token_ids
    forbidden = {word[0] for word in request.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        forbidden |= set(request.stop_ids)
    left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
    if left <= 0:
        rule = "no token is left to emit, with what bad_words and min_tokens forbid"
        raise params.error("bad_words" if allowed is None else "allowed_token_ids", rule)


def sampling_of(
    requests: Sequence[Request],
    *,
    rows: int,
    vocab_size: int,
    processor: LogitsProcessor | None,
) -> Sampling:
    """The settings of one row for each seed of each request, then idle rows up to `rows`."""
    each = [request for request in requests for _ in request.seeds]
    seeds = [seed for request in requests for seed in request.seeds]
    idle = rows - len(each)

    def column(dtype: Any, fill: Any, value: Callable[[SamplingParams], Any]) -> Any:
        return np.array([value(r.params) for r in each] + [fill] * idle, dtype)

    def lengths(value: Callable[[Request], int]) -> Any:
        return np.array([value(r) for r in each] + [0] * idle, np.int32)

    return Sampling(
        temperature=column(np.float32, 0, lambda p: p.temperature),
        top_k=column(np.int32, 0, lambda p: max(p.top_k, 0)),
        top_p=column(np.float32, 1, lambda p: p.top_p),
        min_p=column(np.float32, 0, lambda p: p.min_p),
        seed=jnp.asarray(np.array(seeds + [0] * idle, np.uint32)),
        coupled=column(np.bool_, False, lambda p: p.verification == "coupled"),
        repetition_penalty=column(np.float32, 1, lambda p: p.repetition_penalty),
        presence_penalty=column(np.float32, 0, lambda p: p.presence_penalty),
        frequency_penalty=column(np.float32, 0, lambda p: p.frequency_penalty),
        bias=_bias([r.params for r in each], rows, vocab_size),
        biased=column(np.bool_, False, _is_biased),
        bad_words=_padded([r.bad_words for r in each], rows),
        stop_ids=_padded([[[t] for t in r.stop_ids] for r in each], rows)[..., -1],
        prompt_lengths=lengths(lambda r: len(r.prompt)),
        min_lengths=lengths(lambda r: len(r.prompt) + r.params.min_tokens),
        num_logprobs=column(np.int32, -1, lambda p: -1 if p.logprobs is None else p.logprobs),
        processed_logprobs=column(
            np.bool_, False, lambda p: p.logprobs_mode == "processed_logprobs"
        ),
        processor=processor,
    )


def _is_biased(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None


def _bias(each: Sequence[SamplingParams], rows: int, vocab_size: int) -> Any:
    if not any(map(_is_biased, each)):
        return jnp.zeros((rows, vocab_size), jnp.float32)
    bias = np.zeros((rows, vocab_size), np.float32)
    for row, params in zip(bias, each, strict=False):
        if params.allowed_token_ids is not None:
            row[:] = -np.inf
            row[list(params.allowed_token_ids)] = 0.0
        for token, amount in (params.logit_bias or {}).items():
            row[token] += amount
    return bias


def _padded(rows_of_words: Sequence[Sequence[Sequence[int]]], rows: int) -> Any:
    """`[rows, W, N]`: sequences of tokens, padded on the left; W and N are powers of two, so that
    most batches share a shape."""
    words = [word for row in rows_of_words for word in row]
    most, longest = max(map(len, rows_of_words)), max(map(len, words), default=1)
    shape = (rows, _bucket(most, 4), 1 if longest == 1 else _bucket(longest, 4))
    padded = np.full(shape, PAD_TOKEN, np.int32)
    for i, row in enumerate(rows_of_words):
        for j, word in enumerate(row):
            padded[i, j, shape[2] - len(word) :] = word
    return padded


def _bucket(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())
