"""A mixture of experts in place of an MLP: each token is sent to the few that suit it.

Shapes are fixed whatever is chosen. A (token, expert) pair is a row of work; rows are sorted by
expert and laid out in tiles, none of which two experts share, and an expert's matrices are read
once a tile, those of an expert that nobody chose not at all:

    3 tokens choose 2 of 4 experts: 0 2 | 2 3 | 2 0, tiles of two
    experts  0 0 | 2 2 | 2 - | 3 - | (tiles that no expert needs)
    tokens   0 2 | 0 1 | 2 - | 1 -

(`jax.lax.ragged_dot` is for such products, too; on CPUs and GPUs it multiplies every row with every
expert and throws most away.) Knows nothing of attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec.config import ExpertsConfig
from jspec.layers import gated_mlp, linear, times_sigmoid
from jspec.params import ExpertsParams

_TILE = 8
"""Rows that share a reading of their expert's matrices."""
_SMALLEST = 1e-20
"""Beside a sum of scores that is divided by, as DeepSeek has it."""


def mixture(params: ExpertsParams, config: ExpertsConfig, x: Array) -> Array:
    """`[..., D]` of `x` `[..., D]`: the chosen experts' outputs by their weights, and that of the
    expert that all tokens share (DeepSeekMoE, arXiv 2401.06066, equation 9)."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = route(params, config, tokens)
    outputs = _each_expert(params, tokens, chosen, config.num_experts).astype(jnp.float32)
    out = jnp.sum(weights[..., None] * outputs, axis=1).astype(x.dtype)
    shared = params.shared
    if shared is not None:
        added = gated_mlp(tokens, shared.gate, shared.up, shared.down)
        if shared.switch is not None:
            added = times_sigmoid(added, linear(tokens, shared.switch, None))
        out = out + added
    return out.reshape(x.shape)


def route(params: ExpertsParams, config: ExpertsConfig, tokens: Array) -> tuple[Array, Array]:
    """The experts of `tokens` `[M, D]`, of k each: weights `[M, k]` float32, numbers `[M, k]`.

    `sigmoid` is DeepSeek-V3's (arXiv 2412.19437, equations 12 to 16): a correction bias decides
    who is chosen, and does not weigh; `softmax` is that of Qwen's mixtures.
    """
    logits = jnp.matmul(
        tokens.astype(jnp.float32),
        params.router.astype(jnp.float32).T,
        precision=jax.lax.Precision.HIGHEST,  # a GPU would round to 11 bits, and choose others
    )
    if config.scoring_func == "softmax":
        scores = liking = jax.nn.softmax(logits)
    else:
        assert params.correction_bias is not None
        scores = jax.nn.sigmoid(logits)
        liking = scores + params.correction_bias.astype(jnp.float32)
    _, chosen = jax.lax.top_k(_in_best_groups(liking, config), config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if config.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + _SMALLEST)
    return weights * config.routed_scaling_factor, chosen


def _in_best_groups(liking: Array, config: ExpertsConfig) -> Array:
    """`liking` `[M, E]`, but -inf outside the token's best groups: experts stand in `n_group`
    groups, a group is as good as its best two, and a token is sent to `topk_group` of them."""
    grouped = liking.reshape(liking.shape[0], config.n_group, -1)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), config.topk_group)
    allowed = jnp.any(groups[..., None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(liking.shape)


class _Tiles(NamedTuple):
    """Where the rows of work lie."""

    experts: Array  # [tiles] int32
    tokens: Array  # [tiles, _TILE] int32; of a place without a row, any
    places: Array  # [M, k] int32: where a token's rows are, in the tiles laid end to end


def _each_expert(params: ExpertsParams, tokens: Array, chosen: Array, num_experts: int) -> Array:
    """`[M, k, D]`: what the experts `chosen` `[M, k]` make of `tokens` `[M, D]`."""
    tiles = _tiles(chosen, num_experts)

    def of_tile(tile: tuple[Array, Array]) -> Array:
        rows, expert = tile
        matrices = (
            jax.lax.dynamic_index_in_dim(x, expert, keepdims=False)
            for x in (params.gate, params.up, params.down)
        )
        return gated_mlp(tokens[rows], *matrices)

    outputs = jax.lax.map(of_tile, (tiles.tokens, tiles.experts))
    return outputs.reshape(-1, tokens.shape[1])[tiles.places]


def _tiles(chosen: Array, num_experts: int) -> _Tiles:
    """The tiles of the rows of `chosen` `[M, k]`; as many as there may have to be."""
    experts = chosen.reshape(-1)
    num_tiles = experts.size // _TILE + min(num_experts, experts.size)
    counts = jnp.bincount(experts, length=num_experts)
    ends = jnp.cumsum(-(-counts // _TILE))  # of the experts' tiles
    order = jnp.argsort(experts)
    rank = jnp.arange(experts.size) - (jnp.cumsum(counts) - counts)[experts[order]]
    first = (ends - -(-counts // _TILE)) * _TILE
    places = jnp.zeros_like(experts).at[order].set((first[experts[order]] + rank).astype(jnp.int32))
    rows = jnp.arange(experts.size, dtype=jnp.int32) // chosen.shape[1]
    tokens = jnp.zeros((num_tiles * _TILE,), jnp.int32).at[places].set(rows)
    of_tile = jnp.searchsorted(ends, jnp.arange(num_tiles), side="right")
    return _Tiles(
        experts=jnp.minimum(of_tile, num_experts - 1).astype(jnp.int32),
        tokens=tokens.reshape(num_tiles, _TILE),
        places=places.reshape(chosen.shape),
    )
