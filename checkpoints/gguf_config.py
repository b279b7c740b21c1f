"""GGUF metadata -> ModelConfig. Knows nothing of tensor data but the rope factors handed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def model_config(
    data: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
    *,
    name: str,
) -> ModelConfig:
    """The settings in `data` (metadata) and in which tensors there are (`shapes`, by name).

    `rope_factors` are those of `rope_freqs.weight`, if the file has it; `name` is for messages.
    """
    arch = data.get("general.architecture", "unknown")
    if arch not in ARCHITECTURES:
        raise JspecError(
            f"{name}: GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        return _model_config(data, arch, shapes, rope_factors, name)
    except KeyError as error:
        raise JspecError(f"{name}: invalid model settings: {error} is missing") from error
    except JspecError:
        raise
    except (TypeError, ValueError) as error:
        raise JspecError(f"{name}: invalid model settings: {error}") from error


def _model_config(
    data: Mapping[str, Any],
    arch: str,
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
    name: str,
) -> ModelConfig:
    if data.get(f"{arch}.expert_count"):
        raise JspecError(f"{name}: mixtures of experts are not supported")
    hidden, heads = data[f"{arch}.embedding_length"], data[f"{arch}.attention.head_count"]
    context = int(data[f"{arch}.context_length"])
    if data.get(f"{arch}.attention.sliding_window", context) < context:
        raise JspecError(f"{name}: sliding window attention is not supported")
    head_dim = data.get(f"{arch}.attention.key_length", hidden // heads)
    theta = float(data.get(f"{arch}.rope.freq_base", 10000.0))
    return ModelConfig(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=data[f"{arch}.feed_forward_length"],
        num_hidden_layers=data[f"{arch}.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=data.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=_shortest(data[f"{arch}.attention.layer_norm_rms_epsilon"]),
        rope_theta=theta,
        rope_scaling=_scaling(data, arch, theta, head_dim, context, rope_factors, name),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch == "qwen3",
        bos_token_id=data.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(data),
    )


def _shortest(value: float) -> float:
    """The number that was rounded to float32 for the file: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_tokens(data: Mapping[str, Any]) -> tuple[int, ...]:
    """End of sequence and, where the file tells it apart, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(int(data[key]) for key in keys if key in data))


def _scaling(
    data: Mapping[str, Any],
    arch: str,
    theta: float,
    head_dim: int,
    context: int,
    rope_factors: np.ndarray | None,
    name: str,
) -> RopeScaling | None:
    if rope_factors is not None:
        return _llama3(rope_factors, theta, head_dim, name)
    kind = data.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise JspecError(f"{name}: rope scaling {kind!r} is not supported; use the original model")
    return RopeScaling(
        kind=kind,
        factor=float(data[f"{arch}.rope.scaling.factor"]),
        original_max_position_embeddings=int(
            data.get(f"{arch}.rope.scaling.original_context_length", context)
        ),
    )


def _llama3(factors: np.ndarray, theta: float, head_dim: int, name: str) -> RopeScaling:
    """The Llama 3 scaling whose factors these are.

    The file has the divisor of each frequency but not what it came from. Every Llama 3 release
    has the same low, high and original context, so: try those, and refuse what they don't give.
    """
    scaling = RopeScaling(
        kind="llama3",
        factor=float(factors.max()),
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected = llama3_factors(scaling, theta, head_dim)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-4):
        raise JspecError(
            f"{name}: rope_freqs.weight is not Llama 3's frequency scaling; use the original model"
        )
    return scaling


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3 divides each of its `head_dim // 2` rotary frequencies by."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = scaling.original_max_position_embeddings / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
