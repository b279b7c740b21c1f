"""Decoder layers of other kinds than Llama's in a Hugging Face config.json, to and from.

Which kind a layer is its tensors tell; how large its parts are, and how experts are chosen, the
config. Keys are those of DeepSeek-V3, GLM-4-MoE and Qwen3-Next. Knows nothing of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from checkpoints.hf_config import rope_data
from jspec.config import ExpertsConfig, LatentConfig, ModelConfig
from jspec.errors import JspecError

ZERO_CENTRED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose norms multiply by one plus what is stored."""
_PARTIAL = {"glm4_moe": 0.5} | dict.fromkeys(ZERO_CENTRED, 0.25)
"""What transformers takes for `partial_rotary_factor` where the config is silent; others: 1."""


def kinds_of(data: Mapping[str, Any], fields: Collection[str], *, name: str) -> dict[str, Any]:
    """What of a ModelConfig only layers of other kinds have; `fields` are those of LayerParams
    that the layer's tensors belong to.

    JspecError, which begins with `name`, when a key that such a layer needs is missing."""
    factor = rope_data(data).get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if factor is None:
        factor = _PARTIAL.get(data.get("model_type", ""), 1.0)
    return {
        "partial_rotary_factor": float(factor),
        "rope_interleave": bool(data.get("rope_interleave", "latent" in fields)),
        "latent": _latent(data, name) if "latent" in fields else None,
        "experts": _experts(data, name) if "experts" in fields else None,
    }


def as_llamas(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """`data` as a Llama's with layers of these sizes: what `kinds_of` has read is left out."""
    plain = {**data, "partial_rotary_factor": 1.0}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(data.get(key), dict):
            plain[key] = {**data[key], "partial_rotary_factor": 1.0}
    if kinds["latent"] is not None:
        heads = data["num_attention_heads"]
        plain |= {"head_dim": kinds["latent"].head_dim, "num_key_value_heads": heads}
    if kinds["experts"] is not None:
        plain.setdefault("intermediate_size", kinds["experts"].moe_intermediate_size)
    return plain


def _latent(data: Mapping[str, Any], name: str) -> LatentConfig:
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {key: _number(data, key, name) for key in keys}
    rank = data.get("q_lora_rank")
    return LatentConfig(**sizes, q_lora_rank=None if rank is None else int(rank))


def _experts(data: Mapping[str, Any], name: str) -> ExpertsConfig:
    """DeepSeek's keys or Qwen's, who differ in how they score and in the shared expert's gate."""
    width, deepseek = _number(data, "moe_intermediate_size", name), "n_routed_experts" in data
    method = data.get("topk_method") or "noaux_tc"
    if method != "noaux_tc":
        raise JspecError(f"{name}: topk_method {method!r} is not supported; only 'noaux_tc' is")
    shared = int(data.get("shared_expert_intermediate_size") or 0)
    return ExpertsConfig(
        num_experts=_number(data, "n_routed_experts" if deepseek else "num_experts", name),
        num_experts_per_tok=_number(data, "num_experts_per_tok", name),
        moe_intermediate_size=width,
        shared_expert_intermediate_size=shared or int(data.get("n_shared_experts") or 0) * width,
        shared_expert_gate=shared > 0,
        scoring_func=data.get("scoring_func") or ("sigmoid" if deepseek else "softmax"),
        n_group=int(data.get("n_group") or 1),
        topk_group=int(data.get("topk_group") or 1),
        norm_topk_prob=bool(data.get("norm_topk_prob", True)),
        routed_scaling_factor=float(data.get("routed_scaling_factor") or 1.0),
    )


def _number(data: Mapping[str, Any], key: str, name: str) -> int:
    if data.get(key) is None:
        kind = "latent attention" if key.endswith(("_dim", "_rank")) else "experts"
        raise JspecError(f"{name}: lacks {key!r}, but the tensors are those of {kind}")
    return int(data[key])


def kinds_to_json(config: ModelConfig) -> dict[str, Any]:
    """The keys of which `kinds_of` makes the same again."""
    found: dict[str, Any] = {
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_interleave": config.rope_interleave,
    }
    if config.gated_attention:
        found["attn_output_gate"] = True
    if config.latent is not None:
        found |= dataclasses.asdict(config.latent)
    if config.experts is not None:
        found |= _experts_to_json(config.experts)
    return found


def _experts_to_json(experts: ExpertsConfig) -> dict[str, Any]:
    found = dataclasses.asdict(experts)
    if experts.scoring_func == "sigmoid":
        found |= {"n_routed_experts": found.pop("num_experts"), "topk_method": "noaux_tc"}
    if not found.pop("shared_expert_gate"):
        shared = found.pop("shared_expert_intermediate_size")
        found["n_shared_experts"] = shared // experts.moe_intermediate_size
    return found
