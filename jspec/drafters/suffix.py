"""Suffix matches of any length: what mostly followed the longest ending that occurred before.

SAM decoding (arXiv 2411.10666) keeps an online suffix automaton of the text, a few steps of
pointer chasing a token. What it answers is the longest suffix with an earlier occurrence, and
where that ended. Here the same is kept as one number a place:

    match[i]: how many tokens up to place i equal the text's last tokens
    behind a new token t    match[i] = (match[i - 1] + 1) if tokens[i] == t else 0

    tokens  a b c a b      match  0 2 0 0 .      a new c: 0 0 3 0 0 .

The largest entry is the length of the automaton's answer and its places are all the answer's end
positions (the tests compare them with a real one). Why not an automaton: its transitions would be
a hash table, since a table of V columns is too large, and its steps depend on one another, each a
launch on a GPU. One vector operation over S places a committed token, for all rows, is cheap: at
2048 places a round takes 11 microseconds on a CPU core where one token was told and 27 where seven
were, against milliseconds for the target's pass. There an automaton would be no slower.

`drafters.ngram` compares eight tokens anew every round; here no match is too long, and of equally
long ones the most frequent continuation is followed. Simulated over 65 greedy texts of Spec-Bench
(SmolLM2, K = 6, a growth of 3), the mean acceptance length is 1.495, with the latest continuation
1.483; the length of the longest match made no difference.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, Draft, Passage
from jspec.drafters.ngram import check_lookup, continuation, num_worth


class Matches(flax.struct.PyTreeNode):
    """How the text up to each place ends like all that has been told."""

    num_told: Array
    """`[B]` int32: tokens of the row that it knows of."""
    match: Array
    """`[B, S]` int32: tokens up to each place that equal the last ones told; 0 for the last."""


@dataclasses.dataclass(frozen=True)
class SuffixDrafter:
    """Proposes the most frequent continuation of the longest match, the latest if tied."""

    num_speculative_tokens: int = 6
    min_match: int = 1
    """Shortest suffix, in tokens, worth following."""
    growth: int = 3
    """A match of m tokens drafts at most `1 + growth * (m - 1)`."""
    name: str = "suffix"
    taps: tuple[int, ...] = ()
    num_best: int = 0

    def __post_init__(self) -> None:
        check_lookup(self)

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens

    def init(self, batch: int, capacity: int, dtype: Any) -> Matches:
        """Of texts of one token, which has no match."""
        return Matches(jnp.ones((batch,), jnp.int32), jnp.zeros((batch, capacity), jnp.int32))

    def read(self, params: Any, state: Matches, context: Context, passage: Passage) -> Matches:
        # Prompts are told in chunks while `context` has all of them; a row that was cut short has
        # fewer tokens than it was told, and begins anew.
        start = jnp.minimum(state.num_told, context.lengths - passage.num_tokens)
        match = jnp.where((start == state.num_told)[:, None], state.match, 0)

        def tell(i: Array, match: Array) -> Array:
            longer = extended(match, context.tokens, start + i, passage.tokens[:, i])
            return jnp.where((i < passage.num_tokens)[:, None], longer, match)

        match = jax.lax.fori_loop(0, jnp.max(passage.num_tokens), tell, match)
        return Matches(start + passage.num_tokens, match)

    def commit(self, params: Any, state: Matches, context: Context, passage: Passage) -> Matches:
        return self.read(params, state, context, passage)

    def propose(self, params: Any, state: Matches, context: Context) -> tuple[Draft, Matches]:
        with jax.named_scope("draft"):
            row = jax.vmap(self._propose_row, in_axes=(0, 0, 0, None))
            vocab_size = context.sampling.bias.shape[1]
            return row(state.match, context.tokens, context.lengths, vocab_size), state

    def _propose_row(self, match: Array, tokens: Array, length: Array, vocab_size: int) -> Draft:
        """`match` and `tokens` `[S]`, `length` scalar."""
        longest = jnp.max(match)
        end = mostly(match == longest, jnp.roll(tokens, -1), vocab_size)
        draft = continuation(tokens, length, end, self.num_speculative_tokens)
        return Draft(draft, None, num_worth(self, longest))


def extended(match: Array, tokens: Array, place: Array, token: Array) -> Array:
    """`match` `[B, S]` behind one more `token` `[B]`, which stands at `place` `[B]`.

    The last place of a full row has no match, so that rolling it to the front brings a zero.
    """
    earlier = jnp.arange(tokens.shape[1]) < place[:, None]
    same = earlier & (tokens == token[:, None])
    return jnp.where(same, jnp.roll(match, 1, axis=1) + 1, 0)


def mostly(chosen: Array, following: Array, vocab_size: int) -> Array:
    """Of the `chosen` places `[S]` the latest with the token that most of them have in `following`
    `[S]`."""
    where = jnp.arange(chosen.size, dtype=jnp.int32)
    counts = jnp.zeros((vocab_size,), jnp.int32).at[following].add(chosen.astype(jnp.int32))
    frequency = jnp.where(chosen, counts[following], 0)
    return jnp.max(jnp.where(frequency == jnp.max(frequency), where, 0))
