"""Drafters in order of preference: each row takes the first that has something to propose.

    FirstOf((ngram, head)): a row whose text repeats itself follows it, at no cost; where no row
    needs the head, it does not run

All of them learn what was committed, whoever proposed it: by `read`, which needs no proposal.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.drafters.base import Context, Draft, Drafter, Passage, rows_where
from jspec.errors import JspecError
from jspec.tree import Tree


@dataclasses.dataclass(frozen=True)
class FirstOf:
    """Drafts what the first of `drafters` with a draft for the row drafts. Parameters and states
    are tuples, an entry a drafter."""

    drafters: tuple[Drafter, ...]

    @property
    def name(self) -> str:
        return ",".join(drafter.name for drafter in self.drafters)

    @property
    def num_speculative_tokens(self) -> int:
        return max(drafter.num_speculative_tokens for drafter in self.drafters)

    @property
    def num_draft_nodes(self) -> int:
        return max(drafter.num_draft_nodes for drafter in self.drafters)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(tap for drafter in self.drafters for tap in drafter.taps)

    @property
    def num_best(self) -> int:
        return max(drafter.num_best for drafter in self.drafters)

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[Any, ...]:
        return tuple(drafter.init(batch, capacity, dtype) for drafter in self.drafters)

    def read(self, params: Any, state: Any, context: Context, passage: Passage) -> tuple[Any, ...]:
        start, states = 0, []
        for drafter, own_params, own in zip(self.drafters, params, state, strict=True):
            end = start + len(drafter.taps)
            seen = passage._replace(features=passage.features[start:end])
            states.append(drafter.read(own_params, own, context, seen))
            start = end
        return tuple(states)

    def commit(
        self, params: Any, state: Any, context: Context, passage: Passage
    ) -> tuple[Any, ...]:
        return self.read(params, state, context, passage)

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        def proposal(i: int) -> Draft:
            return self.drafters[i].propose(params[i], state[i], context)[0]

        frame = _frame_of([jax.eval_shape(lambda i=i: proposal(i)) for i in range(len(params))])
        V = context.sampling.bias.shape[1]
        draft = _framed(proposal(0), frame, V)
        for i in range(1, len(self.drafters)):
            needed, mine = draft.num_drafted == 0, draft
            other = jax.lax.cond(
                jnp.any(needed), lambda i=i: _framed(proposal(i), frame, V), lambda mine=mine: mine
            )
            draft = jax.tree.map(functools.partial(rows_where, needed), other, mine)
        return draft, state


class _Frame(NamedTuple):
    """What drafts must have in common."""

    num_nodes: int
    is_soft: bool
    """They have laws."""
    tree: tuple[int, int] | None
    """Depth and branching; None: all are chains."""


def _frame_of(drafts: list[Draft]) -> _Frame:
    if any(draft.start is not None for draft in drafts):
        raise JspecError(
            "drafts that ran some of the target's layers cannot stand beside others in one batch: "
            "use cascade(FIRST, early_exit:N) in place of FIRST,early_exit:N"
        )
    trees = [draft.tree for draft in drafts if draft.tree is not None]
    chains = [draft.tokens.shape[1] for draft in drafts if draft.tree is None]
    depth = max([*chains, *(tree.depth for tree in trees)])
    return _Frame(
        num_nodes=max(draft.tokens.shape[1] for draft in drafts),
        is_soft=any(draft.probs is not None for draft in drafts),
        tree=(depth, max(1, *(tree.branching for tree in trees))) if trees else None,
    )


def _framed(draft: Draft, frame: _Frame, vocab_size: int) -> Draft:
    """The same draft in a frame."""
    B, size = draft.tokens.shape
    missing = frame.num_nodes - size
    probs, tree = draft.probs, None
    if frame.is_soft:
        if probs is None:
            probs = jax.nn.one_hot(draft.tokens, vocab_size, dtype=jnp.float32)
        probs = jnp.pad(probs, [(0, 0), (0, missing), (0, 0)])
    if frame.tree is not None:
        depth, branching = frame.tree
        chain = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (B, size))
        parents = chain if draft.tree is None else draft.tree.parents
        parents = jnp.pad(parents, [(0, 0), (0, missing)])
        tree = Tree(parents=parents, depth=depth, branching=branching)
    tokens = jnp.pad(draft.tokens, [(0, 0), (0, missing)])
    return Draft(tokens, probs, draft.num_drafted, tree)
