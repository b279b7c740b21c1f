"""Tiny models, drafters and states that the tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache, CacheSpec
from jspec.config import ModelConfig
from jspec.decode import DecodeConfig, DecodeState, init_state, read_prompts, run_rounds
from jspec.drafters.base import Context, Draft, Passage, draft_token, drafted_before
from jspec.drafters.growth import TreeShape
from jspec.draws import argmax
from jspec.model import Model, Output, llama
from jspec.params import Params, init_params
from jspec.sampling import Sampling, neutral

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)


@functools.cache
def llama_params(seed: int, dtype: Any = jnp.float32, config: ModelConfig = CONFIG) -> Params:
    """A random model with weights large enough that its text is not constant."""
    params = init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: (x * (8 if x.ndim > 1 else 1)).astype(dtype), params)


def sampling(rows: int, *, vocab_size: int = CONFIG.vocab_size, **settings: Any) -> Sampling:
    """Settings of `rows` rows; a scalar goes for all, seeds are 0, 1, ... unless given. `biased`
    need not be given with `bias`."""
    values = {"seed": np.arange(rows)} | settings
    plain = neutral(rows, vocab_size)
    if "bias" in values:
        values["biased"] = np.any(np.broadcast_to(values["bias"], plain.bias.shape) != 0, axis=1)
    columns = {}
    for name, value in values.items():
        like = getattr(plain, name)
        free = like.ndim - 1 if name in ("bad_words", "stop_ids") else 0  # of any size
        value = np.asarray(value, like.dtype)
        shape = (rows, *value.shape[value.ndim - free :]) if free else like.shape
        columns[name] = jnp.asarray(np.broadcast_to(value, shape))
    return plain.replace(**columns)


def start(
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: Any,
    settings: Sampling | None = None,
    stop_ids: Any = (),
    min_tokens: Any = 0,
    capacity: int = 128,
    dtype: Any = jnp.float32,
) -> DecodeState:
    """The state of a batch of prompts."""
    rows = len(prompts)
    tokens = np.zeros((rows, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in prompts], np.int32)
    stops = np.asarray(stop_ids, np.int32)
    if stops.ndim == 1:  # of all rows
        stops = np.tile(np.append(stops, np.int32(-1)), (rows, 1))
    if settings is None:
        settings = sampling(rows, vocab_size=config.model.vocab_size)
    return init_state(
        config,
        tokens=tokens,
        lengths=lengths,
        max_lengths=(lengths + np.asarray(max_tokens)).astype(np.int32),
        sampling=settings.replace(
            stop_ids=jnp.asarray(stops),
            prompt_lengths=jnp.asarray(lengths),
            min_lengths=jnp.asarray(lengths + np.asarray(min_tokens, np.int32)),
        ),
        page_size=16,
        dtype=dtype,
    )


read = jax.jit(read_prompts, static_argnums=0, donate_argnums=2)
rounds_of = jax.jit(run_rounds, static_argnums=0, donate_argnums=2)


def run(config: DecodeConfig, params: Any, state: DecodeState, rounds: int = 1000) -> DecodeState:
    """The whole generation, or its first rounds."""
    return rounds_of(config, params, read(config, params, state), np.int32(rounds))


class Counts(NamedTuple):
    """What a batch has cost, on the host."""

    rounds: np.ndarray  # [B]
    drafted: np.ndarray  # [B, K], by position in the draft
    accepted: np.ndarray  # [B, K]


def counts_of(state: DecodeState) -> Counts:
    log = jax.device_get(state.log)
    places = np.arange(max(int(log.drafted.max()), 1))
    done = np.arange(log.drafted.shape[1])[:, None] < log.rounds[:, None, None]
    drafted, accepted = (
        np.sum((places < x[..., None]) & done, axis=1) for x in (log.drafted, log.accepted)
    )
    return Counts(log.rounds, drafted, accepted)


def rows_of(state: DecodeState) -> list[list[int]]:
    """The committed tokens of each row."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    return [t[:n].tolist() for t, n in zip(tokens, lengths, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _all_logits(model: Model, params: Any, tokens: Array) -> Array:
    width = tokens.shape[1]
    cache = cache_lib.init_cache(model.cache_spec, 1, width, page_size=16, dtype=jnp.float32)
    return model.forward(params, tokens, cache_lib.open_block(cache, width)).logits


def uncached_greedy(model: Model, params: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy text by running the whole prefix anew for every token."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + max_tokens):
        tokens[0, n] = int(jnp.argmax(_all_logits(model, params, tokens)[0, n - 1]))
    return tokens[0, : len(prompt) + max_tokens].tolist()


def _markov(params: Array, tokens: Array, cache: Cache) -> Output:
    return Output(params[tokens], (), cache)


def markov(vocab_size: int) -> Model:
    """A model whose logits are row `token` of its one parameter `[V, V]`: laws that can be
    enumerated, through the same engine as any model (bring your own)."""
    return _markov_model(vocab_size)


@functools.cache
def _markov_model(vocab_size: int) -> Model:
    return Model(_markov, vocab_size, 4096, CacheSpec(0, 1, 2))


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """Drafts from a Markov table of logits `[V, V]`: drawn from its law, or (deterministic) its
    largest entry, claimed as certain."""

    num_speculative_tokens: int = 3
    deterministic: bool = False
    tree: TreeShape | None = None
    """Grown from the table, instead of a chain."""
    name: str = "table"
    taps: tuple[int, ...] = ()

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(
        self, params: Array, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def commit(self, params: Array, state: tuple[()], passage: Passage) -> tuple[()]:
        return state

    def propose(self, params: Array, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        if self.tree is not None:
            grown = self.tree.grow(params[last], (), lambda _, tokens, __: (params[tokens], ()))
            return grown[0], state
        drafts = jnp.zeros((last.size, self.num_speculative_tokens), jnp.int32)
        laws = []
        for i in range(self.num_speculative_tokens):
            logits, law = params[last], None
            if self.deterministic:
                last = argmax(logits)
            else:
                last, law = draft_token(logits, context, drafts, i)
            drafts = drafts.at[:, i].set(last)
            laws.append(law)
        if self.deterministic:
            return Draft(drafts, None, jnp.full_like(last, drafts.shape[1])), state
        laws = jnp.stack(laws, axis=1)
        return Draft(drafts, laws, drafted_before(laws)), state


TARGET = llama(CONFIG)
