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
from jspec import heads
from jspec.attention import attend
from jspec.cache import Cache, CacheSpec
from jspec.config import ModelConfig
from jspec.decode import DecodeConfig, DecodeState, init_state, read_prompts, run_rounds
from jspec.drafters.base import Context, Draft, Passage, draft_token, drafted_before
from jspec.drafters.growth import TreeShape
from jspec.drafters.none import NoDrafter
from jspec.draws import argmax
from jspec.head_params import (
    Family,
    HeadConfig,
    HeadParams,
    MedusaConfig,
    MedusaParams,
    head_specs,
    init_head,
    medusa_specs,
)
from jspec.model import Model, Output, llama
from jspec.params import LeafSpec, Params, init_params, is_spec
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
def uncached(model: Model, params: Any, tokens: Array) -> tuple[Array, tuple[Array, ...]]:
    """Logits and hidden states of whole texts `[B, S]`, in one pass."""
    rows, width = tokens.shape
    cache = cache_lib.init_cache(model.cache_spec, rows, width, page_size=16, dtype=jnp.float32)
    return model.forward(params, tokens, cache_lib.open_block(cache, width))[:2]


def uncached_greedy(model: Model, params: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The greedy text by running the whole prefix anew for every token."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + max_tokens):
        tokens[0, n] = int(jnp.argmax(uncached(model, params, tokens)[0][0, n - 1]))
    return tokens[0, : len(prompt) + max_tokens].tolist()


def _markov(params: Array, tokens: Array, cache: Cache) -> Output:
    logits = params[tokens]
    hidden = jnp.pad(logits, [(0, 0), (0, 0), (0, -logits.shape[-1] % 8)])
    return Output(logits, (jnp.flip(hidden, -1), jnp.tanh(hidden), hidden), cache)


def markov(vocab_size: int) -> Model:
    """A model whose logits are row `token` of its one parameter `[V, V]`: laws that can be
    enumerated, through the same engine as any model (bring your own). The last of its hidden
    states is that row, with zeros up to a multiple of eight."""
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
    num_best: int = 0

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(
        self, params: Array, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def commit(
        self, params: Array, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
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
ONE_LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1)


def head_config(family: Family, layers: ModelConfig, **settings: Any) -> HeadConfig:
    """Of a head with the target's sizes, or those of `layers`; EAGLE-3 reads three depths."""
    plain = {
        "draft_vocab_size": layers.vocab_size,
        "target_hidden_size": layers.hidden_size,
        "taps": (0, 1, -1) if family == "eagle3" else (-1,),
    }
    return HeadConfig(family, layers, **(plain | settings))


def head_params(config: HeadConfig, seed: int) -> HeadParams:
    """Random: norms near one, biases, embedding and reduced vocabulary, too."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    params = init_head(config, next(keys))

    def shaken(x: Array) -> Array:
        return x + 0.2 * jax.random.normal(next(keys), x.shape)

    shaken_params = jax.tree.map(shaken, params.replace(token_ids=None))
    return shaken_params.replace(
        embed=shaken_params.embed * 5,
        lm_head=shaken_params.lm_head * 5,
        token_ids=some_tokens(head_specs(config).token_ids, config.layers.vocab_size, next(keys)),
    )


@functools.cache
def trained_head(
    family: Family, draft_vocab_size: int, layers: ModelConfig = ONE_LAYER
) -> tuple[HeadConfig, HeadParams]:
    """A head on the tiny target that is often, but by no means always, right."""
    config = head_config(family, layers, draft_vocab_size=draft_vocab_size)
    tokens, logits, hidden = text_of_the_target()
    params = head_params(config, 3).replace(
        embed=llama_params(0).embed, token_ids=frequent(tokens, draft_vocab_size)
    )
    features = tuple(hidden[i][:, :-1] for i in config.taps)
    spec = CacheSpec(1, layers.num_key_value_heads, layers.head_dim)

    @jax.jit
    def finals(params: HeadParams) -> Array:
        rows, width = features[0].shape[:2]
        cache = cache_lib.init_cache(spec, rows, width, page_size=16, dtype=jnp.float32)
        cache = cache_lib.open_block(cache, width)
        fused, positions = heads.fuse(params, config, features), cache.positions(width)
        hidden, _ = heads.forward(
            params, config, tokens[:, 1:], fused, cache, positions=positions, attend=attend
        )
        return heads.logits(params.replace(lm_head=jnp.eye(CONFIG.hidden_size)), config, hidden)

    fitted = fitted_lm_head(finals(params), logits[:, 1:], params.token_ids)
    return config, params.replace(lm_head=fitted)


@functools.cache
def trained_medusa(num_heads: int) -> tuple[MedusaConfig, MedusaParams]:
    """Medusa heads on the tiny target, for most of its tokens; often right, as `trained_head`."""
    config = MedusaConfig(num_heads, CONFIG.hidden_size, CONFIG.vocab_size, 48)
    tokens, logits, hidden = text_of_the_target()
    params = medusa_params(config, 4).replace(token_ids=frequent(tokens, 48))
    every = params.replace(lm_heads=(jnp.eye(CONFIG.hidden_size),) * num_heads)
    inner = heads.medusa_logits(every, hidden[-1])
    fitted = [
        fitted_lm_head(inner[i, :, : -1 - i], logits[:, 1 + i :], params.token_ids)
        for i in range(num_heads)
    ]
    return config, params.replace(lm_heads=tuple(fitted))


@functools.cache
def text_of_the_target() -> tuple[Array, Array, tuple[Array, ...]]:
    """Greedy and random text of the tiny target `[12, 115]`, its logits and hidden states."""
    config = DecodeConfig(TARGET, NoDrafter(), (8,), prefill_chunk=16)
    params, prompts = llama_params(0), [[7], [3, 1, 4], [2, 20]]
    rows: list[list[int]] = []
    for i in range(4):
        wanted = sampling(3, temperature=min(i, 1), seed=3 * i + np.arange(3))
        rows += rows_of(
            run(config, (params, ()), start(config, prompts, max_tokens=115, settings=wanted))
        )
    tokens = jnp.asarray([row[:115] for row in rows], jnp.int32)
    return tokens, *uncached(TARGET, params, tokens)


def frequent(tokens: Array, size: int) -> Array | None:
    """The `size` most frequent tokens, in order; None: all."""
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=CONFIG.vocab_size)
    best = np.sort(np.argsort(-counts, kind="stable")[:size])
    return None if size == counts.size else jnp.asarray(best, jnp.int32)


def fitted_lm_head(inputs: Array, logits: Array, token_ids: Array | None) -> Array:
    """`[draft V, D]`: predicts log probabilities from `[..., D]` as well as a matrix can."""
    wanted = jax.nn.log_softmax(logits)
    wanted = np.asarray(wanted if token_ids is None else wanted[..., token_ids])
    wanted = wanted - wanted.mean(axis=-1, keepdims=True)
    flat = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (inputs, wanted))
    return jnp.asarray(np.linalg.lstsq(*flat, rcond=None)[0].T, jnp.float32)


def medusa_params(config: MedusaConfig, seed: int) -> MedusaParams:
    """Random."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def drawn(spec: LeafSpec) -> Array:
        return jax.random.normal(next(keys), spec.shape)

    specs = medusa_specs(config)
    params = jax.tree.map(drawn, specs.replace(token_ids=None), is_leaf=is_spec)
    return params.replace(token_ids=some_tokens(specs.token_ids, config.vocab_size, next(keys)))


def some_tokens(spec: LeafSpec | None, vocab_size: int, key: Array) -> Array | None:
    """A reduced vocabulary: which tokens it has; None: all."""
    if spec is None:
        return None
    return jnp.sort(jax.random.permutation(key, vocab_size)[: spec.shape[0]]).astype(jnp.int32)
