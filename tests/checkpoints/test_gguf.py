"""GGUF files: the same model as the Hugging Face folder, or a clear refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import gguf_name, hf_config, hf_tensors, write_gguf

from checkpoints.gguf_config import llama3_factors
from checkpoints.gguf_file import deinterleave, open_gguf
from jspec.config import RopeScaling
from jspec.errors import JspecError


def loaded(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.load() for tensor in open_gguf(path).tensors}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_those_of_hugging_face(tmp_path: Path, arch: str, tied: bool) -> None:
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch] + "ForCausalLM"
    config = hf_config(architectures=[name], tie_word_embeddings=tied)
    tensors = hf_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, arch)
    found = loaded(path)
    assert len(found) == len(tensors)
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(found[gguf_name(tensor)], array, err_msg=tensor)
    ours = open_gguf(path).config
    assert ours.tie_word_embeddings == tied
    assert ours.qkv_bias == (arch == "qwen2")
    assert ours.qk_norm == (arch == "qwen3")
    assert not ours.out_bias


def test_biases_of_a_llama_are_reordered_too(tmp_path: Path) -> None:
    config = hf_config(attention_bias=True, mlp_bias=True)
    tensors = hf_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    ours = open_gguf(path).config
    assert ours.qkv_bias
    assert ours.out_bias
    assert ours.mlp_bias
    name = "model.layers.1.self_attn.k_proj.bias"
    np.testing.assert_array_equal(loaded(path)[gguf_name(name)], tensors[name])


def test_deinterleave_in_full() -> None:
    # One head of 6 rows: pairs (0, 1), (2, 3), (4, 5) -> first halves, then second halves.
    assert deinterleave(np.arange(6), 1).tolist() == [0, 2, 4, 1, 3, 5]
    assert deinterleave(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(("kind", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_sixteen_bit_tensors_keep_their_dtype(tmp_path: Path, kind: str, dtype: Any) -> None:
    config = hf_config(hidden_size=32)
    tensors = hf_tensors(config, dtype)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, quantise=kind)
    source = open_gguf(path)
    by_name = {tensor.name: tensor for tensor in source.tensors}
    embed = by_name["token_embd.weight"]
    assert embed.dtype == embed.load().dtype == dtype
    expected = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(by_name["blk.0.attn_q.weight"].load(), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors(tmp_path: Path, kind: str) -> None:
    config = hf_config(hidden_size=32)
    tensors = hf_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, quantise=kind)
    found = loaded(path)
    bits = int(kind[1])
    for tensor in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        array = found[gguf_name(tensor)]
        assert array.dtype == np.float32
        # A block of 32 values within +-4 has steps of 8 / 2**bits, and so errors of one at most.
        assert 0 < np.abs(array - tensors[tensor]).max() < 8 / 2**bits


def test_settings(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0}
    path = write_gguf(tmp_path / "m.gguf", hf_config(), hf_tensors(hf_config()), metadata=metadata)
    config = open_gguf(path).config
    assert config.vocab_size == 272
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.rms_norm_eps == 1e-5  # not the float32 nearest to it
    assert config.eos_token_ids == (2, 0)
    assert config.bos_token_id == 1
    assert config.rope_scaling is None


def with_rope(path: Path, factors: np.ndarray | None = None, **metadata: Any) -> Path:
    extra = None if factors is None else {"rope_freqs.weight": factors.astype(np.float32)}
    keys = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    config = hf_config(rope_theta=5e5)
    return write_gguf(path, config, hf_tensors(config), metadata=keys, extra=extra)


def test_rope_scaling(tmp_path: Path) -> None:
    path = with_rope(tmp_path / "a.gguf", type="linear", factor=2.0)
    assert open_gguf(path).config.rope_scaling == RopeScaling("linear", 2.0, 64)
    path = with_rope(tmp_path / "b.gguf", type="yarn", factor=4.0, original_context_length=16)
    assert open_gguf(path).config.rope_scaling == RopeScaling("yarn", 4.0, 16)
    with pytest.raises(JspecError, match="rope scaling 'longrope' is not supported"):
        open_gguf(with_rope(tmp_path / "c.gguf", type="longrope", factor=4.0))


def test_llama3_factors_are_recognised(tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = llama3_factors(scaling, 5e5, 8)
    path = with_rope(tmp_path / "a.gguf", factors)
    assert open_gguf(path).config.rope_scaling == scaling
    with pytest.raises(JspecError, match=r"rope_freqs\.weight is not Llama 3's"):
        open_gguf(with_rope(tmp_path / "b.gguf", factors * [1, 1.1, 1, 1]))


def test_llama3_factors_by_transformers_formula() -> None:
    """Literal values of transformers' `_compute_llama3_parameters` (theta 500000, head 128)."""
    scaling = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = llama3_factors(scaling, 500000.0, 128)
    assert factors.shape == (64,)
    assert factors[:28].tolist() == [1.0] * 28
    np.testing.assert_array_equal(factors[36:], 8.0)
    wavelength = 2 * np.pi * 500000.0 ** (2 * 32 / 128)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    inverse = 1 / wavelength
    smoothed = (1 - smooth) * inverse / 8 + smooth * inverse
    np.testing.assert_allclose(factors[32], inverse / smoothed, rtol=1e-12)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.sliding_window": 16}, "sliding window"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.attention.head_count": 3}, "invalid model settings"),
    ],
)
def test_refused_settings(tmp_path: Path, metadata: dict, message: str) -> None:
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config), metadata=metadata)
    with pytest.raises(JspecError, match=message):
        open_gguf(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, hf_tensors(config), arch="gemma3")
    with pytest.raises(JspecError, match="'gemma3' is not supported; supported: llama, qwen2"):
        open_gguf(path)


def test_cut_off_anywhere(tmp_path: Path) -> None:
    config = hf_config()
    whole = write_gguf(tmp_path / "whole.gguf", config, hf_tensors(config)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in (0, 3, 10, 100, 1000, 5000, 9000, len(whole) // 2, len(whole) - 40):
        cut.write_bytes(whole[:keep])
        with pytest.raises(JspecError, match=r"cut\.gguf: .*fetch the file again") as caught:
            open_gguf(cut)
        assert "\n" not in str(caught.value)


def test_not_gguf_at_all(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(JspecError, match="not a GGUF file"):
        open_gguf(file)


def test_unknown_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError

    config = hf_config()
    source = open_gguf(write_gguf(tmp_path / "m.gguf", config, hf_tensors(config)))
    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(JspecError, match="of type F32 cannot be dequantised"):
        source.tensors[0].load()
