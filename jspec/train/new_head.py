"""A head at the start of its training: its config, what is trained, what is the target's.

Knows nothing of data or of how it is trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.head_params import (
    AnyConfig,
    AnyParams,
    ExitsConfig,
    ExitsParams,
    HeadConfig,
    MedusaConfig,
    MedusaParams,
    init_head,
)
from jspec.params import Params
from jspec.train.settings import Family
from jspec.train.states import eagle3_taps

_VOICE = 0.25
"""Of a new head's logits against the target's."""


class Frozen(flax.struct.PyTreeNode):
    """What a head shares with its target and training leaves alone."""

    embed: Array  # [V, D]
    lm_head: Array  # [draft V, D]
    token_ids: Array | None  # [draft V] int32, ascending; None: all tokens
    draft_ids: Array  # [V] int32: place of a target token in the draft vocabulary, or -1


class NewHead(NamedTuple):
    """A head to train."""

    config: AnyConfig
    trained: AnyParams
    """float32, without the leaves that are `frozen`."""
    frozen: Frozen


def head_config(
    family: Family,
    target: ModelConfig,
    *,
    draft_vocab_size: int,
    norms: bool,
    num_heads: int,
    exits: tuple[int, ...] = (),
) -> AnyConfig:
    """The static shape of a head of one layer like the target's; `num_heads` is Medusa's, `exits`
    are the layers before each exit."""
    if not 0 < draft_vocab_size <= target.vocab_size:
        raise JspecError(
            f"a draft vocabulary of {draft_vocab_size}: the target has {target.vocab_size} tokens"
        )
    if not norms and family not in ("mtp", "eagle"):
        raise JspecError(f"a head of family {family} has norms")
    if family == "medusa":
        return MedusaConfig(num_heads, target.hidden_size, target.vocab_size, draft_vocab_size)
    if family == "exits":
        _check_exits(exits, target)
        return ExitsConfig(exits, target.hidden_size, target.vocab_size, draft_vocab_size)
    if family == "mtp" and not norms:
        family = "eagle"
    return HeadConfig(
        family=family,
        layers=dataclasses.replace(target, num_hidden_layers=1, tie_word_embeddings=False),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        taps=eagle3_taps(target.num_hidden_layers) if family == "eagle3" else (-1,),
        fc_bias=family == "eagle",
    )


def _check_exits(layers: tuple[int, ...], target: ModelConfig) -> None:
    deepest = target.num_hidden_layers - 1
    if not layers or sorted({0, *layers}) != [0, *layers] or layers[-1] > deepest:
        raise JspecError(
            f"exits behind layers {', '.join(map(str, layers))}: give numbers of layers from 1 to "
            f"{deepest}, ascending"
        )


def new_head(config: AnyConfig, target: Params, token_ids: np.ndarray, seed: int) -> NewHead:
    """A head that begins to learn: matrices drawn from `seed`, but what a layer adds to its
    residual stream is nothing yet. Neither do Medusa's blocks add anything: it begins as the
    target. The others speak through the target's lm_head with a quarter of its voice (measured:
    60 steps then reach a held-out cross entropy of 4.75 instead of 5.70), an exit through the
    target's final norm, by a block that takes three quarters away.

    `token_ids` `[draft V]` are ascending; the frozen leaves keep the target's dtype.
    """
    lm_head = target.embed if target.lm_head is None else target.lm_head
    vocab_size = lm_head.shape[0]
    whole = len(token_ids) == vocab_size
    draft_ids = np.full((vocab_size,), -1, np.int32)
    draft_ids[token_ids] = np.arange(len(token_ids), dtype=np.int32)
    frozen = Frozen(
        embed=target.embed,
        lm_head=lm_head if whole else lm_head[token_ids],
        token_ids=None if whole else jnp.asarray(token_ids, jnp.int32),
        draft_ids=jnp.asarray(draft_ids),
    )
    return NewHead(config, _trained(config, target, seed), frozen)


def _trained(config: AnyConfig, target: Params, seed: int) -> AnyParams:
    if isinstance(config, MedusaConfig):
        blocks, biases = _silent_blocks(config.num_heads, config.hidden_size)
        return MedusaParams(blocks, biases, lm_heads=())
    if isinstance(config, ExitsConfig):
        blocks, biases = _silent_blocks(len(config.layers), config.hidden_size)
        blocks = tuple(x - (1 - _VOICE) * jnp.eye(config.hidden_size) for x in blocks)
        # A copy each: a training step donates its arrays.
        norms = tuple(jnp.array(target.final_norm, jnp.float32) for _ in blocks)
        return ExitsParams(norms, blocks, biases, lm_head=cast(Any, None))
    params = init_head(config, jax.random.key(seed))
    layers = tuple(
        layer.replace(o=jnp.zeros_like(layer.o), down=jax.tree.map(jnp.zeros_like, layer.down))
        for layer in params.layers
    )
    params = params.replace(layers=layers, embed=None, lm_head=None, token_ids=None)
    if not config.has_norms:
        return params.replace(fc=_VOICE * params.fc)
    return params.replace(final_norm=_VOICE * target.final_norm.astype(jnp.float32))


def _silent_blocks(number: int, D: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Matrices and biases of residual blocks that add nothing."""
    return (
        tuple(jnp.zeros((D, D), jnp.float32) for _ in range(number)),
        tuple(jnp.zeros((D,), jnp.float32) for _ in range(number)),
    )


def whole_head(config: AnyConfig, trained: AnyParams, frozen: Frozen) -> AnyParams:
    """The parameters of inference, all in the dtype of the frozen ones."""
    cast = jax.tree.map(lambda x: x.astype(frozen.lm_head.dtype), trained)
    if isinstance(config, MedusaConfig):
        heads = (frozen.lm_head,) * config.num_heads
        return cast.replace(lm_heads=heads, token_ids=frozen.token_ids)
    if isinstance(config, ExitsConfig):
        return cast.replace(lm_head=frozen.lm_head, token_ids=frozen.token_ids)
    return cast.replace(embed=frozen.embed, lm_head=frozen.lm_head, token_ids=frozen.token_ids)


def draft_vocabulary(counts: np.ndarray, size: int, always: tuple[int, ...]) -> np.ndarray:
    """`[size]` ids, ascending: of the tokens counted `[V]` the most frequent, the lower id first
    where counts are equal, and in any case those of `always`."""
    order = np.lexsort((np.arange(counts.size), -counts))
    rank = np.empty(counts.size, np.int64)
    rank[order] = np.arange(counts.size)
    rank[list(always)] = -1
    return np.sort(np.argsort(rank, kind="stable")[:size]).astype(np.int32)
