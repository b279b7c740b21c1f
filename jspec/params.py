"""The parameter tree of the Llama family: its leaves, shapes and logical axes.

Weights keep the Hugging Face orientation, `[out, in]`, with the heads split out, so that every
leaf is a reshape of one file tensor. Knows nothing of files (see `checkpoints`) or devices (see
`sharding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.config import ExpertsConfig, LatentConfig, ModelConfig


class LatentParams(flax.struct.PyTreeNode):
    """Latent attention's own matrices (`jspec.latent`). R numbers are what keys and values come
    of, Rq those that queries come of; a head has H numbers, `nope` of which do not turn."""

    kv_a: Array  # [R + H - nope, D]: also what of the keys turns, the same in all heads
    kv_a_norm: Array  # [R]
    kv_b: Array  # [N, nope + value size, R]
    q_a: Array | None = None  # [Rq, D]; None: the layer's `q` makes the queries
    q_a_norm: Array | None = None  # [Rq]
    q_b: Array | None = None  # [N, H, Rq]


class SharedExpertParams(flax.struct.PyTreeNode):
    """The expert that every token takes."""

    gate: Array  # [F, D]
    up: Array  # [F, D]
    down: Array  # [D, F]
    switch: Array | None = None  # [1, D]: how much a token takes of it


class ExpertsParams(flax.struct.PyTreeNode):
    """A mixture of E experts (`jspec.experts`)."""

    router: Array  # [E, D]
    gate: Array  # [E, F, D]
    up: Array  # [E, F, D]
    down: Array  # [E, D, F]
    correction_bias: Array | None = None  # [E] float32
    shared: SharedExpertParams | None = None


class LayerParams(flax.struct.PyTreeNode):
    """One decoder layer. Optional leaves are None where the config leaves them out."""

    input_norm: Array | None  # [D]; None in some draft heads, which norm before or not at all
    q: Array | None  # [N, H, D]; gated: [N, 2 H, D], of each head its query and its gate
    k: Array | None  # [Nkv, H, D]
    v: Array | None  # [Nkv, H, D]
    o: Array  # [D, N, value size]: H, but for latent attention
    post_norm: Array  # [D]
    gate: Array | None  # [F, D]
    up: Array | None  # [F, D]
    down: Array | None  # [D, F]
    q_bias: Array | None = None  # [N, H]
    k_bias: Array | None = None  # [Nkv, H]
    v_bias: Array | None = None  # [Nkv, H]
    o_bias: Array | None = None  # [D]
    gate_bias: Array | None = None  # [F]
    up_bias: Array | None = None  # [F]
    down_bias: Array | None = None  # [D]
    q_norm: Array | None = None  # [H]
    k_norm: Array | None = None  # [H]
    latent: LatentParams | None = None  # in place of k and v
    experts: ExpertsParams | None = None  # in place of gate, up and down


class Params(flax.struct.PyTreeNode):
    """A whole model. `layers` is a tuple, so that a range of layers is a slice (DESIGN)."""

    embed: Array  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: Array  # [D]
    lm_head: Array | None = None  # [V, D]; None: tied to `embed`


class LeafSpec(NamedTuple):
    """Shape of a leaf and the logical name of each of its axes (rules: `sharding.RULES`)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: str | None = None
    """None: that of the model."""


def param_specs(config: ModelConfig) -> Params:
    """The tree of `Params` with a `LeafSpec` in place of each array."""
    d, v = (config.hidden_size, None), (config.vocab_size, "vocab")
    return Params(
        embed=_spec(v, d),
        layers=(_layer_specs(config),) * config.num_hidden_layers,
        final_norm=_spec(d),
        lm_head=_spec(v, d, when=not config.tie_word_embeddings),
    )


_Axis = tuple[int, str | None]


def _spec(*axes: _Axis, when: bool = True, dtype: str | None = None) -> Any:
    """The LeafSpec of axes given as (size, name); None unless `when`."""
    return LeafSpec(tuple(s for s, _ in axes), tuple(a for _, a in axes), dtype) if when else None


