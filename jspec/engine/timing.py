"""How long the parts of a round take on this machine, each in a loop on the device."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.decode import DecodeConfig
from jspec.drafters.base import Context
from jspec.draws import argmax
from jspec.prefill import prefill
from jspec.sampling import neutral

_LOOP = 8
"""Repetitions in one device program, so that dispatch does not count."""


class RoundTimes(NamedTuple):
    """Medians, in seconds, for batch 1."""

    plain_seconds: float
    """A target pass at the narrowest width: what one token costs without speculation."""
    verify_seconds: float
    """A target pass over K + 1 tokens."""
    draft_seconds: float
    """A proposal of K tokens."""
    plain_width: int
    """Tokens in the narrowest pass."""


def measure_round(
    config: DecodeConfig, params: Any, dtype: Any, context_length: int, *, repeats: int
) -> RoundTimes:
    """Times the parts in turn, `repeats` times each, greedy, after `context_length` tokens."""
    capacity = max(512, 1 << (context_length + config.widths[-1]).bit_length())
    context = Context(
        tokens=jnp.zeros((1, capacity), jnp.int32),
        lengths=jnp.full((1,), context_length, jnp.int32),
        sampling=neutral(1, config.model.vocab_size),
    )
    cache = cache_lib.init_cache(config.model.cache_spec, 1, capacity, page_size=16, dtype=dtype)
    cache, _ = prefill(
        config.model,
        params[0],
        cache,
        context.tokens,
        context.lengths - 1,
        chunk=config.prefill_chunk,
    )
    drafter = config.drafter.init(1, capacity, dtype)
    drafter = config.drafter.prefill(params[1], drafter, context)
    programs = (
        lambda: _passes(config, config.widths[0], params[0], cache),
        lambda: _passes(config, config.widths[-1], params[0], cache),
        lambda: _proposals(config, params[1], drafter, context),
    )
    for program in programs:
        jax.block_until_ready(program())
    seconds: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for program, times in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program())
            times.append((time.perf_counter() - start) / _LOOP)
    return RoundTimes(*map(statistics.median, seconds), plain_width=config.widths[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _passes(config: DecodeConfig, width: int, params: Any, cache: Any) -> Array:
    """Target passes one after the other, each fed with the last one's most probable tokens."""

    def one(_: Any, tokens: Array) -> Array:
        out = config.model.forward(params, tokens, cache_lib.open_block(cache, width))
        return argmax(out.logits)

    return jax.lax.fori_loop(0, _LOOP, one, jnp.zeros((1, width), jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _proposals(config: DecodeConfig, params: Any, drafter: Any, context: Context) -> Array:
    """Proposals one after the other, each behind a token of the last one."""

    def one(_: Any, token: Array) -> Array:
        tokens = context.tokens.at[:, context.lengths[0] - 1].set(token)
        draft, _state = config.drafter.propose(params, drafter, context.replace(tokens=tokens))
        return jnp.sum(draft.tokens, axis=1) + jnp.sum(draft.num_drafted) % 2

    return jax.lax.fori_loop(0, _LOOP, one, jnp.zeros((1,), jnp.int32))
