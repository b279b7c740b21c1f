"""The law of what is emitted is the target's own, whatever is drafted, for every setting."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import (
    NO,
    PROMPTS,
    RNG,
    SETTINGS,
    TABLE,
    V,
    emitted,
    excess,
    joint_law,
    narrow_tiles,
    wrong_groups,
    wrong_in_a_mixed_batch,
    wrong_where_no_row_asks,
)
from tiny import (
    TableDrafter,
    head_config,
    head_params,
    markov,
    medusa_params,
    run,
    sampling,
    start,
)

from jspec.config import ModelConfig
from jspec.decode import DecodeConfig
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.growth import DynamicTree, StaticTree
from jspec.drafters.head import HeadDrafter
from jspec.drafters.lookahead import LookaheadDrafter
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.drafters.recycling import RecyclingDrafter
from jspec.drafters.suffix import SuffixDrafter
from jspec.head_params import MedusaConfig

TARGET = jnp.asarray(TABLE, jnp.float32)
NEAR = TARGET + jnp.asarray(RNG.normal(size=(V, V)), jnp.float32)
OUTSIDE = jnp.where(jnp.arange(V) > 2, -jnp.inf, NEAR)  # never drafts 3 or 4
PATHS = ((0,), (1,), (3,), (0, 0), (0, 1), (1, 2), (1, 2, 0), (0, 0, 0), (0, 0, 1))


def head(family, tree=None):
    """A random head that drafts four of the five tokens."""
    layer = ModelConfig(V, 8, 8, 1, 1, 1, 2, 4096)
    config = head_config(family, layer, draft_vocab_size=V - 1)
    return HeadDrafter(config, 3, tree), head_params(config, 1)


def medusa():
    config = MedusaConfig(num_heads=3, hidden_size=8, vocab_size=V, draft_vocab_size=V - 1)
    return MedusaDrafter(config, StaticTree(PATHS)), medusa_params(config, 1)


DRAFTERS = {
    "none": (NoDrafter(), ()),
    "soft": (TableDrafter(3), NEAR),
    "perfect": (TableDrafter(3), TARGET),
    "one-hot": (TableDrafter(3, deterministic=True), NEAR),
    "worst token first": (TableDrafter(3, deterministic=True), -TARGET),
    "partly outside": (TableDrafter(3), OUTSIDE),
    "opposite": (TableDrafter(3), -TARGET),
    "ngram": (NgramDrafter(3), ()),
    "suffix": (SuffixDrafter(3), ()),
    "recycling": (RecyclingDrafter(V, StaticTree(PATHS)), ()),
    "lookahead": (LookaheadDrafter(V, window=2, ngram=3, candidates=2), ()),
    "draft model": (DraftModel(markov(V), V, 3), NEAR),
    "chain as a tree": (TableDrafter(3, tree=StaticTree(((0,), (0, 0), (0, 0, 0)))), NEAR),
    "static tree": (TableDrafter(3, tree=StaticTree(PATHS)), NEAR),
    "static tree, worst tokens": (TableDrafter(3, tree=StaticTree(PATHS)), -TARGET),
    "dynamic tree": (TableDrafter(3, tree=DynamicTree(depth=3, width=3, num_nodes=9)), NEAR),
    "whole vocabulary as children": (TableDrafter(1, tree=DynamicTree(1, V, V)), NEAR),
    "mtp": head("mtp"),
    "eagle, static tree": head("eagle", StaticTree(PATHS)),
    "eagle3, dynamic tree": head("eagle3", DynamicTree(depth=3, width=3, num_nodes=9)),
    "medusa": medusa(),
}
# Grown as those from a table are: one batch of each will do.
TREES_OF_HEADS = ("eagle, static tree", "eagle3, dynamic tree", "medusa")


@pytest.fixture(autouse=True, scope="module")
def _():
    with narrow_tiles():
        yield


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joint_law_in_a_mixed_batch(drafter):
    assert wrong_in_a_mixed_batch(*DRAFTERS[drafter]) == []


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in TREES_OF_HEADS])
def test_joint_law_where_no_row_asks_for_anything(drafter, coupled):
    assert wrong_where_no_row_asks(*DRAFTERS[drafter], coupled) == []


def some(strategy, plain):
    return st.one_of(st.just(plain), strategy)


@st.composite
def any_settings(draw):
    """Settings under which some token is always left: bad words are pairs, and tokens 3 and 4 are
    neither stops nor forbidden."""
    pairs = st.tuples(st.integers(0, V - 1), st.integers(0, 2)).map(lambda w: (-1, *w))
    no = st.sampled_from([0.0, 1.0, -1.0, NO])
    return {
        "temperature": draw(st.sampled_from([0.0, 0.6, 1.0, 1.4, 2.0])),
        "top_k": draw(some(st.integers(1, V), 0)),
        "top_p": draw(some(st.sampled_from([0.4, 0.75, 0.95]), 1.0)),
        "min_p": draw(some(st.sampled_from([0.02, 0.2, 0.6]), 0.0)),
        "repetition_penalty": draw(some(st.sampled_from([0.6, 1.4, 3.0]), 1.0)),
        "presence_penalty": draw(some(st.sampled_from([-1.0, 1.0, 2.0]), 0.0)),
        "frequency_penalty": draw(some(st.sampled_from([-0.7, 0.7, 2.0]), 0.0)),
        "bias": draw(some(st.tuples(no, no, no, st.just(0.0), st.just(0.5)), (0.0,) * V)),
        "bad_words": draw(some(st.tuples(pairs, pairs), ())),
        "stop_ids": draw(some(st.tuples(st.integers(0, 2)), ())),
        "min_tokens": draw(st.integers(0, 3)),
    }


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from([name for name in DRAFTERS if name not in ("none", *TREES_OF_HEADS)]),
    st.lists(st.tuples(any_settings(), st.booleans()), min_size=8, max_size=8),
)
def test_joint_law_of_any_settings(drafter, rows):
    groups, coupled = zip(*rows, strict=True)
    wrong = wrong_groups(*DRAFTERS[drafter], list(groups), 4_000, coupled)
    assert [(drafter, groups[g], coupled[g]) for g in wrong] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_the_test_sees_a_wrong_law(name):
    """Counts of one setting are not those of one close to it."""
    near = {
        "temperature": max(SETTINGS[name]["temperature"] * 1.3, 0.5),
        "stop_ids": SETTINGS[name].get("stop_ids", ()),
    }
    tokens = emitted(*DRAFTERS["none"], [SETTINGS[name]], 6_000, np.array([False]))[0]
    assert excess(tokens, joint_law(PROMPTS[0], SETTINGS[name])) < 0
    other = SETTINGS[name] | near
    assert excess(tokens, joint_law(PROMPTS[0], other)) > 0


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
def test_a_drafter_that_knows_no_allowed_token_drafts_none(coupled):
    """Sixteen tokens of which the drafter knows the first eight; the last two are allowed."""
    size, rows = 16, 4_000
    table = jnp.zeros((size, size)).at[:, 15].set(-1.0)
    known = jnp.where(jnp.arange(size) < 8, table, -jnp.inf)
    bias = np.where(np.arange(size) < 14, -np.inf, 0.0)
    config = DecodeConfig(markov(size), TableDrafter(3), (4,))
    wanted = sampling(rows, vocab_size=size, temperature=1.0, bias=bias, coupled=coupled)
    state = start(config, [[14]] * rows, max_tokens=1, settings=wanted, capacity=8)
    state = run(config, (table, known), state)
    assert not np.any(np.asarray(state.log.drafted))
    share = np.mean(np.asarray(state.tokens)[:, 1] == 15)
    prob = np.exp(-1) / (1 + np.exp(-1))
    assert abs(share - prob) < 4.5 * np.sqrt(prob * (1 - prob) / rows)  # once in 100,000
