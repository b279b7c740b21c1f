"""MTP and Medusa heads in the layouts of others: alone and within whole models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import head_files as files
import ml_dtypes
import numpy as np
import pytest
from head_files import (
    IDS,
    D,
    L,
    V,
    assert_same,
    leaves_of,
    load,
    renamed,
    save_float8,
    settings,
    target_params,
    write_head,
)

from checkpoints import is_head
from jspec.head_params import MedusaConfig

EMBEDDING = np.asarray(target_params().embed)


# MTP


def test_qwen_mtp_in_both_spellings(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "qwen", files.qwen_mtp(), settings())
    assert is_head(folder)
    qwen = load(folder)
    assert (qwen.config.family, qwen.config.feeds_normed) == ("mtp", True)
    assert not qwen.config.skips_first_embedding
    assert qwen.params.lm_head is target_params().lm_head
    data = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": settings(architectures=None),
        "num_nextn_predict_layers": 1,
    }
    other = write_head(tmp_path / "speculators", files.speculators_mtp(), data)
    assert_same(load(other), qwen)


def test_qwens_norms_are_stored_less_one(tmp_path: Path) -> None:
    plain = load(write_head(tmp_path / "plain", files.qwen_mtp(), settings())).params
    data = settings(architectures=None, model_type="qwen3_next")
    folder = write_head(tmp_path / "qwen", files.qwen_mtp(), {"text_config": data})
    for name, array in leaves_of(load(folder).params).items():
        one = 1 if "norm" in name else 0
        np.testing.assert_array_equal(array, leaves_of(plain)[name] + np.float32(one))


def write_whole_model(folder: Path, tensors: dict[str, np.ndarray], shards: int = 2) -> Path:
    """`tensors` in a last shard behind those of a model of L layers, of which none is there."""
    data = settings(num_hidden_layers=L, num_nextn_predict_layers=1, rope_theta=1e6)
    write_head(folder, tensors, data, "model-2.safetensors")
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(L)]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    index = dict.fromkeys(names, "model-1.safetensors") | dict.fromkeys(
        tensors, "model-2.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("shared", [True, False])
def test_nextn_within_a_whole_model(tmp_path: Path, shared: bool) -> None:
    """Only its own shard is read. It has copies of embedding and output head."""
    head = np.asarray(target_params().lm_head) + (0 if shared else 1)
    copies = {
        f"model.layers.{L}.embed_tokens.weight": EMBEDDING,
        f"model.layers.{L}.shared_head.head.weight": head,
    }
    folder = write_whole_model(tmp_path, files.nextn() | copies)
    assert is_head(folder)
    config, params = load(folder)
    assert (config.family, config.feeds_normed) == ("mtp", False)
    assert config.skips_first_embedding
    assert (config.layers.num_hidden_layers, config.layers.rope_theta) == (1, 1e6)
    assert params.embed is target_params().embed
    assert (params.lm_head is target_params().lm_head) == shared
    np.testing.assert_array_equal(params.lm_head, head)
    prefix = f"model.layers.{L}."
    np.testing.assert_array_equal(params.embed_norm, files.nextn()[f"{prefix}enorm.weight"])
    np.testing.assert_array_equal(params.feature_norm, files.nextn()[f"{prefix}hnorm.weight"])


def test_nextn_has_whatever_number(tmp_path: Path) -> None:
    one = load(write_head(tmp_path / "0", files.nextn(0), settings()))
    assert_same(load(write_head(tmp_path / "61", files.nextn(61), settings())), one)


def test_eight_bit_weights_in_blocks(tmp_path: Path) -> None:
    """200 rows of 24: two blocks with a factor each, the second cut off."""
    tensors = files.nextn()
    name = f"model.layers.{L}.mlp.gate_proj.weight"
    up, down = name.replace("gate", "up"), name.replace("gate", "down")
    wide = np.random.default_rng(0).standard_normal((200, D), np.float32)
    tensors |= {name: wide.astype(ml_dtypes.float8_e4m3fn), up: wide, down: wide.T.copy()}
    scale = np.array([[0.5], [4.0]], np.float32)
    data = settings(intermediate_size=200, quantization_config={"quant_method": "fp8"})
    save_float8(write_head(tmp_path, {}, data), tensors | {f"{name}_scale_inv": scale})
    gate = load(tmp_path).params.layers[0].gate
    expected = tensors[name].astype(np.float32) * np.repeat([0.5, 4.0], [128, 72])[:, None]
    np.testing.assert_array_equal(gate, expected.astype(np.float32))


# Medusa


def test_medusa(tmp_path: Path) -> None:
    """Its config says two heads, and nothing of their size."""
    tensors = files.medusa(5)
    data = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    folder = write_head(tmp_path, tensors, data, "medusa_lm_head.pt")
    assert is_head(folder)
    assert is_head(folder / "medusa_lm_head.pt")
    config, params = load(folder)
    assert config == MedusaConfig(5, D, V, V)
    np.testing.assert_array_equal(params.blocks[4], tensors["4.0.linear.weight"])
    np.testing.assert_array_equal(params.biases[4], tensors["4.0.linear.bias"])
    np.testing.assert_array_equal(params.lm_heads[4], tensors["4.1.weight"])
    (folder / "config.json").unlink()
    assert_same(load(folder / "medusa_lm_head.pt"), load(folder))


def vllm_name(name: str) -> str:
    name = re.sub(r"^(\d+)\.0\.linear\.", r"blocks.\1.layers.0.", name)
    return re.sub(r"^(\d+)\.1\.weight", r"lm_heads.\1.weight", name)


@pytest.mark.parametrize(
    "rename",
    [
        vllm_name,
        lambda name: "medusa_heads." + vllm_name(name),
        lambda name: "medusa_head." + name,
    ],
)
def test_spellings_of_medusa(tmp_path: Path, rename: Any) -> None:
    plain = load(write_head(tmp_path / "plain", files.medusa(), None, "medusa_lm_head.pt"))
    folder = write_head(tmp_path / "other", renamed(files.medusa(), rename), {})
    assert is_head(folder)
    assert_same(load(folder), plain)


@pytest.mark.parametrize("whole", [True, False])
def test_medusa_as_vllm_has_it(tmp_path: Path, whole: bool) -> None:
    """Without biases, with a map of tokens, and output heads of some or all tokens."""
    tensors = renamed(files.medusa(2, V if whole else len(IDS)), vllm_name)
    tensors = {n: x for n, x in tensors.items() if "bias" not in n} | {"token_map": IDS}
    config, params = load(write_head(tmp_path, tensors, {}))
    assert config == MedusaConfig(2, D, V, len(IDS))
    np.testing.assert_array_equal(params.token_ids, IDS)
    np.testing.assert_array_equal(params.biases, np.zeros((2, D)))
    head = tensors["lm_heads.1.weight"]
    np.testing.assert_array_equal(params.lm_heads[1], head[IDS] if whole else head)


def test_medusa_within_a_whole_model(tmp_path: Path) -> None:
    model = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING}
    heads = renamed(files.medusa(), lambda name: "medusa_head." + name)
    assert load(write_head(tmp_path, model | heads, settings())).config.num_heads == 3
