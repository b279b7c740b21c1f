"""Tiny models on disk, written with the formats' own libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "Ġ")]


def hf_config(**changes: Any) -> dict[str, Any]:
    """A Llama of two layers whose every axis has its own size."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 272,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


def hf_tensors(config: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, Any]:
    """Random weights under their Hugging Face names."""
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    arch = config["architectures"][0]
    bias, mlp_bias = config.get("attention_bias"), config.get("mlp_bias")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        sizes = {"q": (q, D), "k": (kv, D), "v": (kv, D), "o": (D, q)}
        for name, shape in sizes.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
            if bias or (arch == "Qwen2ForCausalLM" and name != "o"):
                shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
        for name, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
            shapes[f"{layer}mlp.{name}_proj.weight"] = shape
            if mlp_bias:
                shapes[f"{layer}mlp.{name}_proj.bias"] = shape[:1]
        if arch == "Qwen3ForCausalLM":
            for name in ("q", "k"):
                shapes[f"{layer}self_attn.{name}_norm.weight"] = (config["head_dim"],)
        shapes[f"{layer}input_layernorm.weight"] = (D,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (D,)
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s, np.float32).astype(dtype) for n, s in shapes.items()}


def vocabulary() -> list[str]:
    """Special tokens, the 256 bytes as byte-level BPE spells them, results of the merges."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL + alphabet + [a + b for a, b in MERGES]


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a small SmolLM-like tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(vocabulary())}
    backend = Tokenizer(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_hf(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A folder in the Hugging Face layout; with several shards, an index."""
    from safetensors.numpy import save_file

    config = config or hf_config()
    tensors = hf_tensors(config) if tensors is None else tensors
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: a for t, a in tensors.items() if weight_map[t] == name}, folder / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k (`LlamaModel.permute` of its converter)."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Any],
    arch: str = "llama",
    quantise: str | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The same model as a GGUF file; `metadata` adds keys, or leaves out those that are None."""
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    for key, value in (gguf_metadata(config, arch) | (metadata or {})).items():
        add_value(writer, key, value)
    for name, array in tensors.items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        kind = name.split("self_attn.")[-1].split("_proj")[0]
        if arch == "llama" and "_proj" in name and kind in heads:
            array = permute(array, heads[kind])
        if quantise and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quantise]
            data = gguf.quants.quantize(array.astype(np.float32), kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
        else:
            # llama.cpp keeps norms in float32; the writer knows no bfloat16.
            keep = array if array.dtype == np.float16 else array.astype(np.float32)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(keep))
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_value(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name(hf: str) -> str:
    """Written out again, so that a slip in the table under test shows."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if hf in top:
        return top[hf]
    _, _, index, module, *rest = hf.split(".")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    part, suffix = (module, rest[0]) if len(rest) == 1 else (rest[0], rest[1])
    return f"blk.{index}.{parts[part]}.{suffix}"