def _layer_specs(config: ModelConfig) -> LayerParams:
    latent, experts = config.latent, config.experts
    d, f, h = (config.hidden_size, None), (config.intermediate_size, "mlp"), (config.head_dim, None)
    n, nkv = (config.num_attention_heads, "heads"), (config.num_key_value_heads, "kv_heads")
    query = (2 * config.head_dim, None) if config.gated_attention else h
    value = h if latent is None else (latent.v_head_dim, None)
    dense = experts is None
    return LayerParams(
        input_norm=_spec(d),
        q=_spec(n, query, d, when=latent is None or latent.q_lora_rank is None),
        k=_spec(nkv, h, d, when=latent is None),
        v=_spec(nkv, h, d, when=latent is None),
        o=_spec(d, n, value),
        post_norm=_spec(d),
        gate=_spec(f, d, when=dense),
        up=_spec(f, d, when=dense),
        down=_spec(d, f, when=dense),
        q_bias=_spec(n, query, when=config.qkv_bias),
        k_bias=_spec(nkv, h, when=config.qkv_bias),
        v_bias=_spec(nkv, h, when=config.qkv_bias),
        o_bias=_spec(d, when=config.out_bias),
        gate_bias=_spec(f, when=config.mlp_bias),
        up_bias=_spec(f, when=config.mlp_bias),
        down_bias=_spec(d, when=config.mlp_bias),
        q_norm=_spec(h, when=config.qk_norm),
        k_norm=_spec(h, when=config.qk_norm),
        latent=None if latent is None else _latent_specs(latent, n, d),
        experts=None if experts is None else _experts_specs(experts, d),
    )


def _latent_specs(latent: LatentConfig, n: _Axis, d: _Axis) -> LatentParams:
    h, r = (latent.head_dim, None), (latent.kv_lora_rank, None)
    rq, narrow = (latent.q_lora_rank or 0, None), latent.q_lora_rank is not None
    return LatentParams(
        kv_a=_spec((latent.kv_lora_rank + latent.qk_rope_head_dim, None), d),
        kv_a_norm=_spec(r),
        kv_b=_spec(n, (latent.qk_nope_head_dim + latent.v_head_dim, None), r),
        q_a=_spec(rq, d, when=narrow),
        q_a_norm=_spec(rq, when=narrow),
        q_b=_spec(n, h, rq, when=narrow),
    )


def _experts_specs(experts: ExpertsConfig, d: _Axis) -> ExpertsParams:
    """Each expert is split as an MLP is, so that devices share the work whatever is chosen."""
    e, f = (experts.num_experts, "expert"), (experts.moe_intermediate_size, "mlp")
    shared, biased = experts.shared_expert_intermediate_size, experts.scoring_func == "sigmoid"
    return ExpertsParams(
        router=_spec((experts.num_experts, None), d),
        gate=_spec(e, f, d),
        up=_spec(e, f, d),
        down=_spec(e, d, f),
        correction_bias=_spec((experts.num_experts, None), when=biased, dtype="float32"),
        shared=_shared_specs((shared, "mlp"), d, experts.shared_expert_gate) if shared else None,
    )


def _shared_specs(f: _Axis, d: _Axis, switch: bool) -> SharedExpertParams:
    return SharedExpertParams(
        gate=_spec(f, d), up=_spec(f, d), down=_spec(d, f), switch=_spec((1, None), d, when=switch)
    )


def is_spec(node: object) -> bool:
    """True for a leaf of `param_specs` (a LeafSpec is itself a tuple, so say where to stop)."""
    return isinstance(node, LeafSpec)


def leaf_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields `("layers.3.q", leaf)` for each leaf, in the order of `jax.tree.leaves`."""
    for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_spec):
        yield jax.tree_util.keystr(path, simple=True, separator="."), leaf


def init_params(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """A random model (normal, standard deviation 0.02; norms near one), for tests and studies."""
    specs = param_specs(config)
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(key, len(leaves))
    names = [name for name, _ in leaf_paths(specs)]

    def draw(name: str, spec: LeafSpec, key: Array) -> Array:
        noise = 0.02 * jax.random.normal(key, spec.shape, jnp.float32)
        return (1.0 + noise if name.endswith("norm") else noise).astype(spec.dtype or dtype)

    return treedef.unflatten([draw(*args) for args in zip(names, leaves, keys, strict=True)])
