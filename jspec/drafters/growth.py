"""Shapes of draft trees and how they grow, level by level, for any drafter that can score.

Trees are deterministic: children are the most probable tokens of their parent's law, and each is
certain (`Draft.probs` is None). Knows nothing of what scores.

- `DynamicTree` (EAGLE-2, arXiv 2406.16858, section 4): expands the `width` most probable nodes of
  a level, then keeps the most probable nodes of all; a node's probability is that of its path.
- `StaticTree` (EAGLE, arXiv 2401.15077; Medusa, 2401.10774): the same nodes whatever the scores,
  each named by its ranks: (1, 0) is the best child of the second best token.

`pruned` makes a draft of candidates of which some are missing or stand there twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters.base import Draft
from jspec.errors import JspecError
from jspec.tree import Tree, ancestors, depths_of, paths_to

Expand = Callable[[Any, Array, Array], tuple[Array, Any]]
"""`(memory, tokens [B, W], parents [B, W]) -> logits [B, W, V], memory`: reads W more nodes. They
are counted from 0 in the order in which they are read; `parents` are the numbers of the nodes
above them, -1 for the last committed token. The logits are for the place behind each."""

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """The `num_nodes` most probable of what `width` nodes a level and their `width` best children
    offer."""

    depth: int
    width: int
    num_nodes: int

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.num_nodes) < 1:
            raise JspecError(f"a tree of {self}: depth, width and num_nodes must be at least 1")
        offered = self.width + (self.depth - 1) * self.width**2
        if self.num_nodes > offered:
            raise JspecError(
                f"a tree of depth {self.depth} and width {self.width} has {offered} nodes at most, "
                f"not {self.num_nodes}"
            )

    @property
    def branching(self) -> int:
        """Children of a node at most."""
        return self.width

    @property
    def num_ranks(self) -> int:
        """Best tokens of a law that it asks for."""
        return self.width

    @property
    def num_read(self) -> int:
        """Nodes that `Expand` reads in all."""
        return self.width * (self.depth - 1)

    def grow(self, logits: Array, memory: Any, expand: Expand) -> tuple[Draft, Any]:
        """The draft behind the last committed token, whose `logits` are `[B, V]`."""
        W = self.width
        level = _best_children(logits[:, None], jnp.zeros_like(logits[:, :1]), W)
        levels, above, first = [level], [jnp.zeros_like(level[1])], 1
        read_by = jnp.full_like(level[1], -1)  # number of the node that each was read below
        for i in range(self.depth - 1):
            scores, index = jax.lax.top_k(level[0], W)
            token, parent = (jnp.take_along_axis(x, index, axis=1) for x in (level[1], read_by))
            logits, memory = expand(memory, token, parent)
            level = _best_children(logits, scores, W)
            levels.append(level)
            above.append(jnp.repeat(first + index, W, axis=1))
            first += index.shape[1] * (1 if i == 0 else W)
            read_by = jnp.broadcast_to(i * W + jnp.arange(W * W) // W, level[1].shape)
        scores, tokens = (jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True))
        return self._keep(scores, tokens, jnp.concatenate(above, axis=1)), memory

    def _keep(self, scores: Array, tokens: Array, above: Array) -> Draft:
        """The best of all candidates `[B, C]`. None is better than what stands above it, and of
        equal ones the earlier wins: so whoever is kept has its ancestors kept."""
        best = jnp.sort(jax.lax.top_k(scores, self.num_nodes)[1], axis=1)
        tokens, above = (jnp.take_along_axis(x, best, axis=1) for x in (tokens, above))
        number = jax.vmap(functools.partial(jnp.searchsorted, side="left"))(best, above - 1)
        parents = jnp.where(above == 0, 0, number.astype(jnp.int32) + 1)
        return _draft(self, tokens, parents)


def _best_children(logits: Array, scores: Array, count: int) -> tuple[Array, Array]:
    """Scores (log probabilities of the paths) and tokens `[B, W * count]` of the best children of
    W nodes with `logits` `[B, W, V]` and `scores` `[B, W]`."""
    values, tokens = jax.lax.top_k(logits, count)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    below = scores[..., None] + (values - total)
    return below.reshape(below.shape[0], -1), tokens.reshape(below.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """The nodes at `paths`, each with all of its prefixes among them."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise JspecError("a tree with no nodes")
        known = {(), *self.paths}
        for path in self.paths:
            if not path or min(path) < 0 or path[:-1] not in known:
                raise JspecError(f"tree node {path}: not below another node of the tree")
        if len(known) != len(self.paths) + 1:
            raise JspecError("a node stands in the tree twice")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @classmethod
    def likeliest(cls, accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
        """The `num_nodes` nodes most likely to be accepted if the token of rank r is right at
        level d with probability `accuracies[d][r]`, whatever came before (Medusa, 2.3.3)."""
        found: list[tuple[float, Path]] = []
        edge: dict[Path, float] = {(r,): p for r, p in enumerate(accuracies[0])}
        while edge and len(found) < num_nodes:
            path = max(edge, key=lambda p: (edge[p], [-r for r in p]))
            chance = edge.pop(path)
            found.append((chance, path))
            if len(path) < len(accuracies):
                edge |= {(*path, r): chance * p for r, p in enumerate(accuracies[len(path)])}
        return cls(tuple(path for _, path in found))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @property
    def branching(self) -> int:
        """Children of a node at most."""
        above = [path[:-1] for path in self.paths]
        return max(map(above.count, above))

    @property
    def num_ranks(self) -> int:
        """Best tokens of a law that it asks for."""
        return 1 + max(map(max, self.paths))

    @property
    def parents(self) -> tuple[int, ...]:
        """The number of the node above each path, 0 for the last committed token."""
        number = {path: i for i, path in enumerate([(), *self.paths])}
        return tuple(number[path[:-1]] for path in self.paths)

    @property
    def num_read(self) -> int:
        """Nodes that `Expand` reads in all."""
        return len(self._read())

    def _read(self) -> list[Path]:
        """The nodes with children, but for the root, in order."""
        above = {path[:-1] for path in self.paths}
        return [path for path in self.paths if path in above]

    def grow(self, logits: Array, memory: Any, expand: Expand) -> tuple[Draft, Any]:
        """The draft behind the last committed token, whose `logits` are `[B, V]`."""
        B, read = logits.shape[0], self._read()

        def everywhere(values: Sequence[int]) -> Array:
            return jnp.broadcast_to(jnp.array(values, jnp.int32), (B, len(values)))

        scored, open_paths = logits[:, None], list[Path]([()])
        levels: list[Array] = []
        for depth in range(1, self.depth + 1):
            here = [path for path in self.paths if len(path) == depth]
            best = jax.lax.top_k(scored, 1 + max(path[-1] for path in here))[1]
            where = [open_paths.index(path[:-1]) for path in here], [path[-1] for path in here]
            levels.append(best[:, *map(np.array, where)])
            open_paths = [path for path in read if len(path) == depth]
            if open_paths:
                tokens = levels[-1][:, np.array([here.index(path) for path in open_paths])]
                above = [read.index(p[:-1]) if depth > 1 else -1 for p in open_paths]
                scored, memory = expand(memory, tokens, everywhere(above))
        return _draft(self, jnp.concatenate(levels, axis=1), everywhere(self.parents)), memory


TreeShape = DynamicTree | StaticTree


def check_ranks(tree: TreeShape, draft_vocab_size: int) -> None:
    """Raises where a tree asks for more tokens of a law than there are."""
    if tree.num_ranks > draft_vocab_size:
        raise JspecError(
            f"a tree with {tree.num_ranks} children of a node: the head knows "
            f"{draft_vocab_size} tokens"
        )


def pruned(tokens: Array, tree: Tree) -> tuple[Draft, Array]:
    """The draft of those candidates `tokens` `[B, P]` that are there, and the node `[B, P]` of the
    block that each has become, -1 if none.

    A negative token is missing, and so is all below it. Equal children of a node become one, which
    has what hangs below them all.

        tokens x y -1 x u v w, parents 0 0 0 0 2 4 1: x y u v w, parents 0 0 2 1 1
    """
    is_ancestor = ancestors(tree)
    depths = depths_of(is_ancestor)
    paths = paths_to(tree, is_ancestor, tokens)
    paths = jnp.where(jnp.arange(tree.depth) < depths[..., None], paths, 0)
    there = jnp.all(paths >= 0, axis=-1)
    named = jnp.concatenate([paths, depths[..., None]], axis=-1)
    equal = jnp.all(named[:, :, None] == named[:, None], axis=-1)
    first = jnp.argmax(equal, axis=-1)
    kept = there & (first == jnp.arange(first.shape[1]))
    number = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    number = jnp.where(there, jnp.take_along_axis(number, first, axis=1), -1)
    order = jnp.argsort(~kept[:, 1:], axis=1, stable=True)  # those that are there come first
    above = jnp.take_along_axis(number, jnp.take_along_axis(tree.parents, order, axis=1), axis=1)
    tokens = jnp.maximum(jnp.take_along_axis(tokens, order, axis=1), 0)
    num_drafted = jnp.sum(kept[:, 1:], axis=1, dtype=jnp.int32)
    draft = Draft(tokens, None, num_drafted, tree.replace(parents=jnp.maximum(above, 0)))
    return draft, number[:, 1:]


def _draft(shape: TreeShape, tokens: Array, parents: Array) -> Draft:
    B, P = tokens.shape
    tree = Tree(parents=parents, depth=shape.depth, branching=shape.branching)
    return Draft(tokens.astype(jnp.int32), None, jnp.full((B,), P, jnp.int32), tree)
