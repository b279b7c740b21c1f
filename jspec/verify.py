"""Which drafts to keep, so that what is emitted has the target's own law.

A pure function of drafts, laws and the rows' sampling settings; knows nothing of models or
caches. Each rule fixes a way of `num_accepted` drafts and one more token, the *next token*:
recovered where nothing is accepted any more, bonus after full acceptance. A row may have drafted
less than there is room for; what comes behind its last draft is an ordinary draw from the target.

A chain is judged in one go. In a tree the same rules go down from node to node, each judging the
children of one; a tree whose nodes have one child each gives what the chain gives.

One rule stands apart: `accept_all_lossy` keeps every draft, and what it emits is not the target's.
Nothing takes it but a drafter that has "lossy" in its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import Key, Purpose
from jspec.sampling import (
    Prefix,
    Sampling,
    by_kind,
    draw_key,
    inverse_temperature,
)
from jspec.tree import Tree, Walk, along, children, descend
from pallas_kernels import dispatch
from pallas_kernels.rejection_sampling import (
    Outcome,
    are_drafted,
    chain_from_logits,
    leading_true,
    siblings_from_logits,
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
    path: Array | None
    """`[B, K+1]` int32: the nodes of the tree that lead to the next token (`tree.Walk`); None: a
    chain, whose path are its first K + 1 nodes."""


def verify(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    *,
    target_logits: Array,
    sampling: Sampling,
    prefix: Prefix,
    tree: Tree | None = None,
) -> Verdict:
    """Applies each row's rule to its drafts.

    Args:
      draft_tokens: `[B, P]` int32.
      draft_probs: `[B, P, V]`, the law each was really drawn from; None: each is certain.
      num_drafted: `[B]`, tokens of `draft_tokens` that count.
      target_logits: `[B, P+1, V]`; entry j is for the place behind node j, in a chain that of
        draft j.
      prefix: the tokens before the P + 1 places.
      tree: how the drafts hang together; None: a chain, and then K = P.
    """
    drafts = _Drafts(draft_tokens, draft_probs, num_drafted)

    def greedy(logits: Array) -> Verdict:
        peaks, tokens = draws.largest(logits)
        if tree is not None:
            return _walked(descend(tree, _exact(tree, drafts, tokens)), peaks)
        drafted = are_drafted(draft_tokens, num_drafted)
        decision = verify_exact_match(tokens, draft_tokens, drafted)
        return _verdict(Outcome(*decision, peaks), None)

    def soft(logits: Array) -> Verdict:
        scale, positions = inverse_temperature(sampling), prefix.positions
        laws = _Laws(
            logits, scale, draw_key(sampling, positions, Purpose.TARGET), _implementation()
        )
        coins = draw_key(sampling, positions, Purpose.ACCEPT)
        if tree is not None:
            return _soft_tree(tree, drafts, laws, coins, sampling.coupled)
        return _soft_chain(drafts, laws, coins, sampling.coupled)

    with jax.named_scope("verify"):
        return by_kind(target_logits, sampling, prefix, greedy=greedy, soft=soft)


Rule = Callable[..., Verdict]
"""`verify`, or what has its arguments."""


def accept_all_lossy(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    *,
    target_logits: Array,
    sampling: Sampling,
    prefix: Prefix,
    tree: Tree | None = None,
) -> Verdict:
    """LOSSY: keeps every draft of a chain, whatever the target thinks of it. The token behind them
    is the target's. Arguments are those of `verify`; `draft_tokens` and their laws do not count."""
    assert tree is None, "a tree's drafts cannot all be kept"
    peaks, _ = draws.largest(target_logits)
    place = num_drafted[:, None]
    behind = prefix.replace(
        depths=place, drafts=jnp.take_along_axis(prefix.drafts, place[..., None], axis=1)
    )

    def soft(logits: Array) -> Array:
        law = draws.law_of(logits, inverse_temperature(sampling)[:, None])
        return draws.draw(law, draw_key(sampling, behind.positions, Purpose.TARGET))

    with jax.named_scope("verify"):
        logits = jnp.take_along_axis(target_logits, place[..., None], axis=1)
        token = by_kind(logits, sampling, behind, greedy=draws.argmax, soft=soft)
    return _verdict(Outcome(num_drafted, token[:, 0], peaks), None)


class _Drafts(NamedTuple):
    """As in the arguments of `verify`."""

    tokens: Array
    probs: Array | None
    num_drafted: Array


