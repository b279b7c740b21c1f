"""Exits: what makes a law of the residual stream between two layers of a model.

An exit of a LayerSkip model (arXiv 2404.16710) is the model's own final norm and output head. A
model that was not trained to exit needs a head of its own there: a norm, a linear map that is
added to it (the tuned lens, arXiv 2303.08112) and the output head, over all tokens or the most
frequent.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax.numpy as jnp
from jax import Array

from jspec.cache import Cache
from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.head_params import ExitsConfig, ExitsParams
from jspec.heads import in_target_vocabulary
from jspec.layers import linear, rms_norm
from jspec.model import Model, Output, embed, forward_layers, llama
from jspec.params import Params


class ExitParams(flax.struct.PyTreeNode):
    """Parameters of one exit."""

    norm: Array  # [D]
    lm_head: Array  # [draft V, D]
    block: Array | None = None  # [D, D]; None: the stream as it is
    bias: Array | None = None  # [D]
    token_ids: Array | None = None  # [draft V] int32: target token of each; None: they are the same


def own_exit(target: Params) -> ExitParams:
    """The exit that a LayerSkip model has behind each of its layers: the target's own arrays."""
    head = target.embed if target.lm_head is None else target.lm_head
    return ExitParams(norm=target.final_norm, lm_head=head)


def exit_of(config: ExitsConfig, params: ExitsParams, layer: int) -> ExitParams:
    """The trained exit behind `layer` layers. JspecError where there is none."""
    if layer not in config.layers:
        there = ", ".join(map(str, config.layers))
        raise JspecError(f"no exit was trained behind {layer} layers: give one of {there}")
    number = config.layers.index(layer)
    return ExitParams(
        norm=params.norms[number],
        lm_head=params.lm_head,
        block=params.blocks[number],
        bias=params.biases[number],
        token_ids=params.token_ids,
    )


def exit_output(params: ExitParams, hidden: Array, *, eps: float) -> Array:
    """What an exit hands to its lm_head `[..., D]`, of residual streams `[..., D]`."""
    normed = rms_norm(hidden, params.norm, eps)
    if params.block is None:
        return normed
    return normed + linear(normed, params.block, params.bias)


def exit_logits(params: ExitParams, hidden: Array, *, eps: float, vocab_size: int) -> Array:
    """Logits `[B, T, V]` float32 over the target's tokens, -inf for those that the exit does not
    know, of residual streams `[B, T, D]`."""
    output = exit_output(params, hidden, eps=eps)
    logits = linear(output, params.lm_head, None, dtype=jnp.float32)
    return in_target_vocabulary(logits, params.token_ids, vocab_size)


@functools.cache
def exit_model(config: ModelConfig, layer: int) -> Model:
    """The first `layer` layers of a model and an exit behind them, as a `Model` that runs on the
    whole one's cache. Parameters are `(Params of the whole model, ExitParams)`; the last of its
    hidden states is the residual stream at the exit."""
    if not 0 < layer < config.num_hidden_layers:
        raise JspecError(
            f"an exit behind {layer} layers: the model has {config.num_hidden_layers}, so it "
            f"can be behind 1 to {config.num_hidden_layers - 1} of them"
        )

    def forward(params: tuple[Params, ExitParams], tokens: Array, cache: Cache) -> Output:
        return forward_from(params, (embed(params[0], tokens),), cache)

    def forward_from(
        params: tuple[Params, ExitParams], hidden: tuple[Array, ...], cache: Cache
    ) -> Output:
        layers = range(len(hidden) - 1, layer)
        hidden, cache = forward_layers(params[0], config, hidden, cache, layers=layers)
        logits = exit_logits(
            params[1], hidden[-1], eps=config.rms_norm_eps, vocab_size=config.vocab_size
        )
        return Output(logits, hidden, cache)

    whole = llama(config)
    return dataclasses.replace(whole, forward=forward, forward_from=forward_from, config=None)
