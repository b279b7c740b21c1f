"""Small draft heads on disk in the layouts of their trainers, and the target they are for.

Names and shapes are written out again, so that a slip in the tables under test shows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from torch_files import write_arrays

from checkpoints import LoadedHead, load_head
from jspec.config import ModelConfig
from jspec.params import Params, init_params, leaf_paths

V, D, L = 40, 24, 8
F, N, NKV, H = 20, 4, 2, 8
"""Of the heads; N * H is not D."""
TARGET = ModelConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=32,
    num_hidden_layers=L,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
)
IDS = np.array([0, 2, 3, 7, 11, 12, 13, 30, 38])
"""A reduced draft vocabulary."""
OFFSETS = np.array([0, 1, 1, 4, 7, 7, 7, 23, 30])


@functools.cache
def target_params(dtype: str = "float32", tied: bool = False) -> Params:
    """A random target with small layers that are not used."""
    config = ModelConfig(V, D, 4, 1, 1, 1, 4, 16, tie_word_embeddings=tied)
    params = init_params(config, jax.random.key(3))
    return jax.tree.map(lambda x: (x * 20).astype(dtype), params)


def numbers(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors of these shapes, norms near one, of a size that keeps activations near it."""
    rng = np.random.default_rng(len(shapes))

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, np.float32)
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        return (noise * scale + ("norm" in name)).astype(dtype)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def layer(prefix: str, width: int = D, reads: int = D) -> dict[str, tuple[int, ...]]:
    """A dense layer without its first norm; attention reads `reads` numbers."""
    return {
        f"{prefix}self_attn.q_proj.weight": (N * H, reads),
        f"{prefix}self_attn.k_proj.weight": (NKV * H, reads),
        f"{prefix}self_attn.v_proj.weight": (NKV * H, reads),
        f"{prefix}self_attn.o_proj.weight": (width, N * H),
        f"{prefix}mlp.gate_proj.weight": (F, width),
        f"{prefix}mlp.up_proj.weight": (F, width),
        f"{prefix}mlp.down_proj.weight": (width, F),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }


def settings(**changes: Any) -> dict[str, Any]:
    """A config.json as EAGLE's trainers copy it from the target's; None leaves a key out."""
    found = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": NKV,
        "head_dim": H,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **changes,
    }
    return {key: value for key, value in found.items() if value is not None}


def eagle(layers: int = 1, bias: bool = True) -> dict[str, np.ndarray]:
    """EAGLE-1's names. The embedding is left out; files have a copy of the target's."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D)}
    if bias:
        shapes["fc.bias"] = (D,)
    for i in range(layers):
        shapes |= layer(f"layers.{i}.")
        if i:
            shapes[f"layers.{i}.input_layernorm.weight"] = (D,)
    return numbers(shapes)


def eagle3(
    layers: int = 1, *, width: int = D, reduced: bool = True, taps: int = 3
) -> dict[str, np.ndarray]:
    """EAGLE-3's names; `width` is the head's own."""
    shapes = {
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        **layer("midlayer.", width, 2 * width),
        "fc.weight": (width, taps * D),
        "norm.weight": (width,),
        "lm_head.weight": (len(IDS) if reduced else V, width),
    }
    for i in range(1, layers):
        shapes |= layer(f"layers.{i}.", width)
        shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
    return numbers(shapes) | (vocabulary() if reduced else {})


def vocabulary() -> dict[str, np.ndarray]:
    """d2t and t2d of `IDS`."""
    return {"d2t": OFFSETS.copy(), "t2d": np.isin(np.arange(V), IDS)}


def qwen_mtp() -> dict[str, np.ndarray]:
    """Qwen3-Next's names, of a dense layer."""
    return numbers(
        {
            "mtp.fc.weight": (D, 2 * D),
            "mtp.pre_fc_norm_embedding.weight": (D,),
            "mtp.pre_fc_norm_hidden.weight": (D,),
            "mtp.norm.weight": (D,),
            "mtp.layers.0.input_layernorm.weight": (D,),
            **layer("mtp.layers.0."),
        }
    )


def speculators_mtp() -> dict[str, np.ndarray]:
    """The numbers of `qwen_mtp` under speculators' names."""
    return in_speculators_names(qwen_mtp())


def in_speculators_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {
        "mtp.fc.": "mtp_layers.0.input_proj.",
        "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
        "mtp.norm.": "mtp_layers.0.final_layernorm.",
        "mtp.layers.0.": "mtp_layers.0.",
    }
    return {
        next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)): x
        for name, x in tensors.items()
    }


def nextn(number: int = L) -> dict[str, np.ndarray]:
    """DeepSeek-V3's names, of a dense layer; embedding and output head are left out."""
    prefix = f"model.layers.{number}."
    return numbers(
        {
            f"{prefix}enorm.weight": (D,),
            f"{prefix}hnorm.weight": (D,),
            f"{prefix}eh_proj.weight": (D, 2 * D),
            f"{prefix}shared_head.norm.weight": (D,),
            f"{prefix}input_layernorm.weight": (D,),
            **layer(prefix),
        }
    )


LATENT = {
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
"""Keys of config.json: heads of 10 numbers."""
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True}
DEEPSEEK = settings(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    head_dim=None,
    num_key_value_heads=N,
    rope_theta=50.0,
    n_routed_experts=4,
    n_shared_experts=2,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    **LATENT,
    **ROUTED,
)
QWEN_NEXT = settings(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    partial_rotary_factor=0.5,
    num_experts=3,
    shared_expert_intermediate_size=7,
    **ROUTED,
)


