"""Which drafts to keep, so that what is emitted has the target's own law.

A pure function of drafts, laws and the rows' sampling settings; knows nothing of models or
caches. Each rule fixes the first `num_accepted` drafts and one more token, the *next token*:
recovered at the first rejection, bonus after full acceptance. A row may have drafted fewer than
K tokens; the position after its last draft is an ordinary draw from the target.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.sampling import (
    Purpose,
    Sampling,
    argmax,
    draw,
    probs_from_logits,
    uniform_draw,
)


class Verdict(NamedTuple):
    """The outcome of one verification."""

    num_accepted: Array
    """`[B]` int32 in 0..K; never counts the next token."""
    next_token: Array
    """`[B]` int32: recovered or bonus token."""


def verify(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    *,
    target_logits: Array,
    sampling: Sampling,
    positions: Array,
) -> Verdict:
    """Applies each row's rule to its drafts.

    Args:
      draft_tokens: `[B, K]` int32.
      draft_probs: `[B, K, V]`, the law each was really drawn from; None: each is certain.
      num_drafted: `[B]`, tokens of `draft_tokens` that count.
      target_logits: `[B, K+1, V]`; entry j is for the position of draft j.
      positions: `[B, K+1]`, absolute position of the token that entry j is for.
    """
    with jax.named_scope("verify"):
        drafted = jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None]
        return jax.lax.cond(
            jnp.all(sampling.temperature == 0),
            lambda: verify_exact_match(argmax(target_logits), draft_tokens, drafted),
            lambda: _verify_soft(
                draft_tokens, draft_probs, drafted, target_logits, sampling, positions
            ),
        )


def _verify_soft(
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    target_logits: Array,
    sampling: Sampling,
    positions: Array,
) -> Verdict:
    target_probs = probs_from_logits(target_logits, sampling)

    def rejection() -> Verdict:
        coins = uniform_draw(sampling.seed, positions[:, :-1], Purpose.ACCEPT)
        num_accepted = count_accepted(draft_tokens, draft_probs, drafted, target_probs, coins)
        law = residual_at(num_accepted, draft_tokens, draft_probs, drafted, target_probs)
        where = jnp.take_along_axis(positions, num_accepted[:, None], axis=1)
        return Verdict(num_accepted, draw(law[:, None], sampling, where, Purpose.TARGET)[:, 0])

    def coupled() -> Verdict:
        target_tokens = draw(target_probs, sampling, positions, Purpose.TARGET)
        return verify_exact_match(target_tokens, draft_tokens, drafted)

    def by_row() -> Verdict:
        pairs = zip(coupled(), rejection(), strict=True)
        return Verdict(*(jnp.where(sampling.coupled, a, b) for a, b in pairs))

    # One rule for all rows is the usual case; only a mixed batch pays for both.
    some, every = jnp.any(sampling.coupled), jnp.all(sampling.coupled)
    kind = some.astype(jnp.int32) + every.astype(jnp.int32)
    return jax.lax.switch(kind, (rejection, by_row, coupled))


def verify_exact_match(target_tokens: Array, draft_tokens: Array, drafted: Array) -> Verdict:
    """Keeps drafts while they equal the target's own tokens `[B, K+1]` (greedy and coupled).

    Coupled: the target's token at a position is the argmax of log target + noise, noise a
    function of (seed, position); so the text does not depend on the drafts at all.
    """
    num_accepted = _leading_true(drafted & (draft_tokens == target_tokens[:, :-1]))
    next_token = jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]
    return Verdict(num_accepted, next_token)


def count_accepted(
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    target_probs: Array,
    coins: Array,
) -> Array:
    """`[B]`: drafts before the first with `coin * draft_prob >= target_prob`.

    Leviathan et al., arXiv 2211.17192, algorithm 1, without the division. `coins` `[B, K]`.
    """
    token = jnp.maximum(draft_tokens, 0)[..., None]
    target_prob = jnp.take_along_axis(target_probs[:, :-1], token, axis=2)[..., 0]
    if draft_probs is None:
        accept = coins < target_prob
    else:
        draft_prob = jnp.take_along_axis(draft_probs, token, axis=2)[..., 0]
        accept = coins * draft_prob < target_prob
    return _leading_true(drafted & accept)


def residual_at(
    num_accepted: Array,
    draft_tokens: Array,
    draft_probs: Array | None,
    drafted: Array,
    target_probs: Array,
) -> Array:
    """The law `[B, V]` of the next token, not normalised: max(target - draft, 0) at the first
    rejection (arXiv 2211.17192, eq. 2), the target's own law where nothing was drafted."""
    B, K = draft_tokens.shape
    rows = jnp.arange(B)
    target = target_probs[rows, num_accepted]
    if K == 0:
        return target
    at = jnp.minimum(num_accepted, K - 1)
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
