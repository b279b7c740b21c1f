"""Which drafts to keep, so that what is emitted has the target's own law.

A pure function of drafts, laws and the rows' sampling settings; knows nothing of models or
caches. Each rule fixes the first `num_accepted` drafts and one more token, the *next token*:
recovered at the first rejection, bonus after full acceptance. A row may have drafted fewer than
K tokens; the position after its last draft is an ordinary draw from the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import Law, Purpose
from jspec.sampling import (
    Prefix,
    Sampling,
    by_kind,
    draw_key,
    inverse_temperature,
)

Decision = tuple[Array, Array]
"""`num_accepted` and `next_token` of a `Verdict`."""


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
    drafted = jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None]

    def greedy(logits: Array) -> Verdict:
        peaks, tokens = draws.largest(logits)
        return _verdict(verify_exact_match(tokens, draft_tokens, drafted), peaks)

    def soft(logits: Array) -> Verdict:
        scale = jnp.broadcast_to(inverse_temperature(sampling)[:, None], logits.shape[:2])
        law, positions = draws.law_of(logits, scale), prefix.positions

        def coupled() -> Decision:
            key = draw_key(sampling, positions, Purpose.TARGET)
            return verify_exact_match(draws.draw(law, key), draft_tokens, drafted)

        def rejection() -> Decision:
            return verify_rejection(law, draft_tokens, draft_probs, drafted, sampling, positions)

        by_row = zip(
            _if(jnp.any(sampling.coupled), coupled, draft_tokens.shape[0]),
            _if(jnp.any(~sampling.coupled), rejection, draft_tokens.shape[0]),
            strict=True,
        )
        num_accepted, next_token = (jnp.where(sampling.coupled, *pair) for pair in by_row)
        return _verdict((num_accepted, next_token), law.peak)

    with jax.named_scope("verify"):
        return by_kind(target_logits, sampling, prefix, greedy=greedy, soft=soft)


def _if(asked: Array, rule: Callable[[], Decision], rows: int) -> Decision:
    """What a rule says, or zeros if no row asks for it."""
    nothing = jnp.zeros((rows,), jnp.int32)
    return jax.lax.cond(asked, rule, lambda: (nothing, nothing))


def _verdict(decision: Decision, peaks: Array) -> Verdict:
    """Adds which places have a law, by their largest logits `[B, K+1]`."""
    num_valid = _leading_true(jnp.isfinite(peaks))
    first_without = jnp.minimum(num_valid, peaks.shape[1] - 1)[:, None]
    peak = jnp.take_along_axis(peaks, first_without, axis=1)[:, 0]
    return Verdict(*decision, num_valid, peak == -jnp.inf)


def verify_exact_match(target_tokens: Array, draft_tokens: Array, drafted: Array) -> Decision:
    """Keeps drafts while they equal the target's own tokens `[B, K+1]` (greedy and coupled).

    Coupled: the target's token at a position is drawn with noise that is a function of
    (seed, position); so the text does not depend on the drafts at all.
    """
    num_accepted = _leading_true(drafted & (draft_tokens == target_tokens[:, :-1]))
    return num_accepted, jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]


@jax.jit  # traced once a shape
def verify_rejection(
    law: Law,
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    sampling: Sampling,
    positions: Array,
) -> Decision:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1). `law` is the
    target's, of K + 1 places; only that of the next token is written out."""
    coins = draws.uniform(draw_key(sampling, positions[:, :-1], Purpose.ACCEPT))
    padded = jnp.pad(draft_tokens, [(0, 0), (0, 1)])  # reading K of K + 1 places copies them
    target_prob = draws.prob_of(law, padded)[:, :-1]
    num_accepted = count_accepted(draft_tokens, draft_probs, drafted, target_prob, coins)
    rows = jnp.arange(draft_tokens.shape[0])
    target = draws.probs_at(law, num_accepted)
    residual = residual_at(num_accepted, draft_tokens, draft_probs, drafted, target)
    key = draw_key(sampling, positions[rows, num_accepted][:, None], Purpose.TARGET)
    return num_accepted, draws.draw_weighted(residual[:, None], key)[:, 0]


def count_accepted(
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    target_prob: Array,
    coins: Array,
) -> Array:
    """`[B]`: drafts before the first with `coin * draft_prob >= target_prob`, the rule without a
    division. `coins` and `target_prob` (of the drafts) are `[B, K]`."""
    if draft_probs is None:
        return _leading_true(drafted & (coins < target_prob))
    token = jnp.maximum(draft_tokens, 0)[..., None]
    draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
    return _leading_true(drafted & (coins * draft_prob < target_prob))


def residual_at(
    num_accepted: Array,
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    target: Array,
) -> Array:
    """The law `[B, V]` of the next token, not normalised: max(target - draft, 0) at the first
    rejection (eq. 2), the target's own law `target` `[B, V]` where nothing was drafted."""
    B, K = draft_tokens.shape
    if K == 0:
        return target
    rows, at = jnp.arange(B), jnp.minimum(num_accepted, K - 1)
    rejected = (num_accepted < K) & drafted[rows, at]
    if draft_probs is None:
        draft = jax.nn.one_hot(draft_tokens[rows, at], target.shape[-1], dtype=jnp.float32)
    else:
        draft = draft_probs[rows, at]
    residual = jnp.maximum(target - jnp.where(rejected[:, None], draft, 0.0), 0.0)
    # Equal laws leave nothing but rounding to reject; then the target's law is the limit.
    return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, target)


def _leading_true(flags: Array) -> Array:
    """`[B]` int32: how many of `[B, K]` are true before the first false."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
