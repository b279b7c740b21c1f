"""What a drafter is told: every committed token once, with the target's hidden states at the
token before it, whatever was drafted, accepted or cut short.

    text     a b c d e          recorded at slots 0..3: (b, h_a) (c, h_b) (d, h_c) (e, h_d)
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from tiny import (
    CONFIG,
    TARGET,
    TableDrafter,
    llama_params,
    rows_of,
    run,
    sampling,
    start,
    text_of_the_target,
    uncached,
    uncached_greedy,
)

from jspec.decode import DecodeConfig, Finish
from jspec.drafters.base import Drafter
from jspec.drafters.growth import DynamicTree, StaticTree
from jspec.drafters.ngram import NgramDrafter

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], list(range(2, 45)), [51, 51, 51, 51]]
MAX_TOKENS = [50, 40, 61, 33]


class Record(flax.struct.PyTreeNode):
    """What a recorder has been told, and the state of the drafter that it drafts with."""

    inner: Any
    rounds: Array
    """`[B]` int32."""
    lengths: Array
    """`[B]` int32: places recorded."""
    tokens: Array
    """`[B, S]` int32."""
    features: tuple[Array, ...]
    """`[B, S, D]` each."""


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Drafts what another drafter does, in round r as many tokens as `limits[r]` at most (less one
    a row), and records every passage."""

    inner: Drafter
    limits: tuple[int, ...]
    taps: tuple[int, ...] = (0, 1, -1)
    num_best: int = 0
    name: str = "recorder"

    @property
    def num_speculative_tokens(self):
        return self.inner.num_speculative_tokens

    @property
    def num_draft_nodes(self):
        return self.inner.num_draft_nodes

    def init(self, batch, capacity, dtype):
        nothing = jnp.zeros((batch,), jnp.int32)
        return Record(
            inner=self.inner.init(batch, capacity, dtype),
            rounds=nothing,
            lengths=nothing,
            tokens=jnp.zeros((batch, capacity), jnp.int32),
            features=(jnp.zeros((batch, capacity, CONFIG.hidden_size), dtype),) * len(self.taps),
        )

    def read(self, params, state, context, passage):
        inner = self.inner.read(params, state.inner, context, passage)
        return self.record(state.replace(inner=inner), passage)

    def commit(self, params, state, context, passage):
        inner = self.inner.commit(params, state.inner, context, passage)
        return self.record(state.replace(inner=inner), passage)

    def propose(self, params, state, context):
        draft, inner = self.inner.propose(params, state.inner, context)
        rows = jnp.arange(state.rounds.size, dtype=jnp.int32)
        limit = jnp.array(self.limits, jnp.int32)[state.rounds % len(self.limits)] - rows
        num_drafted = jnp.clip(limit, 0, draft.num_drafted)
        state = state.replace(inner=inner, rounds=state.rounds + 1)
        return draft._replace(num_drafted=num_drafted), state

    def record(self, state, passage):
        index = jnp.arange(passage.tokens.shape[1], dtype=jnp.int32)
        slots = state.lengths[:, None] + index
        slots = jnp.where(index < passage.num_tokens[:, None], slots, state.tokens.shape[1])
        rows = jnp.arange(state.rounds.size)[:, None]
        return state.replace(
            lengths=state.lengths + passage.num_tokens,
            tokens=state.tokens.at[rows, slots].set(passage.tokens, mode="drop"),
            features=tuple(
                old.at[rows, slots].set(new, mode="drop")
                for old, new in zip(state.features, passage.features, strict=True)
            ),
        )


def followers():
    """`[V, V]`: logarithms of how often the target's own text has each token behind each other."""
    tokens = np.asarray(text_of_the_target()[0])
    counts = np.random.default_rng(0).random((CONFIG.vocab_size,) * 2)
    np.add.at(counts, (tokens[:, :-1], tokens[:, 1:]), 3.0)
    return jnp.asarray(np.log(counts), jnp.float32)


PATHS = ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (1, 0, 0))
DRAFTERS = {
    "chain": (NgramDrafter(6), lambda: ()),
    "soft chain": (TableDrafter(6), followers),
    "static tree": (TableDrafter(3, tree=StaticTree(PATHS)), followers),
    "dynamic tree": (TableDrafter(3, tree=DynamicTree(3, 3, 7)), followers),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_token_is_told_once_with_the_states_that_it_came_of(name):
    """Prompts of none to three chunks; rows that draft all, some and nothing, so that rounds run
    at all widths; rows that stop and rows that reach their end inside a run."""
    inner, make_table = DRAFTERS[name]
    widths = (1, 2, 8) if name == "dynamic tree" else (2, 8)
    config = DecodeConfig(TARGET, Recorder(inner, (9, 1, 5, 0, 9)), widths, prefill_chunk=16)
    params = llama_params(0)
    greedy = uncached_greedy(TARGET, params, PROMPTS[3], MAX_TOKENS[3])
    end = 24  # of the text's first 41
    state = start(
        config,
        PROMPTS,
        max_tokens=MAX_TOKENS,
        settings=sampling(4, temperature=[0, 0.5, 0.5, 0], coupled=[False, False, True, False]),
        stop_ids=[[-1], [-1], [-1], [greedy[end]]],
    )
    state = run(config, (params, make_table()), state)
    assert rows_of(state)[3] == greedy[: end + 1]
    assert state.finish.tolist() == [Finish.LENGTH, Finish.LENGTH, Finish.LENGTH, Finish.STOP]
    accepted = np.asarray(state.log.accepted)
    assert len(np.unique(accepted)) >= 3
    record = state.drafter
    np.testing.assert_array_equal(record.lengths, state.lengths - 1)
    _, hidden = uncached(TARGET, params, state.tokens)
    for row, text in enumerate(rows_of(state)):
        known = len(text) - 1
        assert record.tokens[row, :known].tolist() == text[1:]
        for tap, features in zip(config.drafter.taps, record.features, strict=True):
            expected = np.asarray(hidden[tap][row, :known])
            np.testing.assert_allclose(features[row, :known], expected, rtol=2e-4, atol=2e-4)
            assert not np.any(features[row, known:])
