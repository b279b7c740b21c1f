"""One check of a draft: a model's pass over last token and drafts, judged, and what is kept of it.

Knows nothing of rounds: who drafted, and what is done with the outcome, is the caller's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache, KeysValues
from jspec.drafters.base import Context, Draft, Reading, Start
from jspec.logprobs import TokenLogprobs, score
from jspec.model import Model, Output
from jspec.sampling import Prefix, chain_prefix, probs_from_logits
from jspec.tree import Tree, along, ancestors, depths_of, paths_to
from jspec.verify import Rule, Verdict, verify


class Checked(NamedTuple):
    """What the target's pass over a block yields, whatever width it ran at."""

    verdict: Verdict
    run: Array
    """`[B, K+1]`: the accepted drafts, then the next token, then what means nothing."""
    logprobs: TokenLogprobs
    """Of the run."""
    block: tuple[KeysValues, ...]
    """Per layer `[B, K+1, Nkv, H]`: what the run's places hold, if their tokens are kept."""
    features: tuple[Array, ...]
    """`[B, K+1, D]` each: the target's hidden states that the run came of."""
    laws: Array | None
    """`[B, K+1, V]`: the law of each place of the run; None: nobody asked."""
    reading: Reading | None
    """`[B, P+1]`: all that was read; None: nobody asked."""


def check(
    model: Model,
    params: Any,
    context: Context,
    draft: Draft,
    *,
    width: int,
    most: int,
    taps: tuple[int, ...],
    max_logprobs: int = 0,
    num_best: int = 0,
    with_laws: bool = False,
    leaning: float = 0.0,
    rule: Rule = verify,
) -> Checked:
    """Judges a draft by the model's law.

    Args:
      context: what is committed, with the model's cache.
      width: tokens of the block; drafts beyond it are cut off, padding stands behind them.
      most: K, drafts that can be accepted.
      taps: hidden states to hand on.
      num_best: likeliest tokens to name behind each token that was read, kept or not.
      with_laws: hand on the laws as well, for whom the outcome is a draft.
      leaning: what logits of drafts are raised by before the law is made (chains of certain ones).
      rule: what judges.
    """
    num_nodes = draft.tokens.shape[1]
    num_drafts = min(num_nodes, width - 1)
    draft = _cut(draft, num_drafts)
    tokens, probs, num_drafted, tree, start = draft
    last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    read = _fit(jnp.concatenate([last, tokens], axis=1), width)
    prefix, depths, mask = _places(context, tokens, tree, width)
    assert context.cache is not None, "a check runs on the model's cache"
    cache = cache_lib.open_block(context.cache, width, depths=depths, mask=mask)
    out = _forward(model, params, read, cache, start)
    logits = out.logits[:, : num_drafts + 1]
    logits = _leaning_to(draft, logits, leaning) if leaning else logits
    verdict = rule(
        tokens,
        probs,
        num_drafted,
        target_logits=logits,
        sampling=context.sampling,
        prefix=prefix,
        tree=tree,
    )
    on_path = functools.partial(along, verdict.path)
    accepted = on_path(read)[:, 1 : num_drafts + 1]
    run = emitted_run(accepted, verdict)
    prefix = chain_prefix(context.tokens, context.lengths, accepted)
    logprobs = score(on_path(logits), run, context.sampling, prefix, max_logprobs)
    features = tuple(out.hidden[i] for i in taps)
    block, features = jax.tree.map(on_path, (cache_lib.own_block(out.cache), features))
    laws = probs_from_logits(on_path(logits), context.sampling, prefix) if with_laws else None
    kept = jax.tree.map(lambda x: _fit(x, most + 1), (run, logprobs, block, features, laws))
    seen = reading_of(read[:, : num_drafts + 1], logits, 1 + num_drafted, num_best)
    reading = jax.tree.map(functools.partial(_fit, width=num_nodes + 1), seen)
    return Checked(verdict._replace(path=None), *kept, reading=reading)


def reading_of(tokens: Array, logits: Array, num_tokens: Array, num_best: int) -> Reading | None:
    """What is told of a pass over `tokens` `[B, N]` with `logits` `[B, N, V]`, if anybody asks."""
    if not num_best:
        return None
    count = jnp.minimum(num_tokens, tokens.shape[1])
    return Reading(tokens, jax.lax.top_k(logits, num_best)[1].astype(jnp.int32), count)


def _cut(draft: Draft, num_drafts: int) -> Draft:
    """The first `num_drafts` nodes of a draft."""
    return draft._replace(
        tokens=draft.tokens[:, :num_drafts],
        probs=None if draft.probs is None else draft.probs[:, :num_drafts],
        tree=None if draft.tree is None else draft.tree.cut(num_drafts),
    )


def _leaning_to(draft: Draft, logits: Array, leaning: float) -> Array:
    """`logits` `[B, K+1, V]` with those of the drafts `[B, K]` raised where they would stand."""
    tokens, probs, num_drafted, tree, _ = draft
    assert probs is tree is None, "a law that depends on drafts takes a chain of certain ones"
    rows, places = jnp.arange(num_drafted.size)[:, None], jnp.arange(tokens.shape[1])
    raised = jnp.where(places < num_drafted[:, None], leaning, 0.0).astype(logits.dtype)
    return logits.at[rows, places, tokens].add(raised)


def _forward(model: Model, params: Any, block: Array, cache: Cache, start: Start | None) -> Output:
    """The target's pass over a block `[B, T]`, from where the drafter has brought it."""
    if start is None:
        return model.forward(params, block, cache)
    assert model.forward_from is not None, "a drafter ran layers of a model that has none"
    hidden, begun = jax.tree.map(functools.partial(_fit, width=block.shape[1]), start)
    for i, (keys, values) in enumerate(begun):
        cache = cache_lib.append(cache, i, keys, values)
    return model.forward_from(params, hidden, cache)


def _places(
    context: Context, drafts: Array, tree: Tree | None, width: int
) -> tuple[Prefix, Array | None, Array | None]:
    """What stands before the places behind last token and drafts; depths and mask of the block,
    None for a chain. Padding behind a tree sees itself alone."""
    if tree is None:
        return chain_prefix(context.tokens, context.lengths, drafts), None, None
    is_ancestor = ancestors(tree)
    depths = depths_of(is_ancestor)
    paths = paths_to(tree, is_ancestor, drafts)
    prefix = Prefix(tokens=context.tokens, lengths=context.lengths, drafts=paths, depths=depths)
    missing = width - depths.shape[1]
    mask = jnp.pad(is_ancestor, [(0, 0), (0, missing), (0, missing)])
    mask |= jnp.eye(width, dtype=jnp.bool_)
    return prefix, jnp.pad(depths, [(0, 0), (0, missing)]), mask


def _fit(x: Array, width: int) -> Array:
    """`x` with axis 1, if it has one, cut or zero-padded to `width`."""
    if x.ndim == 1:
        return x
    missing = max(width - x.shape[1], 0)
    return jnp.pad(x[:, :width], [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def emitted_run(draft_tokens: Array, verdict: Verdict) -> Array:
    """`[B, K+1]`: the accepted drafts, then the next token, then what means nothing."""
    index = jnp.arange(draft_tokens.shape[1] + 1)
    padded = _fit(draft_tokens, index.size)
    return jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], padded)
