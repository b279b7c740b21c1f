"""Hugging Face `config.json` -> ModelConfig. Knows nothing of weights.

Refuses what `jspec` would compute wrongly: another architecture, sliding windows, unknown rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn")
_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_DEFAULT_CONTEXT = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
    "Qwen3ForCausalLM": 32768,
}
_DEFAULT_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
"""What transformers takes where the config is silent; Llama: as many as query heads."""


def model_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, name: str
) -> ModelConfig:
    """The settings in a `config.json` (and `generation_config.json`); `name` is for messages.

    The end tokens of `generation` win, as in transformers' `generate`. JspecError, which names
    what is missing or unsupported, for a model that `jspec` cannot run.
    """
    try:
        return _model_config(data, generation or {}, name)
    except KeyError as error:
        raise JspecError(f"{name}: invalid model settings: {error} is missing") from error
    except JspecError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise JspecError(f"{name}: invalid model settings: {error}") from error


def _model_config(data: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> ModelConfig:
    arch = _architecture(data, name)
    context = int(data.get("max_position_embeddings", _DEFAULT_CONTEXT[arch]))
    _refuse_unsupported(data, arch, context, name)
    heads = int(data["num_attention_heads"])
    theta, scaling = _rope(data, context, name)
    # Qwen2 always has biases on q, k and v and never on o; the others say so in the config.
    bias = bool(data.get("attention_bias", False)) and arch != "MistralForCausalLM"
    qwen2 = arch == "Qwen2ForCausalLM"
    return ModelConfig(
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_hidden_layers=int(data["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=_key_value_heads(data, arch, heads),
        head_dim=_head_dim(data, arch, heads),
        max_position_embeddings=context,
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or bias,
        out_bias=bias and not qwen2,
        mlp_bias=bool(data.get("mlp_bias", False)) and arch == "LlamaForCausalLM",
        qk_norm=arch == "Qwen3ForCausalLM",
        bos_token_id=_first(_preferred("bos_token_id", generation, data)),
        eos_token_ids=_end_tokens(_preferred("eos_token_id", generation, data)),
    )


def _architecture(data: Mapping[str, Any], name: str) -> str:
    names = data.get("architectures") or [data.get("model_type", "unknown")]
    if names[0] not in ARCHITECTURES:
        raise JspecError(
            f"{name}: architecture {names[0]} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return names[0]


def _refuse_unsupported(data: Mapping[str, Any], arch: str, context: int, name: str) -> None:
    window = data.get("sliding_window", 4096 if arch == "MistralForCausalLM" else None)
    if arch == "MistralForCausalLM" and window is not None and window < context:
        raise JspecError(
            f"{name}: sliding_window {window} is below max_position_embeddings {context}; "
            "sliding window attention is not supported"
        )
    sliding = "sliding_attention" in (data.get("layer_types") or ())
    if arch.startswith("Qwen") and (data.get("use_sliding_window") or sliding):
        raise JspecError(f"{name}: use_sliding_window is true, which is not supported")
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise JspecError(f"{name}: hidden_act {activation!r} is not supported; only silu is")
    if data.get("quantization_config"):
        raise JspecError(
            f"{name}: quantised checkpoints (quantization_config) are not supported; "
            "use the unquantised model or a GGUF file"
        )
    partial = rope_data(data).get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise JspecError(f"{name}: partial_rotary_factor {partial} is not supported")


def _key_value_heads(data: Mapping[str, Any], arch: str, heads: int) -> int:
    value = data.get("num_key_value_heads", _DEFAULT_KV_HEADS.get(arch))
    return heads if value is None else int(value)


def _head_dim(data: Mapping[str, Any], arch: str, heads: int) -> int:
    default = 128 if arch == "Qwen3ForCausalLM" else int(data["hidden_size"]) // heads
    return int(data.get("head_dim") or default)


def rope_data(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5), `rope_scaling` (before)."""
    return data.get("rope_parameters") or data.get("rope_scaling") or {}


def _rope(data: Mapping[str, Any], context: int, name: str) -> tuple[float, RopeScaling | None]:
    rope = rope_data(data)
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in _ROPE_KINDS:
        raise JspecError(
            f"{name}: rope type {kind!r} is not supported; "
            f"supported: default, {', '.join(_ROPE_KINDS)}"
        )
    numbers = {key: float(rope[key]) for key in _ROPE_NUMBERS if rope.get(key) is not None}
    original = _original_context(data, rope, context, kind)
    # Only yarn may leave the factor out; it is then how much longer the context has become.
    factor = rope.get("factor") or context / original if kind == "yarn" else rope["factor"]
    return theta, RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_position_embeddings=original,
        truncate=bool(rope.get("truncate", True)),
        **numbers,
    )


def _original_context(
    data: Mapping[str, Any], rope: Mapping[str, Any], context: int, kind: str
) -> int:
    # transformers: dynamic scaling goes by the config's context, and a value beside
    # `rope_scaling` goes before one inside it.
    if kind == "dynamic":
        return context
    key = "original_max_position_embeddings"
    return int(data.get(key) or rope.get(key) or context)


def _preferred(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Any:
    return second.get(key) if first.get(key) is None else first[key]


def _first(value: Any) -> int | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _end_tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
