"""Tiny models, drafters and states that the tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache, CacheSpec
from jspec.config import ModelConfig
from jspec.decode import DecodeConfig, DecodeState, generate, init_state
from jspec.drafters.base import Context, Draft
from jspec.model import Model, Output, llama
from jspec.params import Params, init_params
from jspec.sampling import Purpose, Sampling, draw, probs_from_logits

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


def sampling(
    rows: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: Sequence[int] | None = None,
    coupled: bool | Sequence[bool] = False,
) -> Sampling:
    """Settings of `rows` rows; a scalar goes for all, seeds are 0, 1, ... unless given."""

    def column(value: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return Sampling(
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        min_p=column(min_p, jnp.float32),
        seed=column(np.arange(rows) if seed is None else seed, jnp.uint32),
        coupled=column(coupled, jnp.bool_),
    )


def start(
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    settings: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    capacity: int = 128,
    dtype: Any = jnp.float32,
) -> DecodeState:
    """The state of a batch of prompts."""
    rows = len(prompts)
    tokens = np.zeros((rows, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in prompts], np.int32)
    stops = np.tile(np.array([*stop_ids, -1], np.int32), (rows, 1))
    return init_state(
        config,
        tokens=tokens,
        lengths=lengths,
        max_lengths=(lengths + np.asarray(max_tokens)).astype(np.int32),
        stop_ids=stops,
        sampling=sampling(rows) if settings is None else settings,
        page_size=16,
        dtype=dtype,
    )


def run(config: DecodeConfig, params: Any, state: DecodeState, rounds: int = 1000) -> DecodeState:
    """The whole generation, or its first rounds."""
    return generate(config, params, state, np.int32(rounds))


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
    name: str = "table"

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def prefill(self, params: Array, state: tuple[()], context: Context) -> tuple[()]:
        return state

    def commit(self, params: Array, state: tuple[()], num_emitted: Array) -> tuple[()]:
        return state

    def propose(self, params: Array, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens, laws = [], []
        purpose = jnp.where(context.sampling.coupled, Purpose.TARGET, Purpose.DRAFT)
        for i in range(self.num_speculative_tokens):
            logits = params[last]
            law = probs_from_logits(logits, context.sampling)
            where = context.lengths[:, None] + i
            last = draw(law, context.sampling, where, purpose)
            if self.deterministic:
                last = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens.append(last)
            laws.append(law)
        probs = None if self.deterministic else jnp.concatenate(laws, axis=1)
        drafted = jnp.full_like(context.lengths, self.num_speculative_tokens)
        return Draft(jnp.concatenate(tokens, axis=1), probs, drafted), state


TARGET = llama(CONFIG)
