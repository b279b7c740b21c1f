"""The law of what is emitted is the target's own, whatever is drafted, for every setting.

A Markov target over five tokens lets the joint law of the first three tokens be enumerated, by a
reference that shares nothing with the engine (`reference.py`). One batch holds rows of all
settings and both rules side by side, with prompts of different lengths and idle rows between
them; each row has its own seed. Counts are compared by chi-square, at a threshold that a right
engine exceeds once in 100,000 comparisons (there are some 500 here). Seeds and examples are
fixed, so a run says the same every time.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
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
from jspec.drafters.medusa import MedusaDrafter
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.head_params import MedusaConfig
from pallas_kernels.paged_attention import reference as paged_attention

V, NUM_TOKENS = 5, 3
PROMPTS = [[1, 2, 1], [3], [0, 4, 0, 4, 0]]
RNG = np.random.default_rng(5)
TARGET = jnp.asarray(RNG.normal(size=(V, V)) * 1.5, jnp.float32)
NEAR = TARGET + jnp.asarray(RNG.normal(size=(V, V)), jnp.float32)
OUTSIDE = jnp.where(jnp.arange(V) > 2, -jnp.inf, NEAR)  # never drafts 3 or 4
TABLE = np.asarray(TARGET, np.float64)
NO = -np.inf

SETTINGS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.15},
    "filters": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "repetition": {"temperature": 1.0, "repetition_penalty": 2.0},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 1.3, "frequency_penalty": -1.0},
    "bias": {"temperature": 1.0, "bias": (0.0, 2.0, 0.0, -1.0, 0.5)},
    "allowed": {"temperature": 1.0, "bias": (NO, NO, NO, 0.0, 0.0)},  # OUTSIDE cannot draft
    "bad words": {"temperature": 1.5, "bad_words": ((-1, -1, 2), (-1, 3, 1), (1, 3, 3))},
    "min tokens": {"temperature": 1.5, "stop_ids": (0, 2), "min_tokens": 2},
    "stop": {"temperature": 1.5, "stop_ids": (1,)},
    "everything": {
        "temperature": 1.1,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "bias": (0.5, 0.0, 1.0, NO, 0.0),
        "bad_words": ((-1, 0, 2),),
        "stop_ids": (4,),
        "min_tokens": 1,
    },
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 3.0, "top_p": 0.5},
}
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
def narrow_tiles():
    """Rows of 16 slots; the heads' attention would read sixteen times as many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "KEY_TILE", 16)
        yield


@functools.cache
def joint_law(prompt, wanted):
    return reference.joint_law(TABLE, prompt, NUM_TOKENS, **dict(wanted))


def padded(words, shape):
    """Tokens at the end of each row, -1 before them."""
    out = np.full(shape, -1)
    for row, word in zip(out, words, strict=False):
        row[len(row) - len(word) :] = word
    return out


def columns(groups):
    """Engine settings of one row a group, from those of the reference."""
    plain = {"top_p": 1.0, "repetition_penalty": 1.0, "bias": (0.0,) * V}
    names = sorted({name for group in groups for name in group})
    rows = {}
    for name in names:
        values = [group.get(name, plain.get(name, 0)) for group in groups]
        if name == "bad_words":
            values = [padded(v or (), (3, 3)) for v in values]
        if name == "stop_ids":
            values = [padded([v or ()], (1, 2))[0] for v in values]
        rows[name] = np.array(values)
    return rows


