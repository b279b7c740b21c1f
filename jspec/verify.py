"""Which drafts to keep, so that what is emitted has the target's own law.

A pure function of drafts, laws and the rows' sampling settings; knows nothing of models or
caches. Each rule fixes the first `num_accepted` drafts and one more token, the *next token*:
recovered at the first rejection, bonus after full acceptance. A row may have drafted fewer than
K tokens; the position after its last draft is an ordinary draw from the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import Purpose
from jspec.sampling import (
    Prefix,
    Sampling,
    by_kind,
    draw_key,
    inverse_temperature,
)
from pallas_kernels import dispatch
from pallas_kernels.rejection_sampling import (
    Outcome,
    are_drafted,
    coupled_from_logits,
    leading_true,
    rejection_from_logits,
    verify_exact_match,
)


class Verdict(NamedTuple):
    """The outcome of one verification."""

    num_accepted: Array
    """`[B]` int32 in 0..K; never counts the next token."""
    next_token: Array
    """`[B]` int32: recovered or bonus token."""
    num_valid: Array
    """`[B]` int32 in 0..K+1: places before the first that has no law. Tokens from there on mean
    nothing, accepted or not."""
    finite: Array
    """`[B]` bool: that place has no law because no token is allowed; False: because its logits
    are NaN or infinite."""


def verify(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    *,
    target_logits: Array,
    sampling: Sampling,
    prefix: Prefix,
) -> Verdict:
    """Applies each row's rule to its drafts.

    Args:
      draft_tokens: `[B, K]` int32.
      draft_probs: `[B, K, V]`, the law each was really drawn from; None: each is certain.
      num_drafted: `[B]`, tokens of `draft_tokens` that count.
      target_logits: `[B, K+1, V]`; entry j is for the place of draft j.
      prefix: the tokens before the K + 1 places.
    """
    rows, width = draft_tokens.shape

    def greedy(logits: Array) -> Verdict:
        peaks, tokens = draws.largest(logits)
        drafted = are_drafted(draft_tokens, num_drafted)
        decision = verify_exact_match(tokens, draft_tokens, drafted)
        return _verdict(Outcome(*decision, peaks))

    def soft(logits: Array) -> Verdict:
        scale, positions = inverse_temperature(sampling), prefix.positions
        keys = draw_key(sampling, positions, Purpose.TARGET)
        drafts = draft_tokens, draft_probs, num_drafted

        def coupled() -> Outcome:
            return _coupled(draft_tokens, num_drafted, logits, scale, keys, implementation=kind)

        def rejection() -> Outcome:
            coins = draws.uniform(draw_key(sampling, positions[:, :-1], Purpose.ACCEPT))
            return _rejection(*drafts, logits, scale, coins, keys, implementation=kind)

        kind = _implementation()
        by_rule = (
            _if(jnp.any(sampling.coupled), coupled, rows, width),
            _if(jnp.any(~sampling.coupled), rejection, rows, width),
        )
        return _verdict(jax.tree.map(functools.partial(_where, sampling.coupled), *by_rule))

    with jax.named_scope("verify"):
        return by_kind(target_logits, sampling, prefix, greedy=greedy, soft=soft)


_coupled = jax.jit(coupled_from_logits, static_argnames="implementation")  # traced once a shape
_rejection = jax.jit(rejection_from_logits, static_argnames="implementation")


def _implementation() -> dispatch.Implementation:
    """On a mesh the laws may be split over the vocabulary; there XLA reduces them where they lie,
    while a kernel would have to gather them."""
    is_split = jax.sharding.get_abstract_mesh().size > 1
    return dispatch.Implementation.XLA if is_split else dispatch.current()


def _if(asked: Array, rule: Callable[[], Outcome], rows: int, width: int) -> Outcome:
    """What a rule says, or zeros if no row asks for it."""
    nothing = jnp.zeros((rows,), jnp.int32)
    nothing = Outcome(nothing, nothing, jnp.zeros((rows, width + 1), jnp.float32))
    return jax.lax.cond(asked, rule, lambda: nothing)


def _where(by_row: Array, x: Array, y: Array) -> Array:
    return jnp.where(by_row.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


def _verdict(outcome: Outcome) -> Verdict:
    """Adds which places have a law, by their largest logits."""
    num_accepted, next_token, peaks = outcome
    num_valid = leading_true(jnp.isfinite(peaks))
    first_without = jnp.minimum(num_valid, peaks.shape[1] - 1)[:, None]
    peak = jnp.take_along_axis(peaks, first_without, axis=1)[:, 0]
    return Verdict(num_accepted, next_token, num_valid, peak == -jnp.inf)
