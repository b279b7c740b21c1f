"""The Llama family as pure functions, and what the engine asks of any model.

Knows nothing of drafters, sampling or requests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.attention import attend
from jspec.cache import Cache, CacheSpec
from jspec.config import ModelConfig
from jspec.experts import mixture
from jspec.latent import project_latent
from jspec.layers import gated_mlp, linear, rms_norm, times_sigmoid
from jspec.params import LayerParams, Params
from jspec.rope import apply_rope


class Output(NamedTuple):
    """Result of one forward pass over T tokens. What is not read is not computed (XLA)."""

    logits: Array
    """`[B, T, V]` float32."""
    hidden: tuple[Array, ...]
    """Taps: entry i is the residual stream `[B, T, D]` at the input of layer i, the last entry
    the final hidden state after the norm. A model with nothing to show gives ()."""
    cache: Cache
    """The cache with the keys and values of these tokens in its block; pages unchanged."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What the engine needs of a model; static and hashable, parameters apart.

    `forward(params, tokens [B, T] int32, cache) -> Output` is pure. It calls
    `jspec.attend(cache, layer, queries, keys, values)` once a layer and hands on the cache that
    comes back; `cache.positions(T)` are the positions of the tokens.
    """

    forward: Callable[[Any, Array, Cache], Output]
    vocab_size: int
    max_position_embeddings: int
    cache_spec: CacheSpec
    eos_token_ids: tuple[int, ...] = ()
    config: ModelConfig | None = None
    """Of a model whose parameters are a `params.Params`, for what builds on them (draft heads)."""
    forward_from: Callable[[Any, tuple[Array, ...], Cache], Output] | None = None
    """`forward` from the middle on, for what takes tokens through the first layers itself: the
    residual streams `[B, T, D]` at the inputs of layers 0 to i, in place of tokens, are handed on
    as taps, and layer i is the first to run. None: the model runs as a whole only."""


@functools.cache
def llama(config: ModelConfig) -> Model:
    """The `Model` of a config; the same object for equal configs, so programs are shared."""
    return Model(
        forward=functools.partial(forward, config=config),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        cache_spec=CacheSpec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim),
        eos_token_ids=config.eos_token_ids,
        config=config,
        forward_from=functools.partial(forward_from, config=config),
    )


def forward(params: Params, tokens: Array, cache: Cache, *, config: ModelConfig) -> Output:
    """The whole model over `tokens` `[B, T]`, which stand behind those in flight in `cache`."""
    return forward_from(params, (embed(params, tokens),), cache, config=config)


def forward_from(
    params: Params, hidden: tuple[Array, ...], cache: Cache, *, config: ModelConfig
) -> Output:
    """The rest of the model behind the inputs `[B, T, D]` of its first layers, the last of which
    has not run yet; the block of `cache` holds keys and values of those that have."""
    layers = range(len(hidden) - 1, config.num_hidden_layers)
    hidden, cache = forward_layers(params, config, hidden, cache, layers=layers)
    final = rms_norm(hidden[-1], params.final_norm, config.rms_norm_eps)
    return Output(unembed(params, final), (*hidden[:-1], final), cache)


def embed(params: Params, tokens: Array) -> Array:
    """`[B, T]` -> `[B, T, D]`. A pad token reads row 0; nothing depends on the result."""
    return params.embed[jnp.maximum(tokens, 0)]


def unembed(params: Params, final: Array) -> Array:
    """Logits `[B, T, V]` float32 of normed hidden states `[B, T, D]`."""
    head = params.embed if params.lm_head is None else params.lm_head
    return linear(final, head, None, dtype=jnp.float32)


def forward_layers(
    params: Params, config: ModelConfig, hidden: tuple[Array, ...], cache: Cache, *, layers: range
) -> tuple[tuple[Array, ...], Cache]:
    """Runs a range of layers on the last of `hidden`, and puts the output of each behind it."""
    for i in layers:
        output, cache = decoder_layer(params.layers[i], config, hidden[-1], cache, i)
        hidden = (*hidden, output)
    return hidden, cache


class Heads(NamedTuple):
    """What a layer attends with, and what becomes of the attended values."""

    queries: Array  # [B, T, N, H], rotated
    keys: Array  # [B, T, Nkv, H], rotated
    values: Array  # [B, T, Nkv, H]
    gates: Array | None = None  # [B, T, N, H]: the attended values are multiplied by their sigmoid


def decoder_layer(
    params: LayerParams, config: ModelConfig, hidden: Array, cache: Cache, index: int
) -> tuple[Array, Cache]:
    """Pre-norm attention and MLP, each added to the residual stream `[B, T, D]`."""
    positions = cache.positions(hidden.shape[1])
    heads = _normed_heads(params, config, hidden, positions)
    attended, cache = attend(cache, index, heads.queries, heads.keys, heads.values)
    return rest_of_layer(params, config, hidden, attended, heads.gates), cache


@functools.partial(jax.jit, static_argnums=1)  # traced once, not once a layer
def _normed_heads(
    params: LayerParams, config: ModelConfig, hidden: Array, positions: Array
) -> Heads:
    normed = rms_norm(hidden, params.input_norm, config.rms_norm_eps)
    return project_heads(params, config, normed, positions)


def project_heads(
    params: LayerParams, config: ModelConfig, normed: Array, positions: Array
) -> Heads:
    """Of what attention reads, `[B, T, *]`."""
    if params.latent is not None:
        return Heads(*project_latent(params, config, normed, positions))
    assert params.q is not None
    assert params.k is not None
    assert params.v is not None
    queries, gates = linear(normed, params.q, params.q_bias), None
    keys = linear(normed, params.k, params.k_bias)
    values = linear(normed, params.v, params.v_bias)
    if config.gated_attention:
        queries, gates = jnp.split(queries, 2, axis=-1)
    if params.q_norm is not None and params.k_norm is not None:
        queries = rms_norm(queries, params.q_norm, config.rms_norm_eps)
        keys = rms_norm(keys, params.k_norm, config.rms_norm_eps)
    queries, keys = (apply_rope(x, positions, config) for x in (queries, keys))
    return Heads(queries, keys, values, gates)


@functools.partial(jax.jit, static_argnums=1)
def rest_of_layer(
    params: LayerParams,
    config: ModelConfig,
    hidden: Array,
    attended: Array,
    gates: Array | None = None,
) -> Array:
    """The layer's output `[B, T, D]` from its input and the attended values `[B, T, N, H]`, of
    which `o` may read fewer than H numbers a head."""
    attended = attended[..., : params.o.shape[-1]]
    if gates is not None:
        attended = times_sigmoid(attended, gates)
    hidden = hidden + linear(attended, params.o, params.o_bias, inputs=2)
    with jax.named_scope("mlp"):
        normed = rms_norm(hidden, params.post_norm, config.rms_norm_eps)
        return hidden + _mlp(params, config, normed)


def _mlp(params: LayerParams, config: ModelConfig, normed: Array) -> Array:
    """`[B, T, D]` of the normed stream: one MLP, or a mixture of them."""
    if params.experts is not None:
        assert config.experts is not None
        return mixture(params.experts, config.experts, normed)
    assert params.gate is not None
    assert params.up is not None
    assert params.down is not None
    return gated_mlp(
        normed,
        params.gate,
        params.up,
        params.down,
        gate_bias=params.gate_bias,
        up_bias=params.up_bias,
        down_bias=params.down_bias,
    )
