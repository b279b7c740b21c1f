import jax.numpy as jnp
import numpy as np
import pytest
from tiny import sampling

from jspec.drafters.base import Context
from jspec.drafters.ngram import NgramDrafter


def propose(rows, **settings):
    """Draft tokens of each row of committed tokens; by default a match earns a whole draft."""
    tokens = np.full((len(rows), 16), 1, np.int32)  # what lies beyond a row must not be read
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = jnp.array([len(row) for row in rows])
    context = Context(jnp.asarray(tokens), lengths, sampling(len(rows)))
    draft, _ = NgramDrafter(**({"growth": 9, "min_match": 2} | settings)).propose((), (), context)
    assert draft.probs is None
    drafted = zip(draft.tokens.tolist(), draft.num_drafted.tolist(), strict=True)
    return [t[:n] for t, n in drafted]


def test_proposes_what_followed_the_suffix():
    assert propose([[5, 6, 7, 8, 9, 5, 6]], num_speculative_tokens=3) == [[7, 8, 9]]


def test_the_longest_match_wins_and_then_the_latest():
    longest = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]  # "1 2 3" then 9; the later "2 3" then 8
    latest = [2, 3, 9, 4, 2, 3, 8, 5, 2, 3]
    assert propose([longest, latest], num_speculative_tokens=1) == [[9], [8]]


def test_a_match_near_the_end_goes_on_into_itself():
    assert propose([[4, 7, 8, 7, 8]], num_speculative_tokens=5) == [[7, 8, 7, 8, 7]]
    assert propose([[3, 3, 3]], num_speculative_tokens=3) == [[3, 3, 3]]


def test_a_longer_match_earns_a_longer_draft():
    rows = [[5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 9, 5, 6], [4, 5, 6, 7, 8, 9, 0, 4, 5, 6]]
    grown = propose(rows, num_speculative_tokens=4, growth=2, min_match=1)
    assert grown == [[6], [7, 8, 9], [7, 8, 9, 0]]
    assert propose(rows, num_speculative_tokens=4, growth=0, min_match=1) == [[6], [7], [7]]


def test_too_short_a_match_drafts_nothing():
    rows = [[5, 6, 7, 5], [6, 5, 7, 6, 5], [1]]
    assert propose(rows, num_speculative_tokens=1) == [[], [7], []]
    assert propose(rows, num_speculative_tokens=1, min_match=1) == [[6], [7], []]
    assert propose(rows, num_speculative_tokens=1, min_match=3) == [[], [], []]


def test_matches_longer_than_max_match_count_alike():
    row = [1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3]
    assert propose([row], num_speculative_tokens=1, max_match=2) == [[7]]
    assert propose([row], num_speculative_tokens=1, max_match=3) == [[9]]


def test_the_window_bounds_the_search():
    row = [5, 6, 7, 8, 9, 1, 5, 6]
    assert propose([row], num_speculative_tokens=1, window=7) == [[7]]
    assert propose([row], num_speculative_tokens=1, window=6) == [[]]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="min_match"):
        NgramDrafter(min_match=3, max_match=2)
    with pytest.raises(ValueError, match="growth"):
        NgramDrafter(growth=-1)
