"""Draft heads: a decoder layer or more that read the target's own hidden states and the tokens
that came of them, and predict the tokens after those.

Three families, one shape. Entry s of a row stands for slot s: the head reads the target's
features at s and the token at s + 1, which they led to, and predicts the token at s + 2.

    tokens    t0 t1 t2 t3 t4          features h0..h3 are known (t4 has not been read yet)
    entry     0: (h0, t1)  1: (h1, t2)  2: (h2, t3)  3: (h3, t4) -> predicts t5, carries g3
    drafting  4: (g3, t5') -> predicts t6, with the head's own output g3 in place of h4

- EAGLE (arXiv 2401.15077; EAGLE-2, 2406.16858, only drafts differently): `fc` joins the token's
  embedding and the final hidden state; a layer without its first norm; the target's lm_head.
- MTP (DeepSeek-V3, arXiv 2412.19437, section 2.2): the same with norms before `fc`, inside the
  layer and behind it. The layer is one of its target's, with latent attention, gates or experts
  where that has them.
- EAGLE-3 (arXiv 2503.01840): `fc` fuses hidden states of three depths; the first layer's
  attention reads embedding and features side by side; a norm and an lm_head of its own.

A head drafts from a reduced vocabulary if it has one: the target's tokens that it knows, in
`token_ids`. Pure functions, for inference over a cache and for training over whole texts alike:
`attend` is an argument. Knows nothing of drafting, files or training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.head_params import HeadConfig, HeadParams, MedusaParams
from jspec.layers import linear, rms_norm
from jspec.model import project_heads, rest_of_layer
from jspec.params import LayerParams

Attend = Callable[[Any, int, Array, Array, Array], tuple[Array, Any]]
"""`(memory, layer, queries, keys, values) -> attended, memory`: `jspec.attention.attend` with a
cache as the memory, or what training puts in its place."""


def fuse(params: HeadParams, config: HeadConfig, features: tuple[Array, ...]) -> Array:
    """What entries read `[..., D]` of the target's features, each `[..., target D]`."""
    if config.family != "eagle3":
        return features[0]
    eps = config.layers.rms_norm_eps
    if config.fc_norm:
        pairs = zip(features, params.fc_norms, strict=True)
        features = tuple(rms_norm(x, scale, eps) for x, scale in pairs)
    joined = jnp.concatenate(features, axis=-1)
    if config.norm_before_fc:
        joined = rms_norm(joined, params.fc_norms[0], eps)
    return linear(joined, params.fc, params.fc_bias)


def forward(
    params: HeadParams,
    config: HeadConfig,
    tokens: Array,
    carried: Array,
    memory: Any,
    *,
    positions: Array,
    attend: Attend,
) -> tuple[Array, Any]:
    """Runs entries over `tokens` `[B, T]` (those that the features led to) and `carried`
    `[B, T, D]` (fused features, or the outputs of earlier entries).

    Args:
      memory: what `attend` needs, e.g. a cache with an open block.
      positions: `[B, T]` int32, the slots of the entries.
    Returns:
      The outputs `[B, T, D]`, for `logits` and (through `carry`) for the next draft step, and the
      memory.
    """
    eps = config.layers.rms_norm_eps
    embedded = params.embed[jnp.maximum(tokens, 0)].astype(carried.dtype)
    if config.skips_first_embedding:
        embedded = jnp.where((positions == 0)[..., None], jnp.zeros_like(embedded), embedded)
    first, *others = params.layers
    pair = jnp.concatenate(
        [rms_norm(embedded, params.embed_norm, eps), rms_norm(carried, params.feature_norm, eps)],
        axis=-1,
    )
    if config.family == "eagle3":
        read, residual = pair, carried
        if config.norm_before_residual:
            residual = pair[..., embedded.shape[-1] :]
    else:
        residual = linear(pair, params.fc, params.fc_bias)
        read = rms_norm(residual, first.input_norm, eps)
    hidden, memory = _layer(first, config, read, residual, memory, 0, positions, attend)
    for i, layer in enumerate(others, 1):
        read = rms_norm(hidden, layer.input_norm, eps)
        hidden, memory = _layer(layer, config, read, hidden, memory, i, positions, attend)
    return hidden, memory


def carry(params: HeadParams, config: HeadConfig, hidden: Array) -> Array:
    """What a draft step hands to the next `[..., D]`, of its output."""
    if not config.feeds_normed:
        return hidden
    return rms_norm(hidden, params.final_norm, config.layers.rms_norm_eps)


def logits(params: HeadParams, config: HeadConfig, hidden: Array) -> Array:
    """`[..., draft V]` float32 of outputs `[..., D]`."""
    final = rms_norm(hidden, params.final_norm, config.layers.rms_norm_eps)
    return jnp.einsum("...D,VD->...V", final, params.lm_head, preferred_element_type=jnp.float32)


def _layer(
    params: LayerParams,
    config: HeadConfig,
    read: Array,
    residual: Array,
    memory: Any,
    index: int,
    positions: Array,
    attend: Attend,
) -> tuple[Array, Any]:
    """A decoder layer whose attention reads `read` and whose residual stream is `residual`."""
    heads = project_heads(params, config.layers, read, positions)
    attended, memory = attend(memory, index, heads.queries, heads.keys, heads.values)
    return rest_of_layer(params, config.layers, residual, attended, heads.gates), memory


def in_target_vocabulary(draft_logits: Array, token_ids: Array | None, vocab_size: int) -> Array:
    """Logits `[..., V]` of the target's tokens: -inf for those that the head does not know."""
    if token_ids is None:
        return draft_logits
    nothing = jnp.full((*draft_logits.shape[:-1], vocab_size), -jnp.inf, jnp.float32)
    return nothing.at[..., token_ids].set(draft_logits, unique_indices=True)


def medusa_logits(params: MedusaParams, hidden: Array) -> Array:
    """`[M, ..., draft V]` float32 of the M heads, from final hidden states `[..., D]`: head i
    predicts the token i + 2 places on."""
    spoken = (medusa_output(params, hidden, i) for i in range(len(params.blocks)))
    out = [
        jnp.einsum("...D,VD->...V", output, lm_head, preferred_element_type=jnp.float32)
        for output, lm_head in zip(spoken, params.lm_heads, strict=True)
    ]
    return jnp.stack(out)


def medusa_output(params: MedusaParams, hidden: Array, number: int) -> Array:
    """What head `number` hands to its lm_head, `[..., D]`."""
    return residual_block(hidden, params.blocks[number], params.biases[number])


def residual_block(x: Array, weight: Array, bias: Array | None) -> Array:
    """`x + SiLU(W x + b)` (Medusa, arXiv 2401.10774, section 2.1.1)."""
    inner = linear(x, weight, bias).astype(jnp.float32)
    return x + (inner * jax.nn.sigmoid(inner)).astype(x.dtype)
