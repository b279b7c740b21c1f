"""What tests of drafting behind exits share: a reference without a cache, and a count of layers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import read, uncached

from jspec import model as model_lib
from jspec.config import ModelConfig
from jspec.decode import DecodeConfig, DecodeState, step
from jspec.drafters.base import Context, Draft, Drafter
from jspec.exits import exit_logits, own_exit
from jspec.model import llama
from jspec.params import Params


def proposal(config: DecodeConfig, params: Any, state: DecodeState) -> Draft:
    """The first draft behind the prompts."""
    return jax.device_get(_propose(config.drafter, params[1], read(config, params, state)))


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter: Drafter, params: Any, state: DecodeState) -> Draft:
    context = Context(state.tokens, state.lengths, state.sampling, state.cache)
    return drafter.propose(params, (), context)[0]


def exits_of_places(
    config: ModelConfig,
    target: Params,
    layers: Sequence[int],
    text: Sequence[int],
    *,
    first: int,
    stop: float,
    temperature: float,
) -> list[tuple[int | None, np.ndarray]]:
    """For the places behind token `first` and each later one of a text: the layers below the first
    exit that is sure there (None: none is), and the law `[V]` at that exit (at the last one)."""
    tokens = np.zeros((1, 24), np.int32)
    tokens[0, : len(text)] = text
    hidden = uncached(llama(config), target, jnp.asarray(tokens))[1]
    by_exit = [
        np.asarray(
            exit_logits(
                own_exit(target),
                hidden[layer],
                eps=config.rms_norm_eps,
                vocab_size=config.vocab_size,
            ),
            np.float64,
        )[0]
        for layer in layers
    ]
    places = []
    for index in range(first, len(text)):
        scaled = [logits[index] / (temperature or 1.0) for logits in by_exit]
        laws = [np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in scaled]
        sure = [layer for layer, law in zip(layers, laws, strict=True) if law.max() >= stop]
        law = laws[layers.index(sure[0]) if sure else -1]
        greedy = np.eye(law.size)[law.argmax()]
        places.append((sure[0] if sure else None, law if temperature else greedy))
    return places


def layers_run(
    monkeypatch: pytest.MonkeyPatch, config: DecodeConfig, params: Any, state: DecodeState
) -> Counter:
    """Tokens that each layer ran over in a round, but for the copies that fill up single rows."""
    ran, layer_of = Counter(), model_lib.decoder_layer

    def counted(layer: Any, config: Any, hidden: Any, cache: Any, index: int) -> Any:
        width = 1 if hidden.shape[1] == 2 else hidden.shape[1]
        jax.debug.callback(lambda: ran.update({index: width}))
        return layer_of(layer, config, hidden, cache, index)

    with monkeypatch.context() as patch:
        patch.setattr(model_lib, "decoder_layer", counted)
        jax.block_until_ready(step(config, params, state))
        jax.effects_barrier()
    return ran