class _Laws(NamedTuple):
    """softmax(logits * scale) at P + 1 places, the keys of their draws, and who computes."""

    logits: Array
    scale: Array
    keys: Key
    implementation: dispatch.Implementation


def _soft_chain(drafts: _Drafts, laws: _Laws, coin_keys: Key, is_coupled: Array) -> Verdict:
    logits, scale, keys, kind = laws
    coins = draws.uniform((coin_keys[0][:, :-1], coin_keys[1][:, :-1]))
    outcome = _chain(*drafts, logits, scale, coins, keys, is_coupled, implementation=kind)
    return _verdict(outcome, None)


def _soft_tree(
    tree: Tree, drafts: _Drafts, laws: _Laws, coin_keys: Key, is_coupled: Array
) -> Verdict:
    rows = jnp.arange(drafts.num_drafted.size)
    peaks, _ = draws.largest(laws.logits)

    def drawn() -> Array:
        scale = jnp.broadcast_to(laws.scale[:, None], peaks.shape)
        return draws.draw(draws.law_of(laws.logits, scale), laws.keys)

    tokens = jax.lax.cond(jnp.any(is_coupled), drawn, lambda: jnp.zeros(peaks.shape, jnp.int32))
    exact = _exact(tree, drafts, tokens)
    below, count = children(tree, drafts.num_drafted)

    def at(x: Array, node: Array) -> Array:
        return x[rows, node]

    def rejection(node: Array) -> tuple[Array, Array]:
        drafted = at(below, node)  # [B, M]
        ranks = jnp.arange(tree.branching, dtype=jnp.uint32)
        key = (at(coin_keys[0], node)[:, None], at(coin_keys[1], node)[:, None])
        stands, token = _siblings(
            jnp.take_along_axis(drafts.tokens, drafted, axis=1),
            None if drafts.probs is None else drafts.probs[rows[:, None], drafted],
            at(count, node),
            at(laws.logits, node),
            laws.scale,
            draws.uniform(key, ranks),
            (at(laws.keys[0], node), at(laws.keys[1], node)),
            implementation=laws.implementation,
        )
        none = stands == tree.branching
        chosen = at(drafted, jnp.minimum(stands, tree.branching - 1))
        return jnp.where(none, -1, chosen), token

    def judge(node: Array) -> tuple[Array, Array]:
        by_match = exact(node)
        by_ratio = jax.lax.cond(jnp.all(is_coupled), lambda: by_match, lambda: rejection(node))
        return jax.tree.map(functools.partial(jnp.where, is_coupled), by_match, by_ratio)

    return _walked(descend(tree, judge), peaks)


def _exact(
    tree: Tree, drafts: _Drafts, target_tokens: Array
) -> Callable[[Array], tuple[Array, Array]]:
    """Accepts the child that equals the target's own token `[B, P+1]` (greedy and coupled)."""
    there = are_drafted(drafts.tokens, drafts.num_drafted)

    def judge(node: Array) -> tuple[Array, Array]:
        token = jnp.take_along_axis(target_tokens, node[:, None], axis=1)
        fits = there & (tree.parents == node[:, None]) & (drafts.tokens == token)
        child = jnp.argmax(fits, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(fits, axis=1), child, -1), token[:, 0]

    return judge


_chain = jax.jit(chain_from_logits, static_argnames="implementation")  # traced once a shape
_siblings = jax.jit(siblings_from_logits, static_argnames="implementation")


def _implementation() -> dispatch.Implementation:
    """On a mesh the laws may be split over the vocabulary; there XLA reduces them where they lie,
    while a kernel would have to gather them."""
    is_split = jax.sharding.get_abstract_mesh().size > 1
    return dispatch.Implementation.XLA if is_split else dispatch.current()


def _walked(walk: Walk, peaks: Array) -> Verdict:
    outcome = Outcome(walk.num_accepted, walk.next_token, along(walk.path, peaks))
    return _verdict(outcome, walk.path)


def _verdict(outcome: Outcome, path: Array | None) -> Verdict:
    """Adds which places have a law, by their largest logits."""
    num_accepted, next_token, peaks = outcome
    num_valid = leading_true(jnp.isfinite(peaks))
    first_without = jnp.minimum(num_valid, peaks.shape[1] - 1)[:, None]
    peak = jnp.take_along_axis(peaks, first_without, axis=1)[:, 0]
    return Verdict(num_accepted, next_token, num_valid, peak == -jnp.inf, path)
