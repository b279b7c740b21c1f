"""Trees of drafts: who stands below whom, and the way down that a rule takes.

A block in flight is a tree of tokens. Node 0 is the last committed token, node i + 1 is draft i,
and every draft comes behind its parent. A chain is the tree in which each node is the parent of
the next; it needs none of this. Knows nothing of models, laws or caches.

    tokens       c | x  y  u  v  w         c: x y    x: u v    y: w
    parents          0  0  1  1  2
    depths       0   1  1  2  2  2
    accepted     x, then v: path [0, 1, 4], num_accepted 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array


class Tree(flax.struct.PyTreeNode):
    """The shape of B rows' trees of P drafts."""

    parents: Array
    """`[B, P]` int32: the node above each draft, `parents[i] <= i`."""
    depth: int = flax.struct.field(pytree_node=False)
    """Drafts on a path at most."""
    branching: int = flax.struct.field(pytree_node=False)
    """Children of a node at most; they are different tokens."""

    def cut(self, num_drafts: int) -> Tree | None:
        """The tree of the first `num_drafts` drafts; None: of none."""
        if num_drafts == 0:
            return None
        parents = self.parents[:, :num_drafts]
        return self.replace(parents=parents, depth=min(self.depth, num_drafts))


class Walk(NamedTuple):
    """What a rule accepted of a tree."""

    path: Array
    """`[B, depth + 1]` int32: node 0, the accepted nodes, then the last of them again."""
    num_accepted: Array
    """`[B]` int32 in 0..depth."""
    next_token: Array
    """`[B]` int32: the token behind the path."""


def ancestors(tree: Tree) -> Array:
    """`[B, P+1, P+1]` bool: entry (n, m) says whether node m is n or above it."""
    B, P = tree.parents.shape
    nodes = jnp.arange(P + 1, dtype=jnp.int32)
    above = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), tree.parents], axis=1)
    at = jnp.broadcast_to(nodes, (B, P + 1))
    found = at[..., None] == nodes
    for _ in range(tree.depth):
        at = jnp.take_along_axis(above, at, axis=1)
        found |= at[..., None] == nodes
    return found


def depths_of(is_ancestor: Array) -> Array:
    """`[B, P+1]` int32: the depth of each node, of `ancestors`."""
    return jnp.sum(is_ancestor, axis=-1, dtype=jnp.int32) - 1


def paths_to(tree: Tree, is_ancestor: Array, tokens: Array) -> Array:
    """`[B, P+1, depth]` int32: the drafts `tokens` `[B, P]` on the way to each node, itself
    included; beyond its depth anything."""
    levels = jnp.arange(1, tree.depth + 1, dtype=jnp.int32)
    at_level = depths_of(is_ancestor)[:, None, :, None] == levels
    node = jnp.argmax(is_ancestor[..., None] & at_level, axis=2)
    flat = jnp.maximum(node - 1, 0).reshape(tokens.shape[0], -1)
    return jnp.take_along_axis(tokens, flat, axis=1).reshape(node.shape)


def children(tree: Tree, num_drafted: Array) -> tuple[Array, Array]:
    """The drafts below each node: `[B, P+1, branching]` int32 indices of drafts, of which the
    first `[B, P+1]` count. Of B rows, the first `num_drafted` `[B]` drafts are there."""
    P = tree.parents.shape[1]
    there = jnp.arange(P) < num_drafted[:, None]
    nodes = jnp.arange(P + 1, dtype=jnp.int32)
    below = (tree.parents[:, None] == nodes[:, None]) & there[:, None]  # [B, P+1, P]
    rank = jnp.cumsum(below, axis=-1) - 1
    wanted = jnp.arange(tree.branching)
    is_nth = below[..., None] & (rank[..., None] == wanted)
    index = jnp.argmax(is_nth, axis=2).astype(jnp.int32)
    return index, jnp.sum(below, axis=-1, dtype=jnp.int32)


def descend(tree: Tree, judge: Callable[[Array], tuple[Array, Array]]) -> Walk:
    """Goes down from node 0 while a child is accepted.

    `judge(node [B])` gives the accepted draft below each row's node `[B]`, -1 if none is, and the
    token `[B]` to emit there if none is.
    """
    B = tree.parents.shape[0]
    zeros = jnp.zeros((B,), jnp.int32)

    def go(level: Array, carry: tuple[Array, Walk, Array]) -> tuple[Array, Walk, Array]:
        node, walk, going = carry
        child, token = judge(node)
        stops = going & (child < 0)
        going &= child >= 0
        walk = Walk(
            path=walk.path.at[:, level].set(node),
            num_accepted=walk.num_accepted + going.astype(jnp.int32),
            next_token=jnp.where(stops, token, walk.next_token),
        )
        return jnp.where(going, child + 1, node), walk, going

    start = Walk(jnp.zeros((B, tree.depth + 1), jnp.int32), zeros, zeros)
    return jax.lax.fori_loop(0, tree.depth + 1, go, (zeros, start, zeros == 0))[1]


def along(path: Array | None, x: Array) -> Array:
    """The entries of `[B, P+1, ...]` on a path `[B, T]`; None is the way of a chain: `x`."""
    if path is None:
        return x
    return jnp.take_along_axis(x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1)
