"""What the rules of speculative decoding say, in plain JAX: the contract of this package, and its
path on every device without a kernel.

Chains: speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1) and exact match
with the target's own draws. Trees: the children of one node are judged in turn, each against what
its rejected sisters have left (SpecInfer, arXiv 2305.09781, algorithm 2). All randomness comes
from the caller: coins, and keys of races in `jspec.draws`.

Letters: B rows, K drafts of a chain, S siblings, V vocabulary. Laws are float32; logits may hold
-inf; `scale` `[B]` is the inverse temperature. A place whose logits are NaN or all -inf has no
law, and its token means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import Key, Law

Decision = tuple[Array, Array]
"""How many drafts stand, or which child does, `[B]` int32; and the token behind, `[B]` int32."""


class Outcome(NamedTuple):
    """A decision on the drafts of a chain from logits."""

    num_accepted: Array
    """`[B]` int32 in 0..K."""
    next_token: Array
    """`[B]` int32."""
    peaks: Array
    """`[B, K+1]` float32: the largest logit of each place; not finite where it has no law."""


def rejection(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target_probs: Array,
    coins: Array,
    keys: Key,
) -> Decision:
    """Keeps drafts `[B, K]` by the ratio of the laws; the next token is drawn from the residual.

    Args:
      draft_tokens: `[B, K]` int32.
      draft_probs: `[B, K, V]`, the law each was drawn from; None: each is certain.
      num_drafted: `[B]` int32, tokens of `draft_tokens` that count.
      target_probs: `[B, K+1, V]`; entry j is for the place of draft j.
      coins: `[B, K]` in [0, 1).
      keys: of `[B, K+1]`; the next token is drawn with that of its place.
    """
    chosen = prob_at(target_probs, padded(draft_tokens))
    rows = jnp.arange(draft_tokens.shape[0])

    def target_at(place: Array) -> Array:
        return target_probs[rows, place]

    return _decide(draft_tokens, draft_probs, num_drafted, chosen, target_at, coins, keys)


def rejection_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    keys: Key,
) -> Outcome:
    """`rejection` from softmax(logits * scale), logits `[B, K+1, V]`; only the law of the next
    token is written out."""
    law = _law(logits, scale)
    return Outcome(*_reject(draft_tokens, draft_probs, num_drafted, law, coins, keys), law.peak)


def coupled_from_logits(
    draft_tokens: Array, num_drafted: Array, logits: Array, scale: Array, keys: Key
) -> Outcome:
    """The target's token at every place is drawn from softmax(logits * scale) `[B, K+1, V]` with
    the place's own key, and drafts are kept while they equal it: what is emitted does not depend
    on the drafts at all."""
    law = _law(logits, scale)
    return Outcome(*_match(draft_tokens, num_drafted, law, keys), law.peak)


def chain_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    keys: Key,
    coupled: Array,
) -> Outcome:
    """`coupled_from_logits` for the rows that `coupled` `[B]` names, `rejection_from_logits` for
    the others; both read one law, and a rule that no row asks for costs nothing."""
    law = _law(logits, scale)

    def match() -> Decision:
        return _match(draft_tokens, num_drafted, law, keys)

    def reject() -> Decision:
        return _reject(draft_tokens, draft_probs, num_drafted, law, coins, keys)

    return Outcome(*by_rule(coupled, match, reject), law.peak)


def by_rule[Result](
    coupled: Array, match: Callable[[], Result], reject: Callable[[], Result]
) -> Result:
    """What `match` says of the rows `coupled` `[B]` and `reject` of the others, arrays whose first
    axis is rows; what no row asks for is not computed."""
    shapes = jax.eval_shape(match)

    def nothing() -> Result:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(coupled.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    matched = jax.lax.cond(jnp.any(coupled), match, nothing)
    return jax.tree.map(choose, matched, jax.lax.cond(jnp.all(coupled), nothing, reject))


def siblings(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target_probs: Array,
    coins: Array,
    key: Key,
) -> Decision:
    """Judges the children of one node in turn, without changing the law of what is emitted.

    Child s was drawn from q_s; r_0 = target_probs. It stands if coin * q_s(x_s) * Z < r_s(x_s),
    with Z = sum r_s (1 for r_0, a law); otherwise r_{s+1} = max(r_s - Z * q_s, 0). An empty
    r_{s+1} is nothing but rounding: there r_s is what is left, and no other child is judged.

    Args:
      draft_tokens: `[B, S]` int32.
      draft_probs: `[B, S, V]`, q_s; None: each is certain.
      num_drafted: `[B]` int32, children that count.
      target_probs: `[B, V]`.
      coins: `[B, S]` in [0, 1).
      key: of `[B]`.

    Returns:
      accepted: `[B]` int32, the child that stands, or S.
      next_token: `[B]` int32, drawn from what is left where none stands; else some token.
    """
    B, S = draft_tokens.shape
    left, total = target_probs, jnp.ones((B,), jnp.float32)
    accepted, judged = jnp.full((B,), S, jnp.int32), jnp.full((B,), True)
    for s in range(S):
        token = draft_tokens[:, s]
        law = draft_law(token, None if draft_probs is None else draft_probs[:, s], left)
        judged &= s < num_drafted
        stands = judged & (coins[:, s] * prob_at(law, token) * total < prob_at(left, token))
        accepted = jnp.where(stands, s, accepted)
        residual = jnp.maximum(left - total[:, None] * law, 0.0)
        remains = jnp.sum(residual, axis=-1)
        judged &= ~stands & (remains > 0)
        left = jnp.where(judged[:, None], residual, left)
        total = jnp.where(judged, remains, total)
    return accepted, draws.draw_weighted(left, key)


def siblings_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    key: Key,
) -> Decision:
    """`siblings` under softmax(logits * scale), logits `[B, V]`."""
    target = draws.probs_at(_law(logits[:, None], scale), jnp.zeros_like(num_drafted))
    return siblings(draft_tokens, draft_probs, num_drafted, target, coins, key)


def verify_exact_match(target_tokens: Array, draft_tokens: Array, drafted: Array) -> Decision:
    """Keeps drafts while they equal the target's own tokens `[B, K+1]` (greedy and coupled)."""
    num_accepted = leading_true(drafted & (draft_tokens == target_tokens[:, :-1]))
    return num_accepted, jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]


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
        return leading_true(drafted & (coins < target_prob))
    return leading_true(drafted & (coins * prob_at(draft_probs, draft_tokens) < target_prob))


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
    probs = None if draft_probs is None else draft_probs[rows, at]
    draft = draft_law(draft_tokens[rows, at], probs, target)
    residual = jnp.maximum(target - jnp.where(rejected[:, None], draft, 0.0), 0.0)
    # Equal laws leave nothing but rounding to reject; then the target's law is the limit.
    return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, target)


