"""Batches whose joint law can be enumerated, and the comparison with what the engine emits.

A Markov target over five tokens lets the joint law of the first three tokens be enumerated, by a
reference that shares nothing with the engine (`reference.py`). One batch holds rows of all
settings and both rules side by side, with prompts of different lengths and idle rows between
them; each row has its own seed. Counts are compared by chi-square, at a threshold that a right
engine exceeds once in 100,000 comparisons (there are some 600 in all). Seeds and examples are
fixed, so a run says the same every time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from scipy import stats
from tiny import markov, run, sampling, start

from jspec.decode import DecodeConfig
from jspec.model import Model
from pallas_kernels.paged_attention import reference as paged_attention

V, NUM_TOKENS = 5, 3
PROMPTS = [[1, 2, 1], [3], [0, 4, 0, 4, 0]]
RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(V, V)) * 1.5
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


class Target(NamedTuple):
    """A model whose next token depends on the last one only."""

    model: Model
    params: Any
    table: np.ndarray
    """`[V, V]` float64: its logits behind each token."""


MARKOV = Target(markov(V), jnp.asarray(TABLE, jnp.float32), np.float64(np.float32(TABLE)))


@contextlib.contextmanager
def narrow_tiles() -> Iterator[None]:
    """Rows of 16 slots; attention would read sixteen times as many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "KEY_TILE", 16)
        yield


@functools.cache
def _joint_law(table, prompt, wanted):
    return reference.joint_law(np.array(table), prompt, NUM_TOKENS, **dict(wanted))


def joint_law(prompt, wanted, target=MARKOV):
    """`[V, V, V]` of the tokens behind a prompt, under settings."""
    table = tuple(map(tuple, target.table.tolist()))
    return _joint_law(table, tuple(prompt), tuple(sorted(wanted.items())))


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


def emitted(drafter, params, groups, rows_a_group, coupled, target=MARKOV):
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
    config = DecodeConfig(target.model, drafter, widths, prefill_chunk=8)
    state = start(
        config,
        prompts,
        max_tokens=np.where(idle, 0, NUM_TOKENS),
        min_tokens=min_tokens,
        settings=sampling(len(prompts), vocab_size=V, coupled=tiled(coupled), **rows),
        stop_ids=stop_ids,
        capacity=16,
    )
    state = run(config, (target.params, params), state)
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


def wrong_groups(drafter, params, groups, rows_a_group, coupled, target=MARKOV):
    """The numbers of the groups whose law is not the target's."""
    tokens = emitted(drafter, params, groups, rows_a_group, np.asarray(coupled), target)
    wrong = []
    for g, group in enumerate(groups):
        prompt = PROMPTS[g % len(PROMPTS)]
        if group.get("idle"):
            right = np.all(tokens[g] == prompt[-1])
        else:
            right = excess(tokens[g], joint_law(prompt, group, target)) < 0
        wrong += [] if right else [g]
    return wrong


def wrong_in_a_mixed_batch(drafter, params, target=MARKOV, rows_a_group=6_000):
    """What is wrong under every setting and both rules, with idle rows (which have settings, too)
    between them."""
    names = [name for name in SETTINGS for _ in range(2)]
    groups = [SETTINGS[name] for name in names]
    coupled = [False, True] * len(SETTINGS)
    for place in (3, 11, 20):
        groups.insert(place, SETTINGS["everything"] | {"idle": 1})
        coupled.insert(place, False)
        names.insert(place, "idle")
    wrong = wrong_groups(drafter, params, groups, rows_a_group, coupled, target)
    return [(names[g], "coupled" if coupled[g] else "rejection") for g in wrong]


def wrong_where_no_row_asks(drafter, params, coupled, target=MARKOV, rows_a_group=15_000):
    """The same in batches that take a shorter way through the sampler."""
    groups = [SETTINGS["plain"], SETTINGS["warm"], SETTINGS["plain"] | {"idle": 1}]
    return wrong_groups(drafter, params, groups, rows_a_group, [coupled] * 3, target)
