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

from jspec.config import ModelConfig


class LayerParams(flax.struct.PyTreeNode):
    """One decoder layer. Optional leaves are None where the config leaves them out."""

    input_norm: Array | None  # [D]; None in some draft heads, which norm before or not at all
    q: Array  # [N, H, D]
    k: Array  # [Nkv, H, D]
    v: Array  # [Nkv, H, D]
    o: Array  # [D, N, H]
    post_norm: Array  # [D]
    gate: Array  # [F, D]
    up: Array  # [F, D]
    down: Array  # [D, F]
    q_bias: Array | None = None  # [N, H]
    k_bias: Array | None = None  # [Nkv, H]
    v_bias: Array | None = None  # [Nkv, H]
    o_bias: Array | None = None  # [D]
    gate_bias: Array | None = None  # [F]
    up_bias: Array | None = None  # [F]
    down_bias: Array | None = None  # [D]
    q_norm: Array | None = None  # [H]
    k_norm: Array | None = None  # [H]


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


def param_specs(config: ModelConfig) -> Params:
    """The tree of `Params` with a `LeafSpec` in place of each array."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, Nkv, V = config.num_attention_heads, config.num_key_value_heads, config.vocab_size

    def spec(*sizes_and_axes: tuple[int, str | None], when: bool = True) -> Any:
        if not when:
            return None
        return LeafSpec(tuple(s for s, _ in sizes_and_axes), tuple(a for _, a in sizes_and_axes))

    d, f, h = (D, None), (F, "mlp"), (H, None)
    n, nkv, v = (N, "heads"), (Nkv, "kv_heads"), (V, "vocab")
    layer = LayerParams(
        input_norm=spec(d),
        q=spec(n, h, d),
        k=spec(nkv, h, d),
        v=spec(nkv, h, d),
        o=spec(d, n, h),
        post_norm=spec(d),
        gate=spec(f, d),
        up=spec(f, d),
        down=spec(d, f),
        q_bias=spec(n, h, when=config.qkv_bias),
        k_bias=spec(nkv, h, when=config.qkv_bias),
        v_bias=spec(nkv, h, when=config.qkv_bias),
        o_bias=spec(d, when=config.out_bias),
        gate_bias=spec(f, when=config.mlp_bias),
        up_bias=spec(f, when=config.mlp_bias),
        down_bias=spec(d, when=config.mlp_bias),
        q_norm=spec(h, when=config.qk_norm),
        k_norm=spec(h, when=config.qk_norm),
    )
    return Params(
        embed=spec(v, d),
        layers=(layer,) * config.num_hidden_layers,
        final_norm=spec(d),
        lm_head=spec(v, d, when=not config.tie_word_embeddings),
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
        return (1.0 + noise if name.endswith("norm") else noise).astype(dtype)

    return treedef.unflatten([draw(*args) for args in zip(names, leaves, keys, strict=True)])