def emitted(drafter, params, groups, rows_a_group, coupled):
    """`[groups, rows_a_group, 3]` tokens of a batch in which the groups' rows take turns. A
    stopped row is filled up with its stop token, an idle group's rows with their prompt's last."""
    G = len(groups)
    prompts = [PROMPTS[g % len(PROMPTS)] for g in range(G)] * rows_a_group

    def tiled(x):
        return np.concatenate([x] * rows_a_group)

    rows = {name: tiled(x) for name, x in columns(groups).items()}
    idle, min_tokens = (rows.pop(name, tiled(np.zeros(G))) for name in ("idle", "min_tokens"))
    stop_ids = rows.pop("stop_ids", np.full((len(prompts), 1), -1))
    widths = (max(4, drafter.num_draft_nodes + 1),)
    config = DecodeConfig(markov(V), drafter, widths, prefill_chunk=8)
    state = start(
        config,
        prompts,
        max_tokens=np.where(idle, 0, NUM_TOKENS),
        min_tokens=min_tokens,
        settings=sampling(len(prompts), vocab_size=V, coupled=tiled(coupled), **rows),
        stop_ids=stop_ids,
        capacity=16,
    )
    state = run(config, (TARGET, params), state)
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    starts = np.array([len(prompt) for prompt in prompts])
    place = np.minimum(starts[:, None] + np.arange(NUM_TOKENS), lengths[:, None] - 1)
    out = np.take_along_axis(tokens, place, axis=1)
    return out.reshape(rows_a_group, G, NUM_TOKENS).transpose(1, 0, 2)


def excess(tokens, law):
    """By how much the statistic of `[rows, 3]` tokens exceeds what a right engine exceeds once in
    100,000 comparisons. Cells expected fewer than five times are pooled."""
    counts = np.zeros((V,) * NUM_TOKENS)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = law * len(tokens)
    if counts[expected == 0].sum():
        return np.inf  # outside the target's support
    large = expected >= 5
    cells = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    kept = wanted > 0
    statistic = ((cells[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    freedom = kept.sum() - 1
    return statistic - (stats.chi2.ppf(1 - 1e-5, freedom) if freedom else 1e-6)


def wrong_groups(drafter, groups, rows_a_group, coupled):
    """The numbers of the groups whose law is not the target's."""
    tokens = emitted(*DRAFTERS[drafter], groups, rows_a_group, np.asarray(coupled))
    wrong = []
    for g, group in enumerate(groups):
        prompt = PROMPTS[g % len(PROMPTS)]
        if group.get("idle"):
            right = np.all(tokens[g] == prompt[-1])
        else:
            law = joint_law(tuple(prompt), tuple(sorted(group.items())))
            right = excess(tokens[g], law) < 0
        wrong += [] if right else [g]
    return wrong


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joint_law_in_a_mixed_batch(drafter):
    """Every setting under both rules, idle rows (which have settings, too) between them."""
    names = [name for name in SETTINGS for _ in range(2)]
    groups = [SETTINGS[name] for name in names]
    coupled = [False, True] * len(SETTINGS)
    for place in (3, 11, 20):
        groups.insert(place, SETTINGS["everything"] | {"idle": 1})
        coupled.insert(place, False)
        names.insert(place, "idle")
    wrong = wrong_groups(drafter, groups, 6_000, coupled)
    assert [(names[g], "coupled" if coupled[g] else "rejection") for g in wrong] == []


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in TREES_OF_HEADS])
def test_joint_law_where_no_row_asks_for_anything(drafter, coupled):
    """Such batches take a shorter way through the sampler."""
    groups = [SETTINGS["plain"], SETTINGS["warm"], SETTINGS["plain"] | {"idle": 1}]
    assert wrong_groups(drafter, groups, 15_000, [coupled] * 3) == []


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
    wrong = wrong_groups(drafter, list(groups), 4_000, coupled)
    assert [(drafter, groups[g], coupled[g]) for g in wrong] == []


@pytest.mark.parametrize("name", SETTINGS)
def test_the_test_sees_a_wrong_law(name):
    """Counts of one setting are not those of one close to it."""
    near = {
        "temperature": max(SETTINGS[name]["temperature"] * 1.3, 0.5),
        "stop_ids": SETTINGS[name].get("stop_ids", ()),
    }
    tokens = emitted(*DRAFTERS["none"], [SETTINGS[name]], 6_000, np.array([False]))[0]
    assert excess(tokens, joint_law(tuple(PROMPTS[0]), tuple(SETTINGS[name].items()))) < 0
    other = SETTINGS[name] | near
    assert excess(tokens, joint_law(tuple(PROMPTS[0]), tuple(other.items()))) > 0


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
