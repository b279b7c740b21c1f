"""Computes decoder layers with torch and transformers, as an implementation not our own.

    python tests/golden/make_layer_goldens.py

Made with Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0, numpy 2.4.6. The tests only read
`layers.json` (config and parameters by their names in published files, less the prefix) and
`layers.npz` (a layer's input and output over one text); see `load.py`. Weights come from
`weights.py`. transformers keeps experts stacked, gate and up in one array; published files have a
tensor for each matrix of each expert.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from weights import golden_weights

FOLDER = Path(__file__).parent
NUM_TOKENS = 24
SMALLEST_GAP = 1e-4
"""Between an expert that is chosen and any other: closer, and rounding might choose."""

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
DEEPSEEK = (
    BASE
    | {
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    }
    | EXPERTS
)
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.6,
}
GLM = (
    BASE
    | {
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 0,
    }
    | EXPERTS
)
QWEN = (
    BASE
    | {
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "shared_expert_intermediate_size": 20,
        "layer_types": ["full_attention"],
    }
    | EXPERTS
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """How to build one layer."""

    kind: str
    """As transformers calls it."""
    settings: dict[str, Any]
    rope: dict[str, Any]


LAYERS = {
    "deepseek_v3": Layer("DeepseekV3", DEEPSEEK, YARN),
    "deepseek_v3_dense": Layer(
        "DeepseekV3",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 1},
        PLAIN,
    ),
    "glm4_moe": Layer("Glm4Moe", GLM, PLAIN | {"partial_rotary_factor": 0.5}),
    "qwen3_next": Layer("Qwen3Next", QWEN, PLAIN | {"partial_rotary_factor": 0.25}),
    "qwen3_next_unnormed": Layer(
        "Qwen3Next", QWEN | {"norm_topk_prob": False}, PLAIN | {"partial_rotary_factor": 0.25}
    ),
}


def main() -> None:
    """Writes the two files next to this one."""
    described, arrays = {}, {}
    for name, layer in LAYERS.items():
        config = getattr(transformers, f"{layer.kind}Config")(
            **layer.settings, rope_parameters=layer.rope, attn_implementation="eager"
        )
        module = importlib.import_module(
            f"transformers.models.{config.model_type}.modeling_{config.model_type}"
        )
        decoder = getattr(module, f"{layer.kind}DecoderLayer")(config, 0).float().eval()
        rotary = getattr(module, f"{layer.kind}RotaryEmbedding")(config)
        shapes = published_shapes(decoder)
        weights = golden_weights(shapes)
        decoder.load_state_dict(as_in_transformers(weights, decoder), strict=True)
        hidden = np.random.default_rng(5).standard_normal((NUM_TOKENS, 32)).astype(np.float32)
        arrays[f"{name}.input"] = hidden
        with torch.inference_mode():
            arrays[f"{name}.output"] = output_of(decoder, rotary, torch.from_numpy(hidden)[None])
        stored = layer.settings | {"rope_parameters": layer.rope, "model_type": config.model_type}
        described[name] = {"config": stored, "parameters": shapes}
        print(f"{name}: {len(shapes)} parameters, output {arrays[f'{name}.output'].std():.2f}")
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in described.items())
    (FOLDER / "layers.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    np.savez_compressed(FOLDER / "layers.npz", **arrays)


def published_shapes(decoder: Any) -> list[tuple[str, list[int]]]:
    """Names and shapes as in published files, sorted; biases that choose experts included."""
    found = []
    for name, tensor in decoder.state_dict().items():
        shape = list(tensor.shape)
        if not (stacked := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
            found.append((name, shape))
            continue
        for expert in range(shape[0]):
            for part in ("gate", "up") if stacked[2] == "gate_up" else ("down",):
                rows = shape[1] // 2 if part != "down" else shape[1]
                found.append((f"{stacked[1]}.{expert}.{part}_proj.weight", [rows, shape[2]]))
    return sorted(found)


def as_in_transformers(weights: dict[str, np.ndarray], decoder: Any) -> dict[str, torch.Tensor]:
    """The state of `decoder` that has these weights."""

    def stacked(prefix: str, *parts: str) -> np.ndarray:
        each = []
        while (name := f"{prefix}.{len(each)}.{{}}_proj.weight").format("down") in weights:
            each.append(np.concatenate([weights[name.format(part)] for part in parts]))
        return np.stack(each)

    def of(name: str) -> np.ndarray:
        if name.endswith(".experts.gate_up_proj"):
            return stacked(name.removesuffix(".gate_up_proj"), "gate", "up")
        if name.endswith(".experts.down_proj"):
            return stacked(name.removesuffix(".down_proj"), "down")
        return weights[name]

    return {name: torch.from_numpy(of(name)) for name in decoder.state_dict()}


def output_of(decoder: Any, rotary: Any, hidden: torch.Tensor) -> np.ndarray:
    """Float32 `[T, D]`, each token seeing those before it."""
    positions = torch.arange(NUM_TOKENS)[None]
    mask = torch.full((NUM_TOKENS, NUM_TOKENS), float("-inf")).triu(1)[None, None]
    watch_choice(decoder)
    out = decoder(
        hidden,
        position_embeddings=rotary(hidden, positions),
        attention_mask=mask,
        position_ids=positions,
    )
    return out[0].numpy()


def watch_choice(decoder: Any) -> None:
    """Makes `decoder` raise ValueError where rounding could choose an expert."""
    router = getattr(decoder.mlp, "gate", None)
    if router is None:
        return

    def check(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, chosen = output
        bias = getattr(router, "e_score_correction_bias", None)
        scores = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
        taken = scores.gather(1, chosen)
        gaps = (taken[:, :, None] - scores[:, None, :]).abs()
        smallest = gaps[gaps > 0].min()
        if smallest < SMALLEST_GAP:
            raise ValueError(f"{smallest=}: a near tie among experts; choose another input")

    router.register_forward_hook(check)


if __name__ == "__main__":
    main()
