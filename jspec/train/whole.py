"""A whole model run over packed rows, for training: nothing is cached, texts do not see one
another. Knows nothing of losses."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.config import ModelConfig
from jspec.layers import rms_norm
from jspec.model import embed, project_heads, rest_of_layer
from jspec.params import Params
from jspec.train.step import Batch
from jspec.train.unroll import Path, attend

PRODUCT = "model"
"""Where in a run's folder the trained model stands."""


def streams(
    params: Params, config: ModelConfig, batch: Batch, kept: Array | None = None
) -> tuple[Array, ...]:
    """The residual streams `[B, S, D]`: the input of each layer, and what the last one puts out.

    `kept` `[L, B]` bool: a row that a layer is not kept for goes past it unchanged.
    """
    hidden = embed(params, batch.tokens)
    nothing = ((),) * config.num_hidden_layers
    path, found = Path(batch.segments, nothing, nothing), [hidden]
    for i, layer in enumerate(params.layers):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        heads = project_heads(layer, config, normed, batch.positions)
        attended, path = attend(path, i, heads.queries, heads.keys, heads.values)
        output = rest_of_layer(layer, config, hidden, attended, heads.gates)
        hidden = output if kept is None else jnp.where(kept[i][:, None, None], output, hidden)
        found.append(hidden)
    return tuple(found)


def output_head(params: Params) -> Array:
    """`[V, D]`."""
    return params.embed if params.lm_head is None else params.lm_head


def cast(params: Any, dtype: Any) -> Any:
    """All leaves in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def export_model(
    config: ModelConfig, dtype: Any, tokenizer: Any, folder: FilePath, trained: Params
) -> None:
    """`folder` is the model, in `dtype`."""
    import checkpoints  # late: brings transformers' names along

    checkpoints.save_model(folder, config, cast(trained, dtype), tokenizer=tokenizer)
