import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    CONFIG,
    TARGET,
    TableDrafter,
    counts_of,
    llama_params,
    markov,
    read,
    rounds_of,
    rows_of,
    run,
    sampling,
    start,
    trained_head,
    trained_medusa,
    uncached_greedy,
)

from jspec.decode import DecodeConfig, Finish, cut, fork
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.growth import DynamicTree, StaticTree
from jspec.drafters.head import HeadDrafter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.errors import JspecError

V = CONFIG.vocab_size
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], list(range(2, 45))]
MAX_TOKENS = [50, 40, 61]
DRAFTERS = {
    "none": lambda p: (NoDrafter(), ()),
    "ngram": lambda p: (NgramDrafter(6), ()),
    "draft model": lambda p: (DraftModel(TARGET, V, 6), p),
    "mtp": lambda p: head("mtp", 48, p.embed.dtype),
    "eagle": lambda p: head("eagle", V, p.embed.dtype),
    "eagle3": lambda p: head("eagle3", 48, p.embed.dtype),
    "mtp dynamic tree": lambda p: head("mtp", 48, p.embed.dtype, DynamicTree(3, 2, 7)),
    "medusa static tree": lambda p: medusa(p.embed.dtype),
}
TREES = ("mtp dynamic tree", "medusa static tree")
CHAINS = tuple(name for name in DRAFTERS if name not in TREES)
TRAINED = ("mtp", "eagle", "eagle3", *TREES)


def cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, params)


def head(family, draft_vocab_size, dtype, tree=None):
    config, params = trained_head(family, draft_vocab_size)
    return HeadDrafter(config, 6 if tree is None else tree.depth, tree), cast(params, dtype)


def medusa(dtype):
    config, params = trained_medusa(3)
    shape = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
    return MedusaDrafter(config, shape), cast(params, dtype)


def generated(name, *, dtype=jnp.float32, widths=(8,), settings=None, draft_params=None, **kwargs):
    """Final state of the three prompts with a drafter; the draft model is an unrelated one."""
    params = llama_params(0, dtype), draft_params or llama_params(1, dtype)
    drafter, drafter_params = DRAFTERS[name](params[1])
    config = DecodeConfig(TARGET, drafter, widths, prefill_chunk=16)
    kwargs = {"max_tokens": MAX_TOKENS} | kwargs
    prompts = kwargs.pop("prompts", PROMPTS)
    state = start(config, prompts, settings=settings, dtype=dtype, **kwargs)
    return run(config, (params[0], drafter_params), state)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        *((name, (8,)) for name in DRAFTERS),
        *((name, w) for name in ("none", "ngram", "draft model") for w in ((2, 8), (1, 3, 7))),
        ("mtp dynamic tree", (2, 8)),
    ],
)
def test_greedy_text_equals_an_uncached_reference(name, widths):
    state = generated(name, widths=widths)
    for row, prompt, n in zip(rows_of(state), PROMPTS, MAX_TOKENS, strict=True):
        assert row == uncached_greedy(TARGET, llama_params(0), prompt, n)
    assert np.all(np.asarray(state.finish) == Finish.LENGTH)
    counters = counts_of(state)
    if name == "ngram":
        assert np.all(counters.accepted.sum(1) > 0), "nothing was speculated"
    if name in TRAINED:
        assert 20 < counters.accepted.sum() < counters.drafted.sum(), "nothing to be learnt"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_bits_do_not_depend_on_the_drafter(rule, dtype):
    """At one shape (rows, width) every drafter gives the tokens of none, even in bfloat16."""
    rows = sampling(3, temperature=0.0 if rule == "greedy" else 1.0, coupled=True, top_p=0.95)
    plain = rows_of(generated("none", dtype=dtype, settings=rows))
    for name in CHAINS:
        assert rows_of(generated(name, dtype=dtype, settings=rows)) == plain, name


