"""Measures what `plans` judges by: what exits say along the target's own text, and what they cost.

A short run: a few prompts answered greedily, one pass over them with every exit listening, and
passes of three depths timed at a few widths.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec import cache as cache_lib
from jspec.benchmark import Progress
from jspec.cache import Cache
from jspec.config import ModelConfig
from jspec.drafter_loading import Drafting, Loading, exits_of
from jspec.drafters.base import Context
from jspec.drafters.ngram import NgramDrafter
from jspec.draws import argmax
from jspec.engine.requests import SamplingParams
from jspec.engine.timing import LOOP, passes
from jspec.errors import JspecError
from jspec.exits import ExitParams, exit_logits, exit_model
from jspec.llm import LLM, default_widths
from jspec.model import Model, embed, forward_layers, llama
from jspec.params import Params
from jspec.plans import NGRAMS, Costs, Sight
from jspec.sampling import neutral

_WIDTHS = (1, 2, 6, 13)
"""Of the passes that are timed."""
_CONTEXT = 256
_PAGE_SIZE = 16
_NGRAMS = NgramDrafter(8)


class Calibration(NamedTuple):
    """What plans for a target are judged by."""

    texts: tuple[Sight, ...]
    costs: Costs
    exits: tuple[int, ...]
    """Layers below each exit that was looked at."""


def calibrate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    exits: str | None = None,
    max_tokens: int = 96,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Answers `prompts` (token ids) greedily with a target that decodes plainly, and looks.

    Args:
      llm: any engine of the target; what it drafts with only changes how long this takes.
      exits: "own", or a file of trained ones; None: those that come with the model, else its own.
    """
    loading = Loading(llm.target, Drafting(), llm.options, {})
    config, params = loading.config("early_exit"), llm.params[0]
    chosen = exits_of(exits, loading)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    texts = []
    for number, prompt in enumerate(prompts):
        progress("calibrating", number, len(prompts) + 1)
        (output,) = llm.generate([list(prompt)], greedy)
        texts.append(see(params, config, chosen, prompt, output.token_ids))
    progress("calibrating", len(prompts), len(prompts) + 1)
    costs = measure_costs(params, config, chosen[min(chosen)])
    progress("calibrating", len(prompts) + 1, len(prompts) + 1)
    return Calibration(tuple(texts), costs, tuple(sorted(chosen)))


def see(
    params: Params,
    config: ModelConfig,
    exits: Mapping[int, ExitParams],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Sight:
    """What every exit, and n-grams, say at each place of an answer that the target gave."""
    text = [*prompt, *answer]
    width = max(64, 1 << (len(text) - 1).bit_length())
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(text)] = text
    lengths = np.arange(len(prompt), len(text), dtype=np.int32)
    drafts, counts = jax.device_get(_ngram_proposals(tokens, lengths))
    offered = np.zeros_like(drafts)
    for ahead in range(drafts.shape[1]):  # what was proposed for a place so many places before
        offered[ahead:, ahead] = drafts[: len(drafts) - ahead, ahead]
    found = _listen(params, exits, tokens, lengths - 1, offered, config=config)
    said, named, gaps = jax.device_get(found)
    return Sight(
        best=np.asarray(answer, np.int32),
        said=said,
        ngrams=[draft[:count].tolist() for draft, count in zip(drafts, counts, strict=True)],
        gaps={
            layer: [
                dict(zip(*here, strict=True))
                for here in zip(named.tolist(), rows.tolist(), strict=True)
            ]
            for layer, rows in gaps.items()
        },
    )