def latent(prefix: str, narrow_queries: bool = True) -> dict[str, tuple[int, ...]]:
    """DeepSeek's attention."""
    queries: dict[str, tuple[int, ...]] = {f"{prefix}q_proj.weight": (N * 10, D)}
    if narrow_queries:
        queries = {
            f"{prefix}q_a_proj.weight": (10, D),
            f"{prefix}q_a_layernorm.weight": (10,),
            f"{prefix}q_b_proj.weight": (N * 10, 10),
        }
    return queries | {
        f"{prefix}kv_a_proj_with_mqa.weight": (12 + 4, D),
        f"{prefix}kv_a_layernorm.weight": (12,),
        f"{prefix}kv_b_proj.weight": (N * (6 + 5), 12),
        f"{prefix}o_proj.weight": (D, N * 5),
    }


def gated(prefix: str) -> dict[str, tuple[int, ...]]:
    """Qwen3-Next's attention."""
    return {
        f"{prefix}q_proj.weight": (N * 2 * H, D),
        f"{prefix}k_proj.weight": (NKV * H, D),
        f"{prefix}v_proj.weight": (NKV * H, D),
        f"{prefix}o_proj.weight": (D, N * H),
        f"{prefix}q_norm.weight": (H,),
        f"{prefix}k_norm.weight": (H,),
    }


def experts(prefix: str, number: int, shared: str, width: int) -> dict[str, tuple[int, ...]]:
    """A mixture whose shared expert is called `shared` and is so wide."""
    sizes = {f"experts.{i}": 6 for i in range(number)} | {shared: width}
    found: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (number, D)}
    for name, size in sizes.items():
        found |= {
            f"{prefix}{name}.gate_proj.weight": (size, D),
            f"{prefix}{name}.up_proj.weight": (size, D),
            f"{prefix}{name}.down_proj.weight": (D, size),
        }
    return found


def deepseek(number: int = L, *, narrow_queries: bool = True) -> dict[str, np.ndarray]:
    """`nextn` with DeepSeek's attention and experts; of the latter's keys, `DEEPSEEK`."""
    prefix = f"model.layers.{number}."
    shapes = {name: x.shape for name, x in nextn(number).items() if ".self_attn." not in name}
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    return numbers(
        shapes
        | latent(f"{prefix}self_attn.", narrow_queries)
        | experts(f"{prefix}mlp.", 4, "shared_experts", 12)
        | {f"{prefix}mlp.gate.e_score_correction_bias": (4,)}
    )


def glm(number: int = L) -> dict[str, np.ndarray]:
    """`nextn` with experts and ordinary attention."""
    prefix = f"model.layers.{number}."
    shapes = {name: x.shape for name, x in nextn(number).items() if ".mlp." not in name}
    return numbers(
        shapes
        | experts(f"{prefix}mlp.", 4, "shared_experts", 12)
        | {f"{prefix}mlp.gate.e_score_correction_bias": (4,)}
    )


def qwen_next() -> dict[str, np.ndarray]:
    """`qwen_mtp` with gated attention and experts, of `QWEN_NEXT`."""
    shapes = {name: x.shape for name, x in qwen_mtp().items() if ".self_attn." not in name}
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    return numbers(
        shapes
        | gated("mtp.layers.0.self_attn.")
        | experts("mtp.layers.0.mlp.", 3, "shared_expert", 7)
        | {"mtp.layers.0.mlp.shared_expert_gate.weight": (1, D)}
    )


def medusa(heads: int = 3, rows: int = V) -> dict[str, np.ndarray]:
    """Medusa's own names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        shapes |= {f"{i}.0.linear.weight": (D, D), f"{i}.0.linear.bias": (D,)}
        shapes[f"{i}.1.weight"] = (rows, D)
    return numbers(shapes)


def renamed(tensors: dict[str, np.ndarray], rename: Callable[[str], str]) -> dict[str, np.ndarray]:
    """The same numbers under other names."""
    return {rename(name): array for name, array in tensors.items()}


def write_head(
    folder: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any] | None = None,
    file: str = "model.safetensors",
) -> Path:
    """A folder with these tensors, and with these settings unless they are None."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        write_arrays(folder / file, tensors)
    return folder


def save_float8(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """The library writes no 8-bit floats from numpy: they are written as bytes, and renamed."""
    from safetensors.numpy import save

    float8 = {n for n, x in tensors.items() if x.dtype == ml_dtypes.float8_e4m3fn}
    data = save({n: x.view(np.uint8) if n in float8 else x for n, x in tensors.items()})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in float8:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    size = len(text).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + text + data[8 + length :])


def load(path: Path, *, target: ModelConfig = TARGET, params: Any = None, **options: Any) -> Any:
    """The head for the test's target, in float32 unless told otherwise."""
    params = target_params() if params is None else params
    return load_head(
        path, target_config=target, target_params=params, **{"dtype": "float32"} | options
    )


def leaves_of(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in leaf_paths(params)}


def assert_same(one: LoadedHead, other: LoadedHead) -> None:
    assert one.config == other.config
    mine, theirs = leaves_of(one.params), leaves_of(other.params)
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        assert array.dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
