"""What drafters that nobody trains have in common: text, rows, programs, what a cut leaves."""

import re

import jax
import numpy as np
import pytest
from tiny import CONFIG, TARGET, counts_of, llama_params, rounds_of, rows_of, run, sampling, start

import jspec
from jspec.decode import DecodeConfig, Finish, cut
from jspec.drafters.first_of import FirstOf
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.none import NoDrafter
from jspec.drafters.recycling import RecyclingDrafter, recycling_tree
from jspec.drafters.suffix import SuffixDrafter
from jspec.errors import JspecError

V = CONFIG.vocab_size
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [5, 6] * 18]
SIXTEEN = [*([row + 9, *PROMPTS[row % 3]] for row in range(13)), *PROMPTS]
RECYCLING = RecyclingDrafter(V, recycling_tree(3, 8))
LOOKAHEAD = LookaheadDrafter(V, window=3, ngram=3, candidates=2)
DRAFTERS = {
    "recycling": RECYCLING,
    "suffix": SuffixDrafter(),
    "lookahead": LOOKAHEAD,
    "lookahead, n-grams of four": LookaheadDrafter(V, window=2, ngram=4, candidates=1),
    "suffix,recycling": FirstOf((SuffixDrafter(min_match=2), RECYCLING)),
}
LEARNING = {"recycling": lambda state: state, "lookahead": lambda state: state.pool}


def begun(drafter, prompts=PROMPTS, *, max_tokens=50, capacity=128, **settings):
    """Configuration, parameters and state before the prompts."""
    config = DecodeConfig(TARGET, drafter, (12,), prefill_chunk=16)
    params = drafter.drafters if isinstance(drafter, FirstOf) else ()
    wanted = sampling(len(prompts), **settings)
    state = start(config, prompts, max_tokens=max_tokens, settings=wanted, capacity=capacity)
    return config, (llama_params(0), ((),) * len(params)), state


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "coupled"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(name, rows, temperature):
    """Whose greedy text repeats itself, so that there is something to learn."""
    settings = {"temperature": temperature, "coupled": True}
    plain = run(*begun(NoDrafter(), SIXTEEN[-rows:], **settings))
    state = run(*begun(DRAFTERS[name], SIXTEEN[-rows:], **settings))
    assert rows_of(state) == rows_of(plain)
    counts = counts_of(state)
    assert rows == 1 or len(set(counts.rounds.tolist())) > 1
    assert counts.drafted.sum() > 0
    if temperature == 0:
        assert np.all(counts.accepted[:, 1] > 0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_a_row_drafts_does_not_depend_on_the_others(name):
    mixed = run(*begun(DRAFTERS[name]))
    for row, prompt in enumerate(PROMPTS):
        equal = run(*begun(DRAFTERS[name], [prompt] * 3))
        for x, y in zip(jax.tree.leaves(mixed.log), jax.tree.leaves(equal.log), strict=True):
            np.testing.assert_array_equal(x[row], y[row])


@pytest.mark.parametrize("name", LEARNING)
def test_one_program_a_shape_and_it_copies_nothing_learnt(name):
    """Nor does it ask the host for anything."""
    config, params, state = begun(DRAFTERS[name], PROMPTS[:2], capacity=208)
    text = rounds_of.lower(config, params, state, np.int32(9)).compile().as_text()
    copied = set(re.findall(r"= \w+\[([\d,]+)\]\{[\d,]*\} copy\(", text))
    shape = ",".join(map(str, LEARNING[name](state.drafter).shape))
    assert shape.startswith("2,61,")
    assert shape in text
    assert shape not in copied
    assert not re.search("callback|outfeed|infeed", text)
    before = rounds_of._cache_size()
    for max_tokens in (3, 9):
        run(*begun(DRAFTERS[name], PROMPTS[:2], capacity=208, max_tokens=max_tokens))
    assert rounds_of._cache_size() == before + 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_that_is_cut_goes_on_with_the_text_that_is_left(name):
    config, params, state = begun(DRAFTERS[name])
    whole = rows_of(run(*begun(DRAFTERS[name])))
    state = run(config, params, state, 4)
    keep = np.asarray(state.lengths) - np.array([2, 0, 3], np.int32)
    state = jax.jit(cut)(state, keep, np.full((3,), Finish.STOP, np.int32))
    state = run(config, params, state.replace(finish=state.finish * 0))
    assert rows_of(state) == whole


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("suffix", {}, SuffixDrafter()),
        ("suffix:2", {"num_speculative_tokens": 4}, SuffixDrafter(4, 2)),
        ("recycling", {}, RecyclingDrafter(V)),
        ("recycling:5", {}, RecyclingDrafter(V, recycling_tree(num_nodes=5))),
        ("recycling", {"num_speculative_tokens": 2}, RecyclingDrafter(V, recycling_tree(2))),
        ("lookahead", {}, LookaheadDrafter(V)),
        ("lookahead(window=2, ngram=4, candidates=5)", {}, LookaheadDrafter(V, 2, 4, 5)),
        ("lookahead(ngram=4)", {"num_speculative_tokens": 4}, LookaheadDrafter(V, 2, 4)),
        (
            "suffix:2,recycling",
            {},
            FirstOf((SuffixDrafter(min_match=2), RecyclingDrafter(V))),
        ),
    ],
)
def test_what_a_user_names(name, settings, expected):
    engine = jspec.LLM(TARGET, params=llama_params(0), drafter=name, dtype="float32", **settings)
    assert engine.drafter == expected


def test_names_with_too_much_in_them():
    for name in ("recycling:4:4", "lookahead:3", "suffix(2, 3)", "lookahead(depth=3)"):
        with pytest.raises(JspecError, match=r"give a whole number|it takes|it has no option"):
            jspec.LLM(TARGET, params=llama_params(0), drafter=name, dtype="float32")
