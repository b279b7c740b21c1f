"""A mixture of experts in place of an MLP: each token is sent to the few that suit it.

Shapes are fixed whatever is chosen. A (token, expert) pair is a row of work; rows are sorted by
expert and laid out in tiles, none of which two experts share. A loop goes over the tiles in use and
reads the matrices of the expert of each, so that those of an expert whom nobody chose stay unread:

    3 tokens choose 2 of 4 experts: 0 2 | 2 3 | 2 0, tiles of two
    experts  0 0 | 2 2 | 2 - | 3 - | (two more tiles that might have been needed)
    tokens   0 2 | 0 1 | 2 - | 1 -

(`jax.lax.ragged_dot` is for such products, too; on CPUs and GPUs it multiplies every row with every
expert and throws most away.) Not to be differentiated: the length of the loop is data. Knows
nothing of attention.
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

    in_use: Array  # int32: that many come first
    experts: Array  # [tiles] int32; of a tile that is not in use, any
    tokens: Array  # [tiles, _TILE] int32; of a place without a row, any
    places: Array  # [M, k] int32: where a token's rows are, in the tiles laid end to end


def _each_expert(params: ExpertsParams, tokens: Array, chosen: Array, num_experts: int) -> Array:
    """`[M, k, D]`: what the experts `chosen` `[M, k]` make of `tokens` `[M, D]`."""
    tiles = _tiles(chosen, num_experts)

    def run(tile: Array, outputs: Array) -> Array:
        matrices = (
            jax.lax.dynamic_index_in_dim(x, tiles.experts[tile], keepdims=False)
            for x in (params.gate, params.up, params.down)
        )
        return outputs.at[tile].set(gated_mlp(tokens[tiles.tokens[tile]], *matrices))

    outputs = jnp.zeros((*tiles.tokens.shape, tokens.shape[1]), tokens.dtype)
    outputs = jax.lax.fori_loop(0, tiles.in_use, run, outputs)
    return outputs.reshape(-1, tokens.shape[1])[tiles.places]


def _tiles(chosen: Array, num_experts: int) -> _Tiles:
    """The tiles of the rows of `chosen` `[M, k]`; as many as there may have to be."""
    experts = chosen.reshape(-1)
    num_tiles = experts.size // _TILE + min(num_experts, experts.size)
    counts = jnp.bincount(experts, length=num_experts)
    needed = -(-counts // _TILE)
    ends = jnp.cumsum(needed)
    order = jnp.argsort(experts)
    own = experts[order]
    rank = jnp.arange(experts.size) - (jnp.cumsum(counts) - counts)[own]  # among an expert's rows
    places = jnp.zeros_like(experts).at[order].set(rank + ((ends - needed) * _TILE)[own])
    rows = jnp.arange(experts.size, dtype=jnp.int32) // chosen.shape[1]
    return _Tiles(
        in_use=ends[-1],
        experts=jnp.searchsorted(ends, jnp.arange(num_tiles), side="right"),
        tokens=jnp.zeros((num_tiles * _TILE,), jnp.int32).at[places].set(rows).reshape(-1, _TILE),
        places=places.reshape(chosen.shape),
    )
