"""Hugging Face settings and safetensors files: read right, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import hf_config, write_hf
from safetensors.numpy import load_file, save_file

from checkpoints.hf_config import model_config
from checkpoints.hf_folder import open_hf_folder
from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return model_config(hf_config(**changes), generation, name="config.json")


def test_llama() -> None:
    assert read() == ModelConfig(
        vocab_size=272,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_biases_by_family() -> None:
    biased = read(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.out_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = read(architectures=["Qwen2ForCausalLM"], attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm) == (False, False, True)
    biased = read(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (biased.qkv_bias, biased.out_bias) == (True, True)
    mistral = read(architectures=["MistralForCausalLM"], sliding_window=None, attention_bias=True)
    assert not mistral.qkv_bias


def test_defaults_of_absent_keys() -> None:
    data = hf_config()
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        del data[key]
    config = model_config(data, name="config.json")
    assert config.num_key_value_heads == 4
    assert config.head_dim == 6
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    del data["eos_token_id"]
    assert model_config(data, name="config.json").eos_token_ids == ()


def test_end_tokens() -> None:
    assert read(eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert read({"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert read({"eos_token_id": 7}).eos_token_ids == (7,)
    assert read({}).eos_token_ids == (2,)
    assert read({"eos_token_id": None}).eos_token_ids == (2,)
    assert read({"eos_token_id": 0}).eos_token_ids == (0,)
    assert read(bos_token_id=None).bos_token_id is None


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 1e4, None),
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0, 64)),
        (
            {
                "rope_scaling": {
                    "type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16
                }
            },
            1e4,
            RopeScaling("dynamic", 2.0, 64),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            1e4,
            RopeScaling("llama3", 8.0, 32),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            5e5,
            RopeScaling("llama3", 8.0, 32),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "type": "default"}},
            1e4,
            RopeScaling("yarn", 4.0, 64),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "original_max_position_embeddings": 16,
                    "beta_fast": 16,
                    "attention_factor": 1.5,
                    "mscale": 1.0,
                    "truncate": False,
                }
            },
            1e4,
            RopeScaling(
                "yarn", 4.0, 16, beta_fast=16.0, attention_factor=1.5, mscale=1.0, truncate=False
            ),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16
                },
                "original_max_position_embeddings": 32,
            },
            1e4,
            RopeScaling("yarn", 2.0, 32),
        ),
    ],
)  # fmt: skip
def test_rope(changes: dict, theta: float, scaling: RopeScaling | None) -> None:
    config = read(**changes)
    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": None, "model_type": "bert"}, "architecture bert is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 16}, "sliding_window 16"),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
            "sliding_window 4096 is below max_position_embeddings 8192",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]},
            "use_sliding_window",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": "big"}, "invalid model settings"),
        ({"rope_scaling": "linear"}, "invalid model settings"),
    ],
)
def test_refused(changes: dict, message: str) -> None:
    with pytest.raises(JspecError, match=message) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")


def test_missing_keys_are_named() -> None:
    data = hf_config()
    del data["hidden_size"]
    with pytest.raises(JspecError, match=r"config\.json: .*'hidden_size' is missing"):
        model_config(data, name="config.json")


def test_mistral_window_beyond_the_context_is_no_window() -> None:
    assert read(architectures=["MistralForCausalLM"], sliding_window=64).head_dim == 8


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", ""])
def test_invalid_config_json(tmp_path: Path, text: str) -> None:
    folder = write_hf(tmp_path / "in")
    (folder / "config.json").write_text(text)
    with pytest.raises(JspecError, match=r"config\.json: not "):
        open_hf_folder(folder)


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert open_hf_folder(folder).config.eos_token_ids == (2, 0)


def test_cut_off_safetensors(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for keep in (0, 4, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        with pytest.raises(JspecError, match=r"model\.safetensors: truncated or damaged"):
            open_hf_folder(folder)


def rewrite_header(file: Path, edit) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = edit(data[8 : 8 + length].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h[:-20],
        lambda h: "[]",
        lambda h: h.replace("F32", "I64", 1),
        lambda h: h.replace("F32", "BF16", 1),
        lambda h: h.replace('"shape":', '"form":', 1),
        lambda h: h.replace("[24]", "[-24]", 1),
        lambda h: h.replace("model.norm", "lm_head"),
    ],
)
def test_damaged_header(tmp_path: Path, edit) -> None:
    folder = write_hf(tmp_path / "in")
    rewrite_header(folder / "model.safetensors", edit)
    with pytest.raises(JspecError, match=r"model\.safetensors: truncated or damaged"):
        open_hf_folder(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": np.zeros(24, np.int64)}, file)
    with pytest.raises(JspecError, match=r"'model\.norm\.weight' has dtype int64; only float32"):
        open_hf_folder(folder)


def test_shards(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in", shards=2)
    assert len(open_hf_folder(folder).tensors) == 21
    first = folder / "model-00001-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.extra"] = first.name
    index.write_text(json.dumps(data))
    with pytest.raises(JspecError, match=r"00001-of-00002\.safetensors: lacks 'model\.extra'"):
        open_hf_folder(folder)
    first.unlink()
    with pytest.raises(JspecError, match=r"00001-of-00002\.safetensors: missing, but listed"):
        open_hf_folder(folder)
    index.write_text("{}")
    with pytest.raises(JspecError, match=r"index\.json: has no weight_map"):
        open_hf_folder(folder)


def test_a_second_copy_beside_the_standard_name_is_not_read(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    (folder / "consolidated.safetensors").write_bytes(b"something else")
    assert len(open_hf_folder(folder).tensors) == 21
