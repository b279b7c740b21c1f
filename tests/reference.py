"""What sampling means, written anew for one place in float64 numpy: sorts, loops and plain text
of tokens. Shares nothing with the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


def processed(
    logits: Sequence[float],
    text: Sequence[int],
    *,
    num_prompt: int = 0,
    bias: Sequence[float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    **_: Any,
) -> np.ndarray:
    """The logits of the place behind `text`, of which `num_prompt` tokens are the prompt."""
    x = np.array(logits, np.float64)
    if bias is not None:
        x += np.asarray(bias)
    output = list(text[num_prompt:])
    for word in bad_words:
        *start, end = (token for token in word if token != -1)
        if output[len(output) - len(start) :] == start:
            x[end] = -np.inf
    if len(output) < min_tokens:
        x[list(stop_ids)] = -np.inf
    for token in set(text):
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in set(output):
        x[token] -= presence_penalty + frequency_penalty * output.count(token)
    return x


def law(
    logits: Sequence[float],
    text: Sequence[int],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    **settings: Any,
) -> np.ndarray:
    """The law of the next token: all settings, in vLLM's order."""
    x = processed(logits, text, **settings)
    if temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    x = x / temperature
    if min_p > 0:
        x[x < x.max() + np.log(min_p)] = -np.inf
    if top_k:
        x[x < np.sort(x)[::-1][min(top_k, len(x)) - 1]] = -np.inf
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if top_p < 1:
        order = np.sort(probs)[::-1]
        kept = min(int(np.searchsorted(np.cumsum(order), top_p - 1e-9)) + 1, len(probs))
        probs[probs < order[kept - 1]] = 0
        probs /= probs.sum()
    return probs


def joint_law(
    table: np.ndarray, prompt: Sequence[int], num_tokens: int, **settings: Any
) -> np.ndarray:
    """`[V] * num_tokens`: the law of the tokens that a Markov model with logits `table` `[V, V]`
    says after `prompt`. A text that a stop token ends goes on as that token for ever."""
    V = len(table)
    stop_ids = settings.get("stop_ids", ())
    joint = np.zeros((V,) * num_tokens)
    for tokens in itertools.product(range(V), repeat=num_tokens):
        prob, stopped = 1.0, None
        for i, token in enumerate(tokens):
            if prob == 0:
                break
            if stopped is not None:
                prob *= float(token == stopped)
                continue
            text = [*prompt, *tokens[:i]]
            prob *= law(table[text[-1]], text, num_prompt=len(prompt), **settings)[token]
            stopped = token if token in stop_ids else None
        joint[tokens] = prob
    return joint
