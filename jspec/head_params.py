"""Draft heads as data: their static shapes, parameter trees and logical axes.

What the numbers mean is said in `jspec.heads`. Knows nothing of files (see `checkpoints`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.config import ModelConfig
from jspec.params import LayerParams, LeafSpec, is_spec, leaf_paths, param_specs

Family = Literal["eagle", "mtp", "eagle3"]


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Static shape of a head."""

    family: Family
    layers: ModelConfig
    """Of the head's own layers; `vocab_size` is the target's."""
    draft_vocab_size: int
    """Tokens that the head knows; the target's `vocab_size` if it knows all."""
    target_hidden_size: int
    taps: tuple[int, ...] = (-1,)
    """Which entries of `model.Output.hidden` are its features; negative ones count from the end,
    -1 is the final hidden state after the norm."""
    fc_bias: bool = False
    norm_before_residual: bool = False
    """EAGLE-3: the residual stream starts from the features after their norm, not before."""
    norm_before_fc: bool = False
    """EAGLE-3: one norm over all features before they are fused."""
    fc_norm: bool = False
    """EAGLE-3: a norm on each feature before they are fused."""
    feeds_normed: bool = False
    """What is carried into the next draft step is the output after the final norm, not before
    (EAGLE-3.1's `norm_output`)."""
    skips_first_embedding: bool = False
    """The embedding in entry 0 counts as zero (DeepSeek's MTP, as vLLM runs it)."""

    def __post_init__(self) -> None:
        if self.family != "eagle3" and len(self.taps) != 1:
            raise ValueError(f"{self.taps=}: a head of family {self.family} has one feature")
        if self.family != "eagle3" and self.target_hidden_size != self.layers.hidden_size:
            raise ValueError(
                f"{self.target_hidden_size=} must be the head's hidden_size "
                f"{self.layers.hidden_size} (family {self.family})"
            )
        if self.family == "eagle3" and self.layers.latent is not None:
            raise ValueError(f"{self.layers.latent=}: a head of family eagle3 has other attention")

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.layers.vocab_size

    @property
    def has_norms(self) -> bool:
        """Whether embedding, features and output are normed."""
        return self.family != "eagle"


class HeadParams(flax.struct.PyTreeNode):
    """A head's parameters. The embedding, and an lm_head it shares, are the target's arrays."""

    embed: Array  # [V, D]; the target's
    lm_head: Array  # [draft V, D]; rows of the target's unless EAGLE-3
    fc: Array  # eagle, mtp: [D, 2 D] over (embedding, feature); eagle3: [D, taps * target D]
    layers: tuple[LayerParams, ...]
    fc_bias: Array | None = None  # [D]
    embed_norm: Array | None = None  # [D]
    feature_norm: Array | None = None  # [D]
    final_norm: Array | None = None  # [D]
    fc_norms: tuple[Array, ...] = ()
    """eagle3: of the features, one over all `[taps * target D]`, or one each `[target D]`."""
    token_ids: Array | None = None  # [draft V] int32: target token of each; None: they are the same


def head_specs(config: HeadConfig) -> HeadParams:
    """The tree of `HeadParams` with a `LeafSpec` in place of each array."""
    spec: Any = LeafSpec
    layer, D = config.layers, config.layers.hidden_size
    tree = param_specs(layer)
    norm = spec((D,), (None,))
    wide = len(config.taps) * config.target_hidden_size
    first = tree.layers[0]
    fc_norms: Any = ()
    if config.family == "eagle3":
        first = first.replace(
            input_norm=None,
            **{
                name: spec((*getattr(first, name).shape[:-1], 2 * D), getattr(first, name).axes)
                for name in ("q", "k", "v")
            },
        )
        if config.fc_norm:
            fc_norms = (spec((config.target_hidden_size,), (None,)),) * len(config.taps)
        elif config.norm_before_fc:
            fc_norms = (spec((wide,), (None,)),)
    if config.family == "eagle":
        first = first.replace(input_norm=None)
    reduced = config.draft_vocab_size != layer.vocab_size
    return HeadParams(
        embed=tree.embed,
        lm_head=spec((config.draft_vocab_size, D), ("vocab", None)),
        fc=spec((D, wide if config.family == "eagle3" else 2 * D), (None, None)),
        layers=(first, *tree.layers[1:]),
        fc_bias=norm if config.fc_bias else None,
        embed_norm=norm if config.has_norms else None,
        feature_norm=norm if config.has_norms else None,
        final_norm=norm if config.has_norms else None,
        fc_norms=fc_norms,
        token_ids=spec((config.draft_vocab_size,), (None,)) if reduced else None,
    )


