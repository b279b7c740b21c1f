"""Token recycling (arXiv 2408.08696): what the target last thought comes behind every token that
it has read, kept or not, is what it is likely to think again.

A verification pass yields logits at every node of its tree, and decoding throws away all but those
of one path. Here the likeliest successors of every token read, of rejected ones and of the
prompt's, go into a matrix `[B, V, R]`, and the next tree is looked up in it, from token to token.

    matrix    a: b c    b: d -    c: - -    d: a b       "-": not seen yet
    tree      (0) (1) (0, 0) (0, 1) (0, 0, 0)
    behind a  b   c   d      -      a                    drafted: b c d a

Nothing is trained, and the state is all on the device: R tokens for each of V tokens and row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters.base import Context, Draft, Passage, Reading
from jspec.drafters.growth import StaticTree, pruned
from jspec.errors import JspecError
from jspec.tree import Tree

_ACCURACIES = (
    (0.187, 0.067, 0.035, 0.025, 0.018, 0.012),
    (0.355, 0.088, 0.042, 0.030, 0.023, 0.015),
    (0.461, 0.087, 0.053, 0.018, 0.025, 0.014),
    (0.550, 0.060, 0.038, 0.047, 0.025, 0.022),
)
"""How often the successor of each rank is right, by level, where those above were: simulated over
65 greedy texts of Spec-Bench (SmolLM2), with the successors of accepted tokens alone."""


def recycling_tree(depth: int = 3, num_nodes: int = 5) -> StaticTree:
    """The tree of `num_nodes` nodes most likely to be accepted. The default is small, for a CPU,
    where every node costs; where a wide pass is as fast, more nodes are accepted."""
    levels = [_ACCURACIES[min(level, len(_ACCURACIES) - 1)] for level in range(depth)]
    return StaticTree.likeliest(levels, num_nodes)


_TREE = recycling_tree()


@dataclasses.dataclass(frozen=True)
class RecyclingDrafter:
    """Drafts the tree of `tree`'s ranks that the successors last seen give."""

    vocab_size: int
    tree: StaticTree = _TREE
    name: str = "recycling"
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tree.num_ranks > self.vocab_size:
            raise JspecError(
                f"recycling: a tree with {self.tree.num_ranks} children of a node: there are "
                f"{self.vocab_size} tokens"
            )

    @property
    def num_speculative_tokens(self) -> int:
        return self.tree.depth

    @property
    def num_draft_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def num_best(self) -> int:
        return self.tree.num_ranks

    def init(self, batch: int, capacity: int, dtype: Any) -> Array:
        """The successors `[B, V, R]` int32 of every token, likeliest first; -1: not seen yet."""
        return jnp.full((batch, self.vocab_size, self.num_best), -1, jnp.int32)

    def read(self, params: Any, state: Array, context: Context, passage: Passage) -> Array:
        return self.commit(params, state, context, passage)

    def commit(self, params: Any, state: Array, context: Context, passage: Passage) -> Array:
        assert passage.reading is not None, "a drafter with num_best gets readings"
        places = self._places(passage.reading)
        rows = jnp.arange(places.shape[0])[:, None]
        best = passage.reading.best[..., : self.num_best]
        return state.at[rows, places].set(best, mode="drop")

    def propose(self, params: Any, state: Array, context: Context) -> tuple[Draft, Array]:
        with jax.named_scope("draft"):
            last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
            shape = (last.shape[0], self.tree.num_nodes)
            parents = jnp.broadcast_to(jnp.array(self.tree.parents, jnp.int32), shape)
            tree = Tree(parents, depth=self.tree.depth, branching=self.tree.branching)
            return pruned(self._look_up(state, last), tree)[0], state

    def _places(self, reading: Reading) -> Array:
        """The matrix' entry `[B, N]` that each token read is to change; V: none. Of equal tokens
        the last does: a scatter leaves open which one stays."""
        tokens, index = reading.tokens, jnp.arange(reading.tokens.shape[1])
        counts = index < reading.num_tokens[:, None]
        later = (tokens[:, :, None] == tokens[:, None]) & (index[:, None] < index)
        again = jnp.any(later & counts[:, None], axis=-1)
        return jnp.where(counts & ~again, tokens, self.vocab_size)

    def _look_up(self, matrix: Array, last: Array) -> Array:
        """The tree's tokens `[B, P]` behind `last` `[B, 1]`, -1 where none is known."""
        rows = jnp.arange(last.shape[0])[:, None]
        nodes = last
        for depth in range(1, self.tree.depth + 1):
            here = [i for i, path in enumerate(self.tree.paths) if len(path) == depth]
            above = nodes[:, np.array(self.tree.parents)[here]]
            ranks = np.array([self.tree.paths[i][-1] for i in here])
            found = matrix[rows, jnp.maximum(above, 0), ranks]
            nodes = jnp.concatenate([nodes, jnp.where(above < 0, -1, found)], axis=1)
        return nodes[:, 1:]
