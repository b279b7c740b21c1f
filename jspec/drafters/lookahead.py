"""Lookahead decoding (arXiv 2402.02057): the target guesses far ahead in the pass that verifies.

A window of guesses moves before the text: W columns, N - 1 levels, each level what the target made
of the one before it (a step of Jacobi's iteration). A column and the guess behind it are N tokens
that the target found likely in a row; they go into a pool, and when the text gets to the first of
them, the others are drafted. Guesses and candidates of the pool are one tree, one pass:

    W 3, N 3, G 2     last token - a0 - a1 - a2      level 0 is a chain
                                   |    |    |
                                   b0   b1   b2      level 1; the target says c0 c1 c2 behind it
                      last token - p - q             candidates: what the pool has behind it
                                 - r - s
    into the pool     a0: b0 c0    a1: b1 c1    a2: b2 c2
    next window       level 0 is b0 b1 b2, level 1 is c0 c1 c2

A level-k guess sees the chain up to its column and the guesses of its column above it: the
paper's attention mask is this tree's. Every node is a draft like any other, and one that is right
is accepted, whatever it was there for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, Draft, Passage
from jspec.drafters.growth import pruned
from jspec.errors import JspecError
from jspec.tree import Tree


class Guesses(flax.struct.PyTreeNode):
    """What the rows guess."""

    num_told: Array
    """`[B]` int32: tokens of the row whose n-grams are in the pool."""
    window: Array
    """`[B, N-1, W]` int32; -1: it has not begun."""
    nodes: Array
    """`[B, W]` int32: the nodes of the last draft that the window's last level was; -1: none."""
    pool: Array
    """`[B, V, G, N-1]` int32: what has followed every token, the newest first; -1: nothing."""


