"""Results of requests from what a batch has made of them. Knows nothing of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jspec.decode import Finish
from jspec.engine.batch import Progress
from jspec.engine.requests import CompletionOutput, Logprob, RequestOutput, TokenLogprob
from jspec.engine.settings import Request
from jspec.engine.text import OutputText
from jspec.logprobs import TokenLogprobs

Decode = Callable[[int], str | None]
"""The text of one token, None without a tokenizer."""


def completion(
    request: Request,
    index: int,
    progress: Progress,
    text: OutputText,
    eos_token_ids: Sequence[int],
    decode: Decode,
) -> CompletionOutput:
    """Output number `index` of a request whose row has finished."""
    stopped = progress.finish == Finish.STOP
    last = progress.token_ids[-1]
    stop_reason = text.stopped_by
    if stopped and stop_reason is None and last not in eos_token_ids:
        stop_reason = last
    logprobs = logprobs_since(request, progress, 0, decode)
    return CompletionOutput(
        index=index,
        text=text.text,
        token_ids=progress.token_ids,
        finish_reason="stop" if stopped else "length",
        stop_reason=stop_reason,
        logprobs=logprobs,
        cumulative_logprob=None
        if logprobs is None
        else sum(
            entry[token].logprob for entry, token in zip(logprobs, progress.token_ids, strict=True)
        ),
        metrics=progress.metrics,
        seed=request.seeds[index],
    )


def request_output(
    request: Request,
    prompt: str | None,
    outputs: list[CompletionOutput],
    first: Progress,
    decode: Decode,
) -> RequestOutput:
    """All outputs of a request; `first` is the progress of any of its rows."""
    count = request.params.prompt_logprobs
    prompt_logprobs = None
    if count is not None and first.logprobs is not None:
        scores = _entries(first.logprobs, request.prompt[1:], 1, count, decode)
        prompt_logprobs = [None, *scores]
    return RequestOutput(list(request.prompt), outputs, prompt, prompt_logprobs)


def logprobs_since(
    request: Request, progress: Progress, start: int, decode: Decode
) -> list[TokenLogprob] | None:
    """The scores of a row's generated tokens from number `start` on, if it asked for them."""
    count = request.params.logprobs
    if count is None or progress.logprobs is None:
        return None
    tokens = progress.token_ids[start:]
    return _entries(progress.logprobs, tokens, len(request.prompt) + start, count, decode)


def _entries(
    scores: TokenLogprobs, tokens: Sequence[int], start: int, count: int, decode: Decode
) -> list[TokenLogprob]:
    """For each token, which stands at `start` and so on, its own score and the `count` best."""
    entries = []
    for place, token in enumerate(tokens, start):
        own = Logprob(float(scores.logprob[place]), int(scores.rank[place]), decode(token))
        entry = {token: own}
        for rank in range(count):
            other, logprob = int(scores.top_ids[place, rank]), scores.top_logprobs[place, rank]
            if other not in entry:
                entry[other] = Logprob(float(logprob), rank + 1, decode(other))
        entries.append(entry)
    return entries
