"""Literal arrays: the tree of the module's docstring, a chain with two more children of the root,
and a fan with one leaf below its second child. All in one batch."""

import jax.numpy as jnp
import numpy as np

from jspec.tree import Tree, along, ancestors, children, depths_of, descend, paths_to

#            x  y  u  v  w
PARENTS = [[0, 0, 1, 1, 2], [0, 1, 2, 0, 0], [0, 0, 0, 2, 0]]
TOKENS = jnp.array([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35]])
TREE = Tree(parents=jnp.array(PARENTS, jnp.int32), depth=3, branching=4)
ALL = jnp.array([5, 5, 5])


def flags(rows):
    return [[int(c) for c in row] for row in rows]


ANCESTORS = [
    flags(["100000", "110000", "101000", "110100", "110010", "101001"]),
    flags(["100000", "110000", "111000", "111100", "100010", "100001"]),
    flags(["100000", "110000", "101000", "100100", "101010", "100001"]),
]


def test_ancestors_are_a_node_and_those_above_it():
    found = ancestors(TREE)
    assert found.dtype == jnp.bool_
    np.testing.assert_array_equal(found, np.array(ANCESTORS, bool))


def test_ancestors_of_a_chain_are_those_before():
    chain = Tree(parents=jnp.arange(4, dtype=jnp.int32)[None], depth=4, branching=1)
    np.testing.assert_array_equal(ancestors(chain)[0], np.tri(5, dtype=bool))


def test_depths():
    expected = [[0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 1, 1], [0, 1, 1, 1, 2, 1]]
    assert depths_of(ancestors(TREE)).tolist() == expected


def test_paths_have_the_drafts_on_the_way():
    found = np.asarray(paths_to(TREE, ancestors(TREE), TOKENS))
    assert found.shape == (3, 6, 3)
    depths = np.asarray(depths_of(ancestors(TREE)))
    paths = [
        [path[:depth].tolist() for path, depth in zip(*row, strict=True)]
        for row in zip(found, depths, strict=True)
    ]
    assert paths == [
        [[], [11], [12], [11, 13], [11, 14], [12, 15]],
        [[], [21], [21, 22], [21, 22, 23], [24], [25]],
        [[], [31], [32], [33], [32, 34], [35]],
    ]


def below(num_drafted):
    index, count = children(TREE, jnp.array(num_drafted))
    assert index.shape == (3, 6, 4)
    return [
        [drafts[:n].tolist() for drafts, n in zip(*row, strict=True)]
        for row in zip(np.asarray(index), np.asarray(count), strict=True)
    ]


def test_children_are_the_drafts_below_in_order():
    assert below([5, 5, 5]) == [
        [[0, 1], [2, 3], [4], [], [], []],
        [[0, 3, 4], [1], [2], [], [], []],
        [[0, 1, 2, 4], [], [3], [], [], []],
    ]


def test_children_that_were_not_drafted_are_not_there():
    assert below([3, 0, 4]) == [
        [[0, 1], [2], [], [], [], []],
        [[], [], [], [], [], []],
        [[0, 1, 2], [], [3], [], [], []],
    ]


def test_the_way_down_ends_where_no_child_is_accepted():
    """x, then v; all of the chain; nothing."""
    accepted = jnp.array([[0, 3, -1, -1, -1, -1], [0, 1, 2, -1, -1, -1], [-1, 3, 3, 3, 3, 3]])
    tokens = jnp.array(
        [[40, 41, 42, 43, 44, 45], [50, 51, 52, 53, 54, 55], [60, 61, 62, 63, 64, 65]]
    )
    rows = jnp.arange(3)
    walk = descend(TREE, lambda node: (accepted[rows, node], tokens[rows, node]))
    assert walk.path.tolist() == [[0, 1, 4, 4], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert walk.num_accepted.tolist() == [2, 3, 0]
    assert walk.next_token.tolist() == [44, 53, 60]


def test_along_takes_the_nodes_of_a_path():
    path = jnp.array([[0, 1, 4, 4], [0, 1, 2, 3]])
    flat = jnp.arange(12).reshape(2, 6)
    assert along(path, flat).tolist() == [[0, 1, 4, 4], [6, 7, 8, 9]]
    deep = flat[..., None, None] * 10 + jnp.arange(2)[:, None]
    expected = flat[jnp.arange(2)[:, None], path][..., None, None] * 10 + jnp.arange(2)[:, None]
    np.testing.assert_array_equal(along(path, deep), expected)
    assert along(None, flat) is flat


def test_a_cut_tree_has_the_first_drafts():
    short = TREE.cut(3)
    assert short.parents.tolist() == [[0, 0, 1], [0, 1, 2], [0, 0, 0]]
    assert (short.depth, short.branching) == (3, 4)
    np.testing.assert_array_equal(ancestors(short), np.array(ANCESTORS, bool)[:, :4, :4])


def test_a_cut_tree_is_no_deeper_than_it_has_drafts():
    shorter = TREE.cut(2)
    assert (shorter.parents.tolist(), shorter.depth) == ([[0, 0], [0, 1], [0, 0]], 2)
    assert paths_to(shorter, ancestors(shorter), TOKENS[:, :2])[1, 2].tolist() == [21, 22]
    assert TREE.cut(1).depth == 1
    assert TREE.cut(0) is None
