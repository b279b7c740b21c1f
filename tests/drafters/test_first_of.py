"""Several drafters in order of preference."""

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
    uncached_greedy,
)

from jspec.decode import DecodeConfig
from jspec.drafters.base import Context
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.first_of import FirstOf
from jspec.drafters.growth import DynamicTree, StaticTree
from jspec.drafters.ngram import NgramDrafter

V = CONFIG.vocab_size
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], list(range(2, 45))]
MAX_TOKENS = [30, 24, 40]
NGRAM = NgramDrafter(4, min_match=2)  # often has nothing to say
TREE = TableDrafter(3, tree=DynamicTree(3, 2, 7))
OTHERS = {
    "draft model": (DraftModel(TARGET, V, 5), llama_params(0)),
    "tree": (TREE, jnp.zeros((V, V))),
    "chain": (TableDrafter(3), jnp.zeros((V, V))),
}


def both(name, rounds=1000, **settings):
    second, params = OTHERS[name]
    config = DecodeConfig(TARGET, FirstOf((NGRAM, second)), (8,), prefill_chunk=16)
    state = start(config, PROMPTS, max_tokens=MAX_TOKENS, settings=sampling(3, **settings))
    return run(config, (llama_params(0), ((), params)), state, rounds)


@pytest.mark.parametrize("name", OTHERS)
def test_greedy_text_equals_an_uncached_reference(name):
    for row, prompt, n in zip(rows_of(both(name)), PROMPTS, MAX_TOKENS, strict=True):
        assert row == uncached_greedy(TARGET, llama_params(0), prompt, n)


def test_a_drafter_that_was_not_asked_still_reads_what_others_drafted():
    """The draft model is the target, so whatever it drafts is accepted: also right after rounds
    that the n-gram drafted, where a cache with holes would show."""
    config = DecodeConfig(TARGET, FirstOf((NGRAM, DraftModel(TARGET, V, 5))), (8,))
    params = llama_params(0), ((), llama_params(0))
    state = read(config, params, start(config, PROMPTS, max_tokens=MAX_TOKENS))
    by_ngram = by_model = 0
    while np.any(np.asarray(state.finish) == 0):
        context = Context(tokens=state.tokens, lengths=state.lengths, sampling=state.sampling)
        drafted = np.asarray(NGRAM.propose((), (), context)[0].num_drafted)
        running, before = np.asarray(state.finish) == 0, np.asarray(state.lengths)
        state = rounds_of(config, params, state, np.int32(1))
        emitted = np.asarray(state.lengths) - before
        left = np.array([len(p) for p in PROMPTS]) + MAX_TOKENS - before
        asked = running & (drafted == 0)
        assert np.all(emitted[asked] == np.minimum(6, left[asked]))
        by_ngram, by_model = by_ngram + (running & ~asked).sum(), by_model + asked.sum()
    assert by_ngram > 5
    assert by_model > 5


def drafts_of(first, second, first_params=(), second_params=(), tokens=((1, 2, 3), (1, 2, 1))):
    tokens = jnp.asarray(tokens, jnp.int32)
    size = 5
    context = Context(
        tokens=jnp.pad(tokens, [(0, 0), (0, 5)]),
        lengths=jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32),
        sampling=sampling(tokens.shape[0], vocab_size=size, temperature=1.0),
    )
    drafter = FirstOf((first, second))
    state = drafter.init(tokens.shape[0], 8, jnp.float32)
    return drafter, drafter.propose((first_params, second_params), state, context)[0]


def test_each_row_takes_the_first_that_has_something_to_say():
    table = jnp.eye(5)[jnp.array([1, 2, 3, 4, 0])] * 50  # counts up
    drafter, draft = drafts_of(NgramDrafter(2, growth=0), TableDrafter(3), (), table)
    assert (drafter.num_speculative_tokens, drafter.num_draft_nodes) == (3, 3)
    assert draft.num_drafted.tolist() == [3, 1]
    assert draft.tokens.tolist()[0] == [4, 0, 1]
    assert draft.tokens.tolist()[1][0] == 2
    assert draft.tree is None
    np.testing.assert_allclose(draft.probs[1, 0], np.eye(5)[2])  # certain
    np.testing.assert_allclose(draft.probs[0, 0], np.eye(5)[4], atol=1e-6)


def test_a_chain_beside_a_tree_is_a_tree():
    table = jnp.broadcast_to(jnp.arange(5.0), (5, 5))
    tree = StaticTree(((0,), (1,), (1, 0)))
    drafter, draft = drafts_of(NgramDrafter(2), TableDrafter(2, tree=tree), (), table)
    assert (drafter.num_speculative_tokens, drafter.num_draft_nodes) == (2, 3)
    assert draft.num_drafted.tolist() == [3, 1]
    assert draft.tree.parents.tolist() == [[0, 0, 2], [0, 1, 0]]
    assert (draft.tree.depth, draft.tree.branching) == (2, 2)
    assert draft.probs is None


def test_what_no_row_needs_is_not_run():
    calls = []

    class Counts(NgramDrafter):
        def propose(self, params, state, context):
            jax.debug.callback(lambda: calls.append(1))
            return super().propose(params, state, context)

    drafts_of(NgramDrafter(2), Counts(2), tokens=((1, 2, 1), (3, 0, 3)))
    jax.effects_barrier()
    assert calls == []
    drafts_of(NgramDrafter(2), Counts(2), tokens=((1, 2, 1), (3, 0, 4)))
    jax.effects_barrier()
    assert calls == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_taps_of_several(temperature):
    """Each drafter sees its own taps: here one that stores them, behind one that wants others."""

    class Stores(TableDrafter):
        def init(self, batch, capacity, dtype):
            return jnp.zeros((batch, 8))

        def read(self, params, state, context, passage):
            (seen,) = passage.features
            last = jnp.maximum(passage.num_tokens - 1, 0)[:, None, None]
            newest = jnp.take_along_axis(seen, last, axis=1)[:, 0]
            return jnp.where((passage.num_tokens > 0)[:, None], newest, state)

    first, second = Stores(2, taps=(0,)), Stores(2, taps=(-1,))
    drafter = FirstOf((first, second))
    assert drafter.taps == (0, -1)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)), jnp.float32)
    config = DecodeConfig(markov(5), drafter, (4,))
    settings = sampling(2, vocab_size=5, temperature=temperature)
    state = start(config, [[1, 2], [3]], max_tokens=9, settings=settings, capacity=16)
    state = run(config, (table, (table, table)), state)
    before_last = np.array([row[-2] for row in rows_of(state)])
    logits = np.pad(np.asarray(table)[before_last], [(0, 0), (0, 3)])
    np.testing.assert_allclose(state.drafter[0], logits[:, ::-1])
    np.testing.assert_allclose(state.drafter[1], logits)
    assert counts_of(state).drafted.sum() > 0
