"""A draft model at the start of its training: a small Llama that speaks the target's tokens.

Knows nothing of data or of how it is trained.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.config import ModelConfig
from jspec.params import LayerParams, Params, init_params
from jspec.train.settings import DraftSettings
from jspec.train.whole import output_head

_SPREAD = 0.5
"""Standard deviation of a new model's logits: nearly uniform, but not without a direction."""


class DraftFrozen(flax.struct.PyTreeNode):
    """What a draft model learns from and leaves alone; rows stand in the order of `tokens`."""

    lm_head: Array  # [V, D], the target's
    tokens: Array  # [V] int32: the token of each row, the frequent ones first
    rank: Array  # [V] int32: the row of each token


def draft_config(settings: DraftSettings, target: ModelConfig) -> ModelConfig:
    """A plain Llama with a tied embedding, of the target's vocabulary, positions and end tokens."""
    return dataclasses.replace(
        target,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.mlp_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.hidden_size // settings.heads,
        tie_word_embeddings=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def new_draft(config: ModelConfig, target: Params, seed: int) -> Params:
    """float32. It begins as a bigram model: its layers, drawn from `seed`, add nothing yet, and its
    embedding is the target's as well as so few directions can have it."""
    drawn = init_params(config, jax.random.key(seed))
    embed = principal(target.embed, config.hidden_size)
    size = jnp.sqrt(jnp.mean(embed * embed))
    voice = _SPREAD / (size * config.hidden_size**0.5)
    return drawn.replace(
        embed=embed,
        layers=tuple(_quiet(layer) for layer in drawn.layers),
        final_norm=jnp.full_like(drawn.final_norm, 1.0) * voice,
    )


def principal(embed: Array, width: int) -> Array:
    """`[V, width]` float32: `embed` `[V, D]` along its first `width` principal directions (right
    singular vectors), entries as large on average as they were."""
    wide = np.asarray(embed, np.float32)
    _, directions = np.linalg.eigh(wide.T @ wide)  # ascending
    narrow = wide @ directions[:, ::-1][:, :width]
    return jnp.asarray(narrow * np.sqrt(np.mean(wide**2) / np.mean(narrow**2)), jnp.float32)


def _quiet(layer: LayerParams) -> LayerParams:
    """Adds nothing to the residual stream; what it reads keeps its size."""

    def as_large(x: Array) -> Array:
        return x / jnp.sqrt(jnp.mean(x * x) * x.shape[-1])

    read = {name: as_large(getattr(layer, name)) for name in ("q", "k", "v", "gate", "up")}
    return layer.replace(
        **read, o=jnp.zeros_like(layer.o), down=jax.tree.map(jnp.zeros_like, layer.down)
    )


def draft_frozen(target: Params, frequent: np.ndarray) -> DraftFrozen:
    """Of a target, with the tokens `frequent` in front; in the target's dtype."""
    head = output_head(target)
    others = np.setdiff1d(np.arange(len(head)), frequent)
    tokens = np.concatenate([frequent, others]).astype(np.int32)
    return DraftFrozen(
        lm_head=head[tokens],
        tokens=jnp.asarray(tokens),
        rank=jnp.asarray(np.argsort(tokens), jnp.int32),
    )