def init_head(config: HeadConfig, key: Array, dtype: Any = jnp.float32) -> HeadParams:
    """A new head: norms one, biases zero, matrices normal with variance 1 / inputs. `embed` and
    `lm_head` are zeros and `token_ids` the first tokens: put the target's there."""
    specs = head_specs(config)
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))
    names = [name.rpartition(".")[2] for name, _ in leaf_paths(specs)]

    def draw(name: str, spec: LeafSpec, key: Array) -> Array:
        if name == "token_ids":
            return jnp.arange(spec.shape[0], dtype=jnp.int32)
        if "norm" in name or name.isdigit():  # fc_norms.0
            return jnp.ones(spec.shape, dtype)
        if name.endswith("bias") or name in ("embed", "lm_head"):
            return jnp.zeros(spec.shape, spec.dtype or dtype)
        inputs = math.prod(spec.shape[1:] if name == "o" else spec.shape[-1:])
        return (jax.random.normal(key, spec.shape, jnp.float32) * inputs**-0.5).astype(dtype)

    return treedef.unflatten([draw(*args) for args in zip(names, leaves, keys, strict=True)])


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Static shape of Medusa heads: each one residual block and a projection."""

    family: ClassVar[Literal["medusa"]] = "medusa"
    taps: ClassVar[tuple[int, ...]] = (-1,)

    num_heads: int
    hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size


class MedusaParams(flax.struct.PyTreeNode):
    """Parameters of the heads, an entry a head."""

    blocks: tuple[Array, ...]  # [D, D]
    biases: tuple[Array, ...]  # [D]
    lm_heads: tuple[Array, ...]  # [draft V, D]
    token_ids: Array | None = None  # [draft V] int32: target token of each; None: they are the same


def medusa_specs(config: MedusaConfig) -> MedusaParams:
    """The tree of `MedusaParams` with a `LeafSpec` in place of each array."""
    spec: Any = LeafSpec
    n, D, V = config.num_heads, config.hidden_size, config.draft_vocab_size
    return MedusaParams(
        blocks=(spec((D, D), (None, None)),) * n,
        biases=(spec((D,), (None,)),) * n,
        lm_heads=(spec((V, D), ("vocab", None)),) * n,
        token_ids=spec((V,), (None,)) if config.vocab_size != V else None,
    )


@dataclasses.dataclass(frozen=True)
class ExitsConfig:
    """Static shape of trained exits: each a norm and a residual block, one lm_head for all."""

    family: ClassVar[Literal["exits"]] = "exits"

    layers: tuple[int, ...]
    """Layers of the target before each exit, ascending."""
    hidden_size: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int

    def __post_init__(self) -> None:
        if not self.layers or sorted({0, *self.layers}) != [0, *self.layers]:
            raise ValueError(f"{self.layers=}: give numbers of layers from 1 on, ascending")

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The residual streams that the exits read: what is behind i layers is entry i."""
        return self.layers


class ExitsParams(flax.struct.PyTreeNode):
    """Parameters of the exits, an entry an exit; `jspec.exits.exit_of` picks one."""

    norms: tuple[Array, ...]  # [D]
    blocks: tuple[Array, ...]  # [D, D]
    biases: tuple[Array, ...]  # [D]
    lm_head: Array  # [draft V, D]; rows of the target's
    token_ids: Array | None = None  # [draft V] int32: target token of each; None: they are the same


def exits_specs(config: ExitsConfig) -> ExitsParams:
    """The tree of `ExitsParams` with a `LeafSpec` in place of each array."""
    spec: Any = LeafSpec
    n, D, V = len(config.layers), config.hidden_size, config.draft_vocab_size
    return ExitsParams(
        norms=(spec((D,), (None,)),) * n,
        blocks=(spec((D, D), (None, None)),) * n,
        biases=(spec((D,), (None,)),) * n,
        lm_head=spec((V, D), ("vocab", None)),
        token_ids=spec((V,), (None,)) if config.vocab_size != V else None,
    )


AnyConfig = HeadConfig | MedusaConfig | ExitsConfig
"""Whatever its family, it has `family`, `taps`, `vocab_size`, `draft_vocab_size` and
`target_hidden_size`."""
AnyParams = HeadParams | MedusaParams | ExitsParams


def specs_of(config: AnyConfig) -> AnyParams:
    """The tree of the config's parameters with a `LeafSpec` in place of each array."""
    if isinstance(config, HeadConfig):
        return head_specs(config)
    return medusa_specs(config) if isinstance(config, MedusaConfig) else exits_specs(config)
