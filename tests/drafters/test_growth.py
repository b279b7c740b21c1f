"""`DynamicTree` against a literal reference, and what `StaticTree` reads and keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.growth import DynamicTree, StaticTree, check_ranks, pruned
from jspec.errors import JspecError
from jspec.tree import Tree

V, NUM_LAWS, ROWS = 7, 64, 4
NO = -np.inf


def laws(kind):
    """`[NUM_LAWS, V]` logits. `certain` has tokens of probability one, `level` has ties, also
    between tokens that are impossible; `mixed` has rows of all kinds."""
    rng = np.random.default_rng(3)
    smooth = rng.normal(size=(NUM_LAWS, V)) * 2
    certain = np.where(np.arange(V) == rng.integers(V, size=(NUM_LAWS, 1)), 0.0, NO)
    level = np.where(rng.random((NUM_LAWS, V)) < 0.5, NO, 1.0)
    level[:, 2] = 1.0
    flat = np.zeros((NUM_LAWS, V))
    which = rng.integers(4, size=(NUM_LAWS, 1))
    mixed = np.choose(which, [smooth, certain, level, flat])
    kinds = {"smooth": smooth, "certain": certain, "level": level, "flat": flat, "mixed": mixed}
    return kinds[kind].astype(np.float32)


def law_below(law, token):
    """The number of the law behind a token: what is drafted depends on the whole way to it."""
    return (law * 5 + token * 3 + 1) % NUM_LAWS


def first_laws(seed):
    return np.random.default_rng(seed).integers(NUM_LAWS, size=ROWS).astype(np.int32)


def grown(shape, table, first):
    """The shape's draft, scored by `table`; the memory is which law stands behind each node."""

    @jax.jit
    def grow(table, first):
        def expand(memory, tokens, parents):
            numbers, count = memory
            above = jnp.take_along_axis(numbers, parents + 1, axis=1)
            below = law_below(above, tokens)
            numbers = numbers.at[:, count : count + tokens.shape[1]].set(below)
            return table[below], (numbers, count + tokens.shape[1])

        numbers = jnp.zeros((ROWS, 1 + shape.num_read), jnp.int32).at[:, 0].set(first)
        draft, (_, count) = shape.grow(table[first], (numbers, 1), expand)
        assert count == 1 + shape.num_read
        return draft

    return grow(jnp.asarray(table), jnp.asarray(first))


def eagle2(log_probs, first, depth, width, num_nodes):
    """Paths of the nodes kept, by the letter of arXiv 2406.16858, section 4."""
    candidates, expanded = [], [((), np.float32(0), first)]
    for _ in range(depth):
        level = []
        for path, score, law in expanded:
            row = log_probs[law]
            best = sorted(range(V), key=lambda t, row=row: (-row[t], t))[:width]
            level += [((*path, t), score + row[t], law_below(law, t)) for t in best]
        candidates += level
        expanded = sorted(level, key=lambda node: -node[1])[:width]  # of equals the earlier first
    kept = sorted(range(len(candidates)), key=lambda i: (-candidates[i][1], i))[:num_nodes]
    return [candidates[i][0] for i in sorted(kept)]


def paths_of(draft):
    """For each row the tokens on the way to each node."""
    rows = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.tree.parents.tolist(), strict=True):
        paths = [()]
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            assert parent <= i
            paths.append((*paths[parent], token))
        rows.append(paths[1:])
    return rows


@pytest.mark.parametrize(("depth", "width", "num_nodes"), [(3, 3, 9), (4, 2, 14), (1, 5, 4)])
@pytest.mark.parametrize("kind", ["smooth", "certain", "level", "flat", "mixed"])
def test_a_dynamic_tree_is_that_of_the_reference(kind, depth, width, num_nodes):
    table = laws(kind)
    log_probs = np.minimum(jax.nn.log_softmax(table), 0.0)
    for seed in range(3):
        first = first_laws(seed)
        draft = grown(DynamicTree(depth, width, num_nodes), table, first)
        assert draft.probs is None
        assert draft.num_drafted.tolist() == [num_nodes] * ROWS
        assert (draft.tree.depth, draft.tree.branching) == (depth, width)
        for row, paths in enumerate(paths_of(draft)):
            assert paths == eagle2(log_probs, int(first[row]), depth, width, num_nodes)
            assert len(set(paths)) == num_nodes  # siblings are different tokens
            assert max(map(len, paths)) <= depth
            parents = draft.tree.parents[row].tolist()
            assert max(map(parents.count, parents)) <= width


PATHS = ((1,), (0, 0), (0,), (1, 2), (0, 0, 1))