@pytest.mark.parametrize("name", TREES)
def test_the_coupled_text_of_a_tree_is_that_of_plain_decoding(name):
    """Noise goes by position: it does not matter what is drafted, nor at which depth. Log
    probabilities go with the text, raw ones and those after the row's penalty."""
    rows = sampling(
        3,
        temperature=1.0,
        coupled=True,
        top_p=0.95,
        repetition_penalty=1.1,
        num_logprobs=0,
        processed_logprobs=[True, True, False],
    )
    state, plain = generated(name, settings=rows), generated("none", settings=rows)
    assert rows_of(state) == rows_of(plain)
    for one, other in zip(state.logprobs.logprob, plain.logprobs.logprob, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    counters = counts_of(state)
    assert 10 < counters.accepted.sum() < counters.drafted.sum()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_bits_do_not_depend_on_other_rows_or_the_slot(name, temperature):
    def text(prompts, seeds, slot):
        rows = sampling(3, temperature=temperature, coupled=True, seed=seeds)
        dtype = jnp.float32 if name in TREES else jnp.bfloat16
        state = generated(name, dtype=dtype, settings=rows, prompts=prompts, max_tokens=40)
        return rows_of(state)[slot]

    a, b, c = PROMPTS
    alone = text([b, [0], [0]], [5, 6, 7], 0)
    assert alone == text([a, c, b], [1, 2, 5], 2)
    assert alone == text([c, b, a], [8, 5, 9], 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
def test_a_perfect_drafter_is_always_fully_accepted(temperature, coupled):
    """Also in the round after a fully accepted one, where a stale draft cache would show."""
    rows = sampling(3, temperature=temperature, coupled=coupled)
    state = generated("draft model", draft_params=llama_params(0), settings=rows)
    counters = counts_of(state)
    np.testing.assert_array_equal(counters.accepted, counters.drafted)
    assert counters.rounds.tolist() == [-(-n // 7) for n in MAX_TOKENS]


def test_drafts_of_another_model_are_partly_rejected():
    near = jax.tree.map(lambda a, b: a + 0.05 * b, llama_params(0), llama_params(1))
    counters = counts_of(generated("draft model", draft_params=near))
    assert 0 < counters.accepted.sum() < counters.drafted.sum()


@pytest.mark.parametrize("name", ["ngram", "mtp dynamic tree"])
def test_bursts_give_what_one_program_gives(name):
    drafter, draft_params = DRAFTERS[name](llama_params(1))
    config = DecodeConfig(TARGET, drafter, (8,), prefill_chunk=16)
    params = (llama_params(0), draft_params)
    state = start(config, PROMPTS, max_tokens=MAX_TOKENS)
    for rounds in (0, 1, 2, 5, 1000):
        state = run(config, params, state, rounds)
    whole = generated(name)
    assert rows_of(state) == rows_of(whole)
    np.testing.assert_array_equal(state.log.accepted, whole.log.accepted)


@pytest.mark.parametrize(
    ("name", "lag"), [("draft model", 2), ("mtp", 1), ("eagle3", 1), ("mtp dynamic tree", 1)]
)
def test_pages_never_hold_an_uncommitted_token(name, lag):
    """After every round, slots from `lengths - 1` on still hold what they held at first, in the
    target's cache; in the drafter's, those from `lengths - lag` on."""
    drafter, draft_params = DRAFTERS[name](llama_params(1))
    config = DecodeConfig(TARGET, drafter, (8,), prefill_chunk=16)
    state = start(config, PROMPTS, max_tokens=MAX_TOKENS)
    for _ in range(6):
        state = run(config, (llama_params(0), draft_params), state, 1)
        own = state.drafter if name == "draft model" else state.drafter.cache
        for cache, missing in ((state.cache, 1), (own, lag)):
            held = np.asarray(cache.pages[-1].keys).reshape(3, cache.capacity, -1)
            used = np.any(held != 0, axis=2)
            committed = np.asarray(state.lengths) - missing
            expected = np.arange(cache.capacity) < committed[:, None]
            np.testing.assert_array_equal(used, expected)


# A target that counts up modulo 10, and a drafter that knows it: runs of known length.
COUNTING = jnp.where(jnp.arange(10) == (jnp.arange(10)[:, None] + 1) % 10, 9.0, 0.0)


BRANCHES = StaticTree(((1,), (0,), (1, 0), (0, 1), (0, 0), (0, 0, 0), (0, 0, 0, 0)))


def counted(*, stop_ids=(), max_tokens=20, table=COUNTING, K=4, finish=True, tree=None):
    drafter = TableDrafter(K, deterministic=True, tree=tree)
    config = DecodeConfig(markov(10), drafter, (drafter.num_draft_nodes + 1,))
    state = start(config, [[0], [2]], max_tokens=max_tokens, stop_ids=stop_ids, capacity=64)
    return run(config, (COUNTING, table), state, 1000 if finish else 1)


@pytest.mark.parametrize("tree", [None, BRANCHES], ids=["chain", "tree"])
@pytest.mark.parametrize("stop", range(1, 10))
def test_a_stop_token_ends_the_row_at_every_offset_of_a_run(stop, tree):
    state = counted(stop_ids=[stop], tree=tree)
    second = [2, *(i % 10 for i in range(3, 3 + (stop - 3) % 10 + 1))]
    expected = [list(range(stop + 1)), second]
    assert rows_of(state) == expected
    assert state.finish.tolist() == [Finish.STOP] * 2


@pytest.mark.parametrize("tree", [None, BRANCHES], ids=["chain", "tree"])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_ends_the_row_at_every_offset_of_a_run(max_tokens, tree):
    state = counted(max_tokens=max_tokens, tree=tree)
    assert rows_of(state)[0] == [i % 10 for i in range(max_tokens + 1)]
    assert state.finish.tolist() == [Finish.LENGTH] * 2


def test_what_comes_first_wins():
    both = counted(stop_ids=[3], max_tokens=3)
    assert rows_of(both)[0] == [0, 1, 2, 3]
    assert both.finish.tolist() == [Finish.STOP, Finish.STOP]  # a last token that stops: stop
    assert counted(stop_ids=[4], max_tokens=3).finish.tolist() == [Finish.LENGTH, Finish.STOP]


@pytest.mark.parametrize("tree", [None, BRANCHES], ids=["chain", "tree"])
def test_counters_count_rounds_drafts_and_acceptances(tree):
    """A tree counts by its depth."""
    counters = counts_of(counted(max_tokens=20, tree=tree))
    assert counters.rounds.tolist() == [4, 4]
    assert counters.drafted.tolist() == [[4] * 4] * 2
    assert counters.accepted.tolist() == [[4] * 4] * 2
    wrong_third = COUNTING.at[2].set(COUNTING[5])  # after 2 it says 6
    counters = counts_of(counted(max_tokens=8, table=wrong_third, tree=tree))
    # row 0: 1 2 | 3 fresh, then 4 5 6 7 8: two rounds
    assert counters.rounds.tolist()[0] == 2
    assert counters.accepted.tolist()[0] == [2, 2, 1, 1]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_logits_that_are_not_finite_end_the_row_before_they_are_used(bad):
    broken = COUNTING.at[3].set(bad)
    config = DecodeConfig(markov(10), TableDrafter(4, deterministic=True), (5,))
    state = run(config, (broken, COUNTING), start(config, [[0], [5]], max_tokens=5, capacity=64))
    assert rows_of(state) == [[0, 1, 2, 3], [5, 6, 7, 8, 9, 0]]
    assert state.finish.tolist() == [Finish.INVALID, Finish.LENGTH]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf], ids=["not finite", "nothing allowed"])
def test_a_stop_before_a_place_without_a_law_wins(bad, temperature):
    """As in plain decoding, which never gets there. Row 1 starts behind the stop."""
    broken = COUNTING.at[3].set(bad)
    for K in (0, 4):
        drafter = TableDrafter(K, deterministic=True) if K else NoDrafter()
        config = DecodeConfig(markov(10), drafter, (K + 1,))
        settings = sampling(2, vocab_size=10, temperature=temperature, top_k=1)
        state = start(
            config, [[0], [3]], max_tokens=5, settings=settings, stop_ids=[2], capacity=64
        )
        state = run(config, (broken, COUNTING), state)
        assert rows_of(state) == [[0, 1, 2], [3]]
        failure = Finish.INVALID if jnp.isnan(bad) else Finish.FORBIDDEN
        assert state.finish.tolist() == [Finish.STOP, failure]


def test_a_finished_row_changes_no_more():
    state = counted(max_tokens=[3, 20])
    assert rows_of(state)[0] == [0, 1, 2, 3]
    assert state.log.rounds.tolist() == [1, 4]


@pytest.mark.parametrize("name", ["draft model", "mtp dynamic tree"])
def test_one_program_a_shape_and_it_copies_neither_pages_nor_weights(name):
    drafter, draft_params = DRAFTERS[name](llama_params(1))
    config = DecodeConfig(TARGET, drafter, (2, 8), prefill_chunk=16)
    params = (llama_params(0), draft_params)
    state = start(config, PROMPTS[:2], max_tokens=5, capacity=208)
    text = rounds_of.lower(config, params, state, np.int32(9)).compile().as_text()
    # What a loop carries is copied once on its way in where it is donated; nothing in a loop is.
    copied = set(re.findall(r"= \w+\[([\d,]+)\]\{[\d,]*\} copy\(", text))
    shapes = {
        ",".join(map(str, x.shape))
        for x in jax.tree.leaves((params, state.cache.pages))
        if x.ndim > 1
    }
    assert "26,16,2,8" in shapes
    assert not shapes & copied
    before = rounds_of._cache_size()
    for max_tokens in (3, 9):
        run(config, params, start(config, PROMPTS[:2], max_tokens=max_tokens, capacity=208))
    assert rounds_of._cache_size() == before + 1


def test_the_state_is_donated():
    config = DecodeConfig(TARGET, NoDrafter(), (8,), prefill_chunk=16)
    state = start(config, PROMPTS, max_tokens=3)
    run(config, (llama_params(0), ()), state)
    assert state.cache.pages[0].keys.is_deleted()


def test_widths_must_hold_a_draft():
    with pytest.raises(JspecError, match=r"at least 7, for the 6 tokens .* ngram may draft"):
        DecodeConfig(TARGET, NgramDrafter(6), (2, 6))
    tree, _ = DRAFTERS["mtp dynamic tree"](llama_params(1))
    with pytest.raises(JspecError, match=r"at least 8, for the 7 tokens .* head may draft"):
        DecodeConfig(TARGET, tree, (4, 7))
    with pytest.raises(ValueError, match="ascend"):
        DecodeConfig(TARGET, NoDrafter(), (8, 2))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_that_is_cut_goes_on_as_if_nothing_had_been_beyond(name):
    """Its keys, its text and its drafter are those of the tokens that are left."""
    drafter, draft_params = DRAFTERS[name](llama_params(0))
    config = DecodeConfig(TARGET, drafter, (8,), prefill_chunk=16)
    params = (llama_params(0), draft_params)
    state = run(config, params, start(config, PROMPTS, max_tokens=MAX_TOKENS), 3)
    lengths = np.asarray(state.lengths)
    keep = np.array([lengths[0] - 3, lengths[1] + 1, lengths[2] - 1], np.int32)
    state = jax.jit(cut)(state, keep, np.full((3,), Finish.STOP, np.int32))
    assert state.lengths.tolist() == [keep[0], lengths[1], keep[2]]
    assert state.cache.lengths.tolist() == (np.asarray(state.lengths) - 1).tolist()
    assert state.finish.tolist() == [Finish.STOP, Finish.RUNNING, Finish.STOP]
    going = state.replace(finish=jnp.zeros_like(state.finish))
    assert rows_of(run(config, params, going)) == rows_of(generated(name))


@pytest.mark.parametrize("name", ["none", "ngram", "draft model", "mtp", "mtp dynamic tree"])
def test_forked_rows_go_on_as_rows_that_read_the_prompt_themselves(name):
    drafter, draft_params = DRAFTERS[name](llama_params(1))
    config = DecodeConfig(TARGET, drafter, (8,), prefill_chunk=16)
    params = (llama_params(0), draft_params)
    parent, seeds = np.array([2, 1, 2, 0, 2, 1]), [1, 2, 3, 4, 5, 6]
    settings = sampling(6, temperature=1.0, coupled=True, seed=seeds)
    each = [PROMPTS[p] for p in parent]
    alone = start(config, each, max_tokens=30, settings=settings)
    state = read(config, params, start(config, PROMPTS, max_tokens=30))
    idle = np.array([False] * 5 + [True])
    forked = jax.jit(fork)(state, parent, idle, alone.sampling)
    assert forked.cache.table[0, 0] == forked.cache.table[2, 0] == forked.cache.table[4, 0]
    assert forked.cache.pages[0].keys.shape == alone.cache.pages[0].keys.shape
    forked, alone = run(config, params, forked), run(config, params, alone)
    got, want = rows_of(forked), rows_of(alone)
    assert got[:5] == want[:5]
    assert got[5] == PROMPTS[1]
    np.testing.assert_array_equal(forked.log.accepted[:5], alone.log.accepted[:5])
