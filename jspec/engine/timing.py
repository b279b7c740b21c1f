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
from jspec.cache import Cache
from jspec.decode import DecodeConfig, DecodeState, init_state, read_prompts
from jspec.drafters.base import Context, Passage, Reading
from jspec.draws import argmax
from jspec.model import Model
from jspec.sampling import neutral

LOOP = 8
"""Repetitions in one device program, so that dispatch does not count."""


class RoundTimes(NamedTuple):
    """Medians, in seconds, for batch 1."""

    plain_seconds: float
    """A target pass at the narrowest width: what one token costs without speculation."""
    verify_seconds: float
    """A target pass over K + 1 tokens."""
    draft_seconds: float
    """The drafter's share of a round: a proposal of K tokens, and learning what was kept."""
    plain_width: int
    """Tokens in the narrowest pass."""


def measure_round(
    config: DecodeConfig, params: Any, dtype: Any, context_length: int, *, repeats: int
) -> RoundTimes:
    """Times the parts in turn, `repeats` times each, greedy, after `context_length` tokens."""
    capacity = max(512, 1 << (context_length + config.widths[-1]).bit_length())
    state = init_state(
        config,
        tokens=jnp.zeros((1, capacity), jnp.int32),
        lengths=jnp.full((1,), context_length, jnp.int32),
        max_lengths=jnp.full((1,), capacity, jnp.int32),
        sampling=neutral(1, config.model.vocab_size),
        page_size=16,
        dtype=dtype,
    )
    state = jax.jit(read_prompts, static_argnums=0)(config, params, state)
    programs = (
        lambda: passes(config.model, config.widths[0], params[0], state.cache),
        lambda: passes(config.model, config.widths[-1], params[0], state.cache),
        lambda: _proposals(config, params, state),
    )
    for program in programs:
        jax.block_until_ready(program())
    seconds: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for program, times in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program())
            times.append((time.perf_counter() - start) / LOOP)
    return RoundTimes(*map(statistics.median, seconds), plain_width=config.widths[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def passes(model: Model, width: int, params: Any, cache: Cache) -> Array:
    """Passes of a model one after the other, each fed with the last one's most probable tokens."""

    def one(_: Any, tokens: Array) -> Array:
        out = model.forward(params, tokens, cache_lib.open_block(cache, width))
        return argmax(out.logits)

    return jax.lax.fori_loop(0, LOOP, one, jnp.zeros((1, width), jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _proposals(config: DecodeConfig, params: Any, state: DecodeState) -> Array:
    """Drafting alone, one round after the other: a proposal, then its first token committed."""
    width = config.drafter.num_speculative_tokens + 1
    shapes = jax.eval_shape(
        lambda: config.model.forward(
            params[0],
            jnp.zeros((1, width), jnp.int32),
            cache_lib.open_block(state.cache, width),
        )
    )
    num_read, num_best = 1 + config.drafter.num_draft_nodes, config.drafter.num_best
    reading = None
    if num_best:
        nothing = jnp.zeros((1, num_read, num_best), jnp.int32)
        reading = Reading(nothing[..., 0], nothing, jnp.full((1,), num_read, jnp.int32))
    features = tuple(
        jnp.zeros(shapes.hidden[i].shape, shapes.hidden[i].dtype) for i in config.drafter.taps
    )

    def one(_: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        tokens, drafter = carry
        context = Context(
            tokens=tokens, lengths=state.lengths, sampling=state.sampling, cache=state.cache
        )
        draft, drafter = config.drafter.propose(params[1], drafter, context)
        token = jnp.sum(draft.tokens, axis=1) + jnp.sum(draft.num_drafted) % 2
        run = jnp.broadcast_to(token[:, None], (1, width))
        passage = Passage(run, features, jnp.ones((1,), jnp.int32), reading)
        drafter = config.drafter.commit(params[1], drafter, context, passage)
        return tokens.at[:, state.lengths[0] - 1].set(token), drafter

    return jax.lax.fori_loop(0, LOOP, one, (state.tokens, state.drafter))[0]
