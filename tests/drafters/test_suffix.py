import jax.numpy as jnp
import numpy as np
import pytest
from tiny import sampling

from jspec.drafters.base import Context, Passage
from jspec.drafters.suffix import SuffixDrafter
from jspec.errors import JspecError

S = 64


def context(rows, capacity=S):
    tokens = np.full((len(rows), capacity), 1, np.int32)  # what lies beyond must not be read
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Context(jnp.asarray(tokens), jnp.array([len(r) for r in rows]), sampling(len(rows)))


def told(drafter, rows, chunk=5, state=None, seen=1, capacity=S):
    """The state behind the texts, told in chunks, as prompts are: all of them are there at once."""
    texts = context(rows, capacity)
    state = drafter.init(len(rows), capacity, None) if state is None else state
    for start in range(seen, int(texts.lengths.max()), chunk):
        count = jnp.clip(texts.lengths - start, 0, chunk)
        passage = Passage(texts.tokens[:, start : start + chunk], (), count)
        state = drafter.read((), state, texts, passage)
    return state


def propose(rows, state=None, **settings):
    drafter = SuffixDrafter(**({"growth": 9} | settings))
    state = told(drafter, rows) if state is None else state
    draft, _ = drafter.propose((), state, context(rows))
    assert draft.probs is None
    return [t[:n] for t, n in zip(draft.tokens.tolist(), draft.num_drafted.tolist(), strict=True)]


class Automaton:
    """A suffix automaton, built token by token (Blumer et al., 1985), with end positions."""

    def __init__(self):
        self.next, self.link, self.length, self.ends = [{}], [-1], [0], [set()]
        self.last, self.size = 0, 0

    def add_state(self, moves, link, length, ends):
        for column, value in zip(
            (self.next, self.link, self.length, self.ends), (moves, link, length, ends), strict=True
        ):
            column.append(value)
        return len(self.next) - 1

    def extend(self, token):
        new = self.add_state({}, 0, self.length[self.last] + 1, set())
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at >= 0:
            self.link[new] = self.split(at, token)
        self.last = up = new
        while up >= 0:
            self.ends[up].add(self.size)
            up = self.link[up]
        self.size += 1

    def split(self, at, token):
        """The state of what `at` reaches by `token`, with no longer texts in it."""
        below = self.next[at][token]
        if self.length[below] == self.length[at] + 1:
            return below
        copy = self.add_state(
            dict(self.next[below]), self.link[below], self.length[at] + 1, set(self.ends[below])
        )
        while at >= 0 and self.next[at].get(token) == below:
            self.next[at][token] = copy
            at = self.link[at]
        self.link[below] = copy
        return copy

    def longest_match(self):
        """Length and earlier end positions of the longest suffix that occurred before."""
        state = self.link[self.last]
        if state <= 0:
            return 0, set()
        return self.length[state], self.ends[state] - {self.size - 1}


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 8])
def test_it_knows_what_a_suffix_automaton_knows(num_kinds):
    """Behind every token of random texts, some of which repeat long pieces of themselves."""
    rng = np.random.default_rng(num_kinds)
    texts = [rng.integers(0, num_kinds, S).tolist() for _ in range(3)]
    texts.append(([*texts[0][:20], 9] * 4)[:S])
    drafter, automata = SuffixDrafter(), [Automaton() for _ in texts]
    state = drafter.init(len(texts), S, None)
    for n in range(1, S + 1):
        rows = [text[:n] for text in texts]
        state = told(drafter, rows, state=state, seen=n - 1) if n > 1 else state
        for row, automaton, match in zip(rows, automata, np.asarray(state.match), strict=False):
            automaton.extend(row[-1])
            length, ends = automaton.longest_match()
            assert match.max() == length
            assert length == 0 or set(np.flatnonzero(match == length)) == ends


def test_proposes_what_followed_the_suffix():
    assert propose([[5, 6, 7, 8, 9, 5, 6]], num_speculative_tokens=3) == [[7, 8, 9]]


def test_the_longest_match_wins_then_the_most_frequent_then_the_latest():
    longest = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]  # "1 2 3" then 9; the later "2 3" then 8
    frequent = [3, 9, 4, 3, 9, 5, 3, 8, 6, 3]  # 3 then 9 twice, then 8 once
    latest = [2, 3, 9, 4, 2, 3, 8, 5, 2, 3]
    assert propose([longest, frequent, latest], num_speculative_tokens=1) == [[9], [9], [8]]
    assert propose([frequent], num_speculative_tokens=3, growth=0) == [[9]]
    assert propose([[0, 3, 9, 4, 0, 3, 9, 5, 0, 3]], num_speculative_tokens=3) == [[9, 5, 0]]


def test_no_match_is_too_long():
    """Twenty tokens decide; a drafter that compares eight would take the later one."""
    body = list(range(10, 29))
    row = [1, *body, 5, 2, *body, 6, 1, *body]
    assert propose([row], num_speculative_tokens=1) == [[5]]


def test_a_match_near_the_end_goes_on_into_itself():
    assert propose([[4, 7, 8, 7, 8]], num_speculative_tokens=5) == [[7, 8, 7, 8, 7]]


def test_a_longer_match_earns_a_longer_draft():
    rows = [[5, 6, 7, 8, 9, 5], [5, 6, 7, 8, 9, 5, 6], [1, 2], [1]]
    assert propose(rows, num_speculative_tokens=4, growth=2) == [[6], [7, 8, 9], [], []]
    assert propose(rows, num_speculative_tokens=4, min_match=2) == [[], [7, 8, 9, 5], [], []]


def test_a_full_row_and_a_row_that_was_cut():
    drafter = SuffixDrafter(growth=9)
    state = told(drafter, [[4] * 7 + [5]], capacity=8)
    assert state.match[0].tolist() == [0] * 8
    state = told(drafter, [[4, 6, 5, 6, 4, 6]])
    assert state.match[0, :6].tolist() == [0, 2, 0, 1, 0, 0]
    shorter = [[4, 6, 5, 6, 5]]  # two tokens were taken back, one has come
    state = told(drafter, shorter, state=state, seen=4)
    assert state.num_told.tolist() == [5]
    assert state.match[0, :5].tolist() == [0, 0, 1, 0, 0]  # as far as it can tell
    assert propose(shorter, state) == [[6]]
    assert propose(shorter) == [[6, 5, 6, 5, 6, 5]]


def test_bad_settings_are_refused():
    with pytest.raises(JspecError, match="suffix: min_match=0: must be at least 1"):
        SuffixDrafter(min_match=0)
    with pytest.raises(JspecError, match="suffix: growth=-1 must not be negative"):
        SuffixDrafter(growth=-1)
