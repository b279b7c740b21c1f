import jax.numpy as jnp
import numpy as np
import pytest
from tiny import sampling

from jspec.drafters.base import Context, Passage, Reading
from jspec.drafters.growth import StaticTree
from jspec.drafters.recycling import RecyclingDrafter, recycling_tree
from jspec.errors import JspecError

V = 10
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
DRAFTER = RecyclingDrafter(V, TREE)


def told(state, tokens, best, num_tokens, drafter=DRAFTER):
    """The state behind a passage: tokens `[B][N]` with the best two behind each."""
    reading = Reading(jnp.asarray(tokens), jnp.asarray(best), jnp.asarray(num_tokens))
    passage = Passage(jnp.asarray(tokens), (), jnp.asarray(num_tokens), reading)
    return drafter.commit((), state, context([[0]] * len(tokens)), passage)


def context(rows):
    lengths = jnp.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), 8), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Context(jnp.asarray(tokens), lengths, sampling(len(rows), vocab_size=V))


def drafts(state, rows, drafter=DRAFTER):
    """`(token, number of the node above)` of all that is drafted in each row."""
    draft, _ = drafter.propose((), state, context(rows))
    assert draft.probs is None
    columns = zip(draft.tokens, draft.tree.parents, draft.num_drafted, strict=True)
    return [list(zip(t[:n].tolist(), p[:n].tolist(), strict=True)) for t, p, n in columns]


def learnt():
    """Row 0 knows what is behind 1 2 3 4, row 1 what is behind 1 alone."""
    tokens = np.array([[1, 2, 3, 4], [1, 2, 3, 4]], np.int32)
    best = np.array([[[2, 3], [4, 5], [6, 7], [1, 2]], [[8, 9]] * 4], np.int32)
    return told(DRAFTER.init(2, 8, None), tokens, best, [4, 1])


def test_the_tree_holds_the_successors_last_seen():
    """Behind 1 come 2 and 3, behind 2 come 4 and 5, behind 4 comes 1."""
    first, second = drafts(learnt(), [[9, 1], [1]])
    assert first == [(2, 0), (3, 0), (4, 1), (5, 1), (1, 3)]
    assert second == [(8, 0), (9, 0)]  # nothing is known of 8


def test_what_is_missing_comes_last():
    """3 has successors, but nothing is known of 6, its first."""
    tree = StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (1, 0)))
    drafter = RecyclingDrafter(V, tree)
    state = told(drafter.init(1, 8, None), [[3, 7]], [[[6, 7], [5, 4]]], [2], drafter)
    assert drafts(state, [[3]], drafter) == [[(6, 0), (7, 0), (5, 2)]]
    assert drafts(state, [[5]], drafter) == [[]]


def test_the_newest_reading_counts_of_equal_tokens_the_last():
    state = told(learnt(), [[1, 1, 1]] * 2, [[[5, 6], [7, 8], [3, 4]]] * 2, [2, 0])
    first, second = drafts(state, [[1], [1]])
    assert first == [(7, 0), (8, 0)]
    assert second == [(8, 0), (9, 0)]


def test_more_successors_than_it_asked_for():
    state = told(DRAFTER.init(1, 8, None), [[1]], [[[4, 3, 2, 9]]], [1])
    assert state.shape == (1, V, 2)
    assert drafts(state, [[1]]) == [[(4, 0), (3, 0)]]


def test_its_tree_is_what_the_ranks_are_worth():
    assert recycling_tree(2, 3).paths == ((0,), (1,), (0, 0))
    assert recycling_tree(1, 4).num_ranks == 4
    with pytest.raises(JspecError, match="4 children of a node: there are 3 tokens"):
        RecyclingDrafter(3, recycling_tree(1, 4))