def are_drafted(draft_tokens: Array, num_drafted: Array) -> Array:
    """`[B, K]`: which drafts count."""
    return jnp.arange(draft_tokens.shape[1]) < num_drafted[:, None]


def padded(draft_tokens: Array) -> Array:
    """`[B, K+1]`: reading K of K + 1 places would copy them."""
    return jnp.pad(draft_tokens, [(0, 0), (0, 1)])


def prob_at(laws: Array, tokens: Array) -> Array:
    """The entries `[...]` of laws `[..., V]` at tokens `[...]`."""
    index = jnp.maximum(tokens, 0)[..., None]
    return jnp.take_along_axis(laws, index, axis=-1)[..., 0]


def draft_law(token: Array, probs: Array | None, like: Array) -> Array:
    """`[B, V]`: the law that a draft `[B]` was drawn from; certain if `probs` is None."""
    return jax.nn.one_hot(token, like.shape[-1], dtype=jnp.float32) if probs is None else probs


def _match(draft_tokens: Array, num_drafted: Array, law: Law, keys: Key) -> Decision:
    drafted = are_drafted(draft_tokens, num_drafted)
    return verify_exact_match(draws.draw(law, keys), draft_tokens, drafted)


def _reject(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    law: Law,
    coins: Array,
    keys: Key,
) -> Decision:
    chosen = draws.prob_of(law, padded(draft_tokens))

    def target_at(place: Array) -> Array:
        return draws.probs_at(law, place)

    return _decide(draft_tokens, draft_probs, num_drafted, chosen, target_at, coins, keys)


def _decide(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    chosen: Array,
    target_at: Callable[[Array], Array],
    coins: Array,
    keys: Key,
) -> Decision:
    """`chosen` `[B, K+1]`: the target's probabilities of the padded drafts."""
    drafted = are_drafted(draft_tokens, num_drafted)
    num_accepted = count_accepted(draft_tokens, draft_probs, drafted, chosen[:, :-1], coins)
    target = target_at(num_accepted)
    residual = residual_at(num_accepted, draft_tokens, draft_probs, drafted, target)
    rows = jnp.arange(draft_tokens.shape[0])
    key = keys[0][rows, num_accepted], keys[1][rows, num_accepted]
    return num_accepted, draws.draw_weighted(residual, key)


def _law(logits: Array, scale: Array) -> Law:
    """Of `[B, T, V]` logits and `[B]` scales."""
    logits = logits.astype(jnp.float32)
    return draws.law_of(logits, jnp.broadcast_to(scale[:, None], logits.shape[:2]))


def leading_true(flags: Array) -> Array:
    """`[B]` int32: how many of `[B, K]` are true before the first false."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