def test_a_static_tree_has_the_tokens_at_its_ranks():
    """Row by row, from the laws behind each node on the way."""
    table, first = laws("smooth"), first_laws(1)
    order = np.argsort(-table, axis=1)
    draft = grown(StaticTree(PATHS), table, first)
    assert draft.probs is None
    assert draft.num_drafted.tolist() == [5] * ROWS
    assert draft.tree.parents.tolist() == [[0, 0, 1, 2, 3]] * ROWS
    assert (draft.tree.depth, draft.tree.branching) == (3, 2)
    expected = []
    for law in first.tolist():
        best, second = order[law, :2].tolist()
        below_best = order[law_below(law, best), 0].item()
        below_second = order[law_below(law, second), 2].item()
        deepest = order[law_below(law_below(law, best), below_best), 1].item()
        expected.append([best, second, below_best, below_second, deepest])
    assert draft.tokens.tolist() == expected


def test_a_static_tree_reads_only_nodes_with_children():
    reads = []

    def expand(memory, tokens, parents):
        reads.append((tokens.tolist(), parents.tolist()))
        return jnp.arange(V, dtype=jnp.float32) + jnp.zeros((1, tokens.shape[1], 1)), memory

    shape = StaticTree(((0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 0, 0)))
    draft, _ = shape.grow(jnp.arange(V, dtype=jnp.float32)[None], (), expand)
    assert reads == [([[6, 4]], [[-1, -1]]), ([[6]], [[1]])]  # (0,) and (2,), then (2, 0)
    assert shape.num_read == 3
    assert draft.tokens.tolist() == [[6, 5, 4, 6, 6, 5, 6]]
    assert draft.tree.parents.tolist() == [[0, 0, 0, 1, 3, 3, 5]]


def test_likeliest_nodes_by_the_product_of_the_accuracies():
    accuracies = [[0.6, 0.3, 0.1], [0.5, 0.25]]
    # (0) .6, (0,0) .3, (1) .3, (0,1) .15, (1,0) .15, (2) .1, (1,1) .075, (2,0) .05
    shapes = [StaticTree.likeliest(accuracies, n).paths for n in (1, 3, 5, 6, 7, 99)]
    assert shapes[0] == ((0,),)
    assert shapes[1] == ((0,), (1,), (0, 0))
    assert shapes[2] == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert shapes[3] == ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))
    assert set(shapes[4]) - set(shapes[3]) == {(1, 1)}
    assert len(shapes[5]) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicTree(0, 2, 2), "at least 1"),
        (lambda: DynamicTree(2, 0, 2), "at least 1"),
        (lambda: DynamicTree(2, 2, 0), "at least 1"),
        (lambda: DynamicTree(3, 2, 11), "10 nodes at most, not 11"),
        (lambda: StaticTree(((0,), (1, 0))), r"\(1, 0\): not below"),
        (lambda: StaticTree(((0,), (-1,))), r"\(-1,\): not below"),
        (lambda: StaticTree(((), (0,))), r"\(\): not below"),
        (lambda: StaticTree(((0,), (0,))), "twice"),
        (lambda: StaticTree(()), "no nodes"),
    ],
)
def test_impossible_shapes_are_refused(make, message):
    with pytest.raises(JspecError, match=message):
        make()


def test_a_tree_with_more_children_than_the_head_knows_tokens_is_refused():
    check_ranks(DynamicTree(2, 4, 5), 4)
    with pytest.raises(JspecError, match="4 children of a node: the head knows 3 tokens"):
        check_ranks(DynamicTree(2, 4, 5), 3)
    with pytest.raises(JspecError, match="6 children"):
        check_ranks(StaticTree(((0,), (5,))), 3)


def test_what_is_missing_or_stands_twice_is_pruned():
    """Of x y - x u v w, where u hangs below y, v below the second x, w below the first."""
    parents = jnp.array([[0, 0, 0, 0, 2, 4, 1, 3]])
    tokens = jnp.array([[30, 31, -1, 30, 40, 41, 42, 43]])
    draft, node = pruned(tokens, Tree(parents, depth=2, branching=4))
    assert draft.num_drafted.tolist() == [5]
    assert draft.tokens[0, :5].tolist() == [30, 31, 40, 41, 42]
    assert draft.tree.parents[0, :5].tolist() == [0, 0, 2, 1, 1]
    assert node.tolist() == [[1, 2, -1, 1, 3, 4, 5, -1]]
    assert int(draft.tokens.min()) >= 0
    assert int(draft.tree.parents.min()) >= 0


def test_equal_tokens_of_different_nodes_stay():
    parents = jnp.array([[0, 0, 1, 2], [0, 1, 2, 3]])
    tokens = jnp.array([[5, 6, 7, 7], [5, 5, 5, 5]])
    draft, node = pruned(tokens, Tree(parents, depth=4, branching=2))
    assert draft.num_drafted.tolist() == [4, 4]
    assert draft.tokens.tolist() == tokens.tolist()
    assert draft.tree.parents.tolist() == parents.tolist()
    assert node.tolist() == [[1, 2, 3, 4]] * 2