@functools.partial(jax.jit, static_argnames="config")
def _listen(
    params: Params,
    exits: Mapping[int, ExitParams],
    tokens: Array,
    places: Array,
    offered: Array,
    *,
    config: ModelConfig,
) -> tuple[dict[int, Array], Array, dict[int, Array]]:
    """What exits say behind `places` `[N]` of a text `[1, S]`: the likeliest token `[N]` of each;
    these and what was `offered` `[N, O]`, together; and how far each exit has each of them below
    its best."""
    cache = _empty_cache(llama(config), 1, tokens.shape[1], params.embed.dtype)
    hidden, _ = forward_layers(
        params,
        config,
        (embed(params, tokens),),
        cache_lib.open_block(cache, tokens.shape[1]),
        layers=range(max(exits)),
    )
    eps, V = config.rms_norm_eps, config.vocab_size
    logits = {
        layer: exit_logits(exit, hidden[layer][:, places], eps=eps, vocab_size=V)[0]
        for layer, exit in exits.items()
    }
    said = {layer: argmax(each) for layer, each in logits.items()}
    named = jnp.concatenate([jnp.stack([*said.values()], axis=1), offered], axis=1)

    def gaps(logits: Array) -> Array:
        here = jnp.take_along_axis(logits, named, axis=1)
        return jnp.max(logits, axis=1, keepdims=True) - here

    return said, named, {layer: gaps(each) for layer, each in logits.items()}


@jax.jit
def _ngram_proposals(tokens: Array, lengths: Array) -> tuple[Array, Array]:
    """Drafts `[N, K]` and their counts `[N]` behind the first `lengths` `[N]` tokens of a text."""
    rows = jnp.broadcast_to(tokens, (lengths.size, tokens.shape[1]))
    context = Context(tokens=rows, lengths=lengths, sampling=neutral(lengths.size, 1))
    draft, _ = _NGRAMS.propose((), (), context)
    return draft.tokens, draft.num_drafted


def measure_costs(
    params: Params, config: ModelConfig, exit: ExitParams, *, repeats: int = 5
) -> Costs:
    """Seconds of a round's parts on this device, in rows of one behind 256 tokens: medians of
    passes of the whole model and of two depths, timed in turn."""
    L = config.num_hidden_layers
    if L < 3:
        raise JspecError(f"a model of {L} layers: there are no exits to choose from")
    low, high = max(1, L // 4), max(2, 3 * L // 4)
    cache = _empty_cache(llama(config), 1, 2 * _CONTEXT, params.embed.dtype)
    cache = cache.replace(lengths=cache.lengths + _CONTEXT)
    runs: dict[tuple[int, int], Callable[[], Array]] = {}
    for width in _WIDTHS:
        for layer in (low, high):
            model = exit_model(config, layer)
            runs[layer, width] = functools.partial(passes, model, width, (params, exit), cache)
        runs[L, width] = functools.partial(passes, llama(config), width, params, cache)
    runs[NGRAMS, 0] = functools.partial(_searches, jnp.zeros((1, 2 * _CONTEXT), jnp.int32))
    took = _timed(runs, repeats)
    layers = [(took[high, w] - took[low, w]) / (high - low) for w in _WIDTHS]
    *narrower, _ = default_widths(_WIDTHS[-1], params.embed.dtype.name, 1)
    return Costs(
        widths=_WIDTHS,
        layer=tuple(layers),
        head=tuple(took[L, w] - L * one for w, one in zip(_WIDTHS, layers, strict=True)),
        exit=tuple(took[low, w] - low * one for w, one in zip(_WIDTHS, layers, strict=True)),
        ngrams=took[NGRAMS, 0],
        num_layers=L,
        narrow=narrower[0] if narrower else None,
    )


def _timed(
    runs: Mapping[tuple[int, int], Callable[[], Array]], repeats: int
) -> dict[tuple[int, int], float]:
    """Median seconds of one of the passes of each program."""
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[tuple[int, int], list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - start) / LOOP)
    return {name: statistics.median(each) for name, each in seconds.items()}


@jax.jit
def _searches(tokens: Array) -> Array:
    """N-gram proposals one after the other, each behind the one before."""

    def one(_: Any, tokens: Array) -> Array:
        lengths = jnp.full((1,), _CONTEXT, jnp.int32)
        context = Context(tokens=tokens, lengths=lengths, sampling=neutral(1, 1))
        draft, _ = _NGRAMS.propose((), (), context)
        return tokens.at[:, _CONTEXT - 1].set(draft.tokens[:, 0] + draft.num_drafted)

    return jax.lax.fori_loop(0, LOOP, one, tokens)


def _empty_cache(model: Model, rows: int, capacity: int, dtype: Any) -> Cache:
    return cache_lib.init_cache(model.cache_spec, rows, capacity, page_size=_PAGE_SIZE, dtype=dtype)