@dataclasses.dataclass(frozen=True)
class LookaheadDrafter:
    """Drafts a window of guesses and what its pool has behind the last token."""

    vocab_size: int
    window: int = 4
    """W: columns of guesses."""
    ngram: int = 3
    """N: tokens of an n-gram of the pool."""
    candidates: int = 3
    """G: n-grams kept of each first token, all of which are drafted."""
    name: str = "lookahead"
    taps: tuple[int, ...] = ()
    num_best: int = 1

    def __post_init__(self) -> None:
        if self.ngram < 2 or min(self.window, self.candidates) < 1:
            raise JspecError(
                f"lookahead: window={self.window}, ngram={self.ngram}, candidates="
                f"{self.candidates}: must be at least 1, 2 and 1"
            )

    @property
    def num_speculative_tokens(self) -> int:
        return self.window + self.ngram - 2

    @property
    def num_draft_nodes(self) -> int:
        return (self.ngram - 1) * (self.candidates + self.window)

    def init(self, batch: int, capacity: int, dtype: Any) -> Guesses:
        levels = self.ngram - 1

        def nothing(*shape: int) -> Array:
            return jnp.full((batch, *shape), -1, jnp.int32)

        return Guesses(
            num_told=jnp.ones((batch,), jnp.int32),
            window=nothing(levels, self.window),
            nodes=nothing(self.window),
            pool=nothing(self.vocab_size, self.candidates, levels),
        )

    def read(self, params: Any, state: Guesses, context: Context, passage: Passage) -> Guesses:
        """Adds the n-grams of the text alone: whatever was drafted, it was not the window."""
        # A row that was cut short has fewer tokens than it was told.
        start = jnp.minimum(state.num_told, context.lengths - passage.num_tokens)
        first = jnp.arange(passage.tokens.shape[1], dtype=jnp.int32) - (self.ngram - 1)
        slots = start[:, None, None] + first[:, None] + jnp.arange(self.ngram)
        rows = jnp.arange(slots.shape[0])[:, None, None]
        grams = jnp.where(slots < 0, -1, context.tokens.at[rows, slots].get(mode="clip"))
        pool = added(state.pool, grams, passage.num_tokens)
        return state.replace(num_told=start + passage.num_tokens, pool=pool)

    def commit(self, params: Any, state: Guesses, context: Context, passage: Passage) -> Guesses:
        """Adds the n-grams of the text and of the window, which moves on."""
        assert passage.reading is not None, "a drafter with num_best gets readings"
        state = self.read(params, state, context, passage)
        best = passage.reading.best[..., 0]
        guesses = jnp.take_along_axis(best, jnp.maximum(state.nodes, 0), axis=1)
        guesses = jnp.where(state.nodes < 0, -1, guesses)
        columns = jnp.concatenate([state.window, guesses[:, None]], axis=1)  # [B, N, W]
        full = jnp.full((guesses.shape[0],), self.window, jnp.int32)
        pool = added(state.pool, jnp.swapaxes(columns, 1, 2), full)
        window = self._moved(columns[:, 1:], passage.num_tokens)
        window = jnp.where(state.window < 0, self._begun(context), window)
        return state.replace(window=window, pool=pool)

    def propose(self, params: Any, state: Guesses, context: Context) -> tuple[Draft, Guesses]:
        with jax.named_scope("draft"):
            rows = jnp.arange(context.lengths.size)
            last = context.tokens[rows, context.lengths - 1]
            found, guesses = state.pool[rows, last], state.window
            nodes = [x.reshape(rows.size, -1) for x in (jnp.swapaxes(found, 1, 2), guesses)]
            draft, node = pruned(jnp.concatenate(nodes, axis=1), self._tree(rows.size))
            return draft, state.replace(nodes=node[:, -self.window :])

    def _tree(self, batch: int) -> Tree:
        """The pool's candidates, then the window, each level by level."""
        G, W, levels = self.candidates, self.window, self.ngram - 1
        below = [0] * G + [1 + i for i in range((levels - 1) * G)]
        root = levels * G  # the node before the window's first
        chain = [0] + [root + i for i in range(1, W)]
        hanging = [root + 1 + i for i in range((levels - 1) * W)]
        parents = jnp.array(below + chain + hanging, jnp.int32)
        parents = jnp.broadcast_to(parents, (batch, parents.size))
        # All candidates may begin alike, and so may the chain; then come one guess and the chain.
        return Tree(parents, depth=self.num_speculative_tokens, branching=G + 2)

    def _moved(self, levels: Array, num_tokens: Array) -> Array:
        """Levels `[B, N-1, W]`, whose first guess is for the place behind the next, when
        `num_tokens` were committed. Columns that the text has passed go to the end."""
        passed = jnp.maximum(num_tokens - 1, 0)[:, None] + jnp.arange(self.window)
        return jnp.take_along_axis(levels, passed[:, None] % self.window, axis=2)

    def _begun(self, context: Context) -> Array:
        """The first window `[B, N-1, W]`: the text's last tokens, for want of better."""
        shape = (self.ngram - 1, self.window)
        back = 1 + jnp.arange(shape[0] * shape[1], dtype=jnp.int32) % context.lengths[:, None]
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - back, axis=1)
        return last.reshape(-1, *shape)


def added(pool: Array, grams: Array, num_grams: Array) -> Array:
    """`pool` `[B, V, G, N-1]` with the first `num_grams` `[B]` of `grams` `[B, T, N]`, those with
    no token missing, in order. An n-gram comes to the front of its first token's; it takes the
    place where it was, or that of the oldest."""
    B, V, G, _ = pool.shape
    rows, index = jnp.arange(B), jnp.arange(G)[:, None]

    def add(i: Array, pool: Array) -> Array:
        first, rest = grams[:, i, 0], grams[:, i, 1:]
        old = pool[rows, jnp.maximum(first, 0)]  # [B, G, N-1]
        same = jnp.all(old == rest[:, None], axis=-1)
        at = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), G - 1)
        moved = jnp.where(index <= at[:, None, None], jnp.roll(old, 1, axis=1), old)
        new = jnp.where(index == 0, rest[:, None], moved)
        counts = (i < num_grams) & jnp.all(grams[:, i] >= 0, axis=-1)
        return pool.at[rows, jnp.where(counts, first, V)].set(new, mode="drop")

    return jax.lax.fori_loop(0, jnp.max(num_grams), add, pool)
