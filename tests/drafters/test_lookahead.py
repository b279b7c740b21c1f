import jax.numpy as jnp
import numpy as np
import pytest
from tiny import sampling

from jspec.drafters.base import Context, Passage, Reading
from jspec.drafters.lookahead import LookaheadDrafter, added
from jspec.errors import JspecError

V = 40
DRAFTER = LookaheadDrafter(V, window=2, ngram=3, candidates=2)


def context(rows):
    tokens = np.full((len(rows), 16), 1, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = jnp.array([len(row) for row in rows])
    return Context(jnp.asarray(tokens), lengths, sampling(len(rows), vocab_size=V))


def passage(rows, counts, best=None):
    """What tells the last `counts` tokens of each row; `best` `[B, N]` is what the target said."""
    width = max(counts)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
        tokens[i, :n] = row[len(row) - n :]
    reading = None
    if best is not None:
        best = jnp.asarray(best)
        reading = Reading(best, best[..., None], jnp.full((len(rows),), best.shape[1]))
    return Passage(jnp.asarray(tokens), (), jnp.asarray(counts), reading)


def read(state, rows, counts, drafter=DRAFTER):
    return drafter.read((), state, context(rows), passage(rows, counts))


def propose(state, rows, drafter=DRAFTER):
    """`(token, number of the node above)` of all that is drafted in each row, and the state."""
    draft, state = drafter.propose((), state, context(rows))
    assert draft.probs is None
    columns = zip(draft.tokens, draft.tree.parents, draft.num_drafted, strict=True)
    return [list(zip(t[:n].tolist(), p[:n].tolist(), strict=True)) for t, p, n in columns], state


def with_window(window, pool):
    """The state of a row with a window `[2][2]` and n-grams in the pool."""
    state = DRAFTER.init(1, 16, None)
    pool = added(state.pool, jnp.asarray([pool], jnp.int32), jnp.array([len(pool)]))
    return state.replace(window=jnp.asarray([window], jnp.int32), pool=pool)


def test_the_text_fills_the_pool_and_the_pool_drafts():
    """Told in two pieces: the n-grams across them are there, too; 5 6 7 is newer than 5 6 8."""
    rows = [[5, 6, 8, 5, 6, 7, 5], [5, 9, 5]]
    state = read(DRAFTER.init(2, 16, None), rows, [3, 2])
    assert state.num_told.tolist() == [4, 3]
    state = read(state, rows, [3, 0])
    assert state.num_told.tolist() == [7, 3]
    assert state.pool[0, 5].tolist() == [[6, 7], [6, 8]]
    assert state.pool[0, 7].tolist() == [[-1, -1], [-1, -1]]
    drafted, _ = propose(state, rows)
    assert drafted == [[(6, 0), (7, 1), (8, 1)], [(9, 0), (5, 1)]]


def test_a_window_is_a_chain_with_a_column_below_each_of_its_tokens():
    state = with_window([[10, 11], [20, 21]], [[5, 30, 31], [5, 32, 33]])
    drafted, state = propose(state, [[4, 5]])
    assert drafted == [[(32, 0), (30, 0), (33, 1), (31, 2), (10, 0), (11, 5), (20, 5), (21, 6)]]
    assert state.nodes.tolist() == [[7, 8]]


def test_guesses_that_the_pool_has_are_one_node():
    """The chain begins as a candidate of the pool does, and its column goes on as that does."""
    state = with_window([[10, 11], [20, 21]], [[5, 30, 31], [5, 10, 20]])
    drafted, state = propose(state, [[5]])
    assert drafted == [[(10, 0), (30, 0), (20, 1), (31, 2), (11, 1), (21, 5)]]
    assert state.nodes.tolist() == [[3, 6]]


@pytest.mark.parametrize(("count", "moved"), [(1, [20, 21]), (2, [21, 20]), (3, [20, 21])])
def test_a_window_moves_on_and_leaves_its_columns_in_the_pool(count, moved):
    """By a place more for every draft that was accepted."""
    state = with_window([[10, 11], [20, 21]], [[5, 30, 31]])
    _, state = propose(state, [[5]])
    assert state.nodes.tolist() == [[5, 6]]
    rows, said = [[5, 30, 31, 32][: 1 + count]], [[0, 1, 2, 3, 4, 38, 39]]
    state = DRAFTER.commit((), state, context(rows), passage(rows, [count], said))
    newest = {20: 38, 21: 39}
    assert state.window.tolist() == [[moved, [newest[token] for token in moved]]]
    assert state.pool[0, 10, 0].tolist() == [20, 38]
    assert state.pool[0, 11, 0].tolist() == [21, 39]


def test_only_what_it_drafted_itself_begins_a_window():
    rows = [[5, 6, 7, 8, 9]]
    state = read(DRAFTER.init(1, 16, None), rows, [4])
    assert np.all(np.asarray(state.window) == -1)
    _, state = propose(state, rows)
    rows = [[5, 6, 7, 8, 9, 3]]
    state = DRAFTER.commit((), state, context(rows), passage(rows, [1], [[3] * 9]))
    assert state.window.tolist() == [[[3, 9], [8, 7]]]
    assert sorted(np.flatnonzero(np.asarray(state.pool)[0, :, 0, 0] >= 0)) == [5, 6, 7, 8]


def test_the_pool_keeps_the_newest_and_each_once():
    grams = [[5, 1, 1], [5, 2, 2], [5, 2, 2], [5, 3, 3], [6, 1, -1], [5, 4, 4]]
    pool = jnp.full((2, V, 2, 2), -1, jnp.int32)
    pool = added(pool, jnp.asarray([grams, grams], jnp.int32), jnp.array([5, 3]))
    assert pool[:, 5].tolist() == [[[3, 3], [2, 2]], [[2, 2], [1, 1]]]
    assert np.all(np.asarray(pool)[:, 6] == -1)


def test_a_row_that_was_cut_begins_where_it_is():
    rows = [[5, 6, 7, 8]]
    state = read(DRAFTER.init(1, 16, None), rows, [3])
    state = read(state, [[5, 6, 9]], [1])  # 7 and 8 were taken back
    assert state.num_told.tolist() == [3]
    assert state.pool[0, 5].tolist() == [[6, 9], [6, 7]]


def test_bad_sizes_are_refused():
    for sizes in ({"window": 0}, {"ngram": 1}, {"candidates": 0}):
        with pytest.raises(JspecError, match=r"lookahead: window=.*must be at least 1, 2 and 1"):
            LookaheadDrafter(V, **sizes)
