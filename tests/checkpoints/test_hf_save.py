"""Models written in the Hugging Face layout come back as they were."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from checkpoint_files import write_tokenizer

import checkpoints
import jspec
from checkpoints import sources
from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError
from jspec.params import init_params

PLAIN = ModelConfig(
    vocab_size=272,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_ids=(2,),
)
LLAMA3 = RopeScaling("llama3", factor=8.0, original_max_position_embeddings=32)
YARN = RopeScaling("yarn", factor=2.0, original_max_position_embeddings=32, truncate=False)
CHANGES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_ids": (2, 0)},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    "qwen2": {"qkv_bias": True, "rope_scaling": YARN, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "eos_token_ids": ()},
}


def written(folder, config=PLAIN):
    params = init_params(config, jax.random.key(0))
    checkpoints.save_model(folder, config, params)
    return params


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_written_is_read_back(tmp_path, name):
    config = dataclasses.replace(PLAIN, **CHANGES[name])
    params = written(tmp_path / "model", config)
    found, read = checkpoints.load_weights(
        tmp_path / "model", dtype="float32", cache_dir=tmp_path / "cache"
    )
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_with_a_tokenizer_it_is_a_whole_model(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    tokenizer = checkpoints.Tokenizer.load(tmp_path / "tokenizer")
    params = init_params(PLAIN, jax.random.key(0))
    checkpoints.save_model(tmp_path / "model", PLAIN, params, tokenizer=tokenizer)
    loaded = checkpoints.load(tmp_path / "model", dtype="float32", cache_dir=tmp_path / "cache")
    assert loaded.tokenizer.encode("hello") == tokenizer.encode("hello")


def test_without_one_it_is_no_target(tmp_path):
    """Whether its weights have been read before or not."""
    written(tmp_path / "model")
    cache = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
    for _ in range(2):
        with pytest.raises(JspecError, match=r"model: has no tokenizer\.json"):
            checkpoints.load(tmp_path / "model", **cache)
        checkpoints.load_weights(tmp_path / "model", **cache)


def test_a_draft_model_of_the_package_has_a_name(tmp_path, monkeypatch):
    written(tmp_path / "shipped" / "small-draft")
    monkeypatch.setattr(sources, "PRETRAINED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    llm = jspec.LLM(
        jspec.model.llama(PLAIN),
        params=init_params(PLAIN, jax.random.key(0)),
        drafter="small-draft",
        dtype="float32",
    )
    assert llm.drafter.name == "small-draft"
    shutil.copytree(tmp_path / "shipped" / "small-draft", tmp_path / "small-draft")
    assert sources.shipped_path("small-draft").absolute() == tmp_path / "small-draft"


def test_what_cannot_be_written_is_said(tmp_path):
    params = init_params(PLAIN, jax.random.key(0))
    wider = dataclasses.replace(PLAIN, hidden_size=32)
    with pytest.raises(JspecError, match="not the same in the model's config and in its params"):
        checkpoints.save_model(tmp_path / "model", wider, params)
    odd = dataclasses.replace(PLAIN, mlp_bias=True, qk_norm=True)
    with pytest.raises(JspecError, match="no architecture on Hugging Face has biases"):
        checkpoints.save_model(tmp_path / "model", odd, init_params(odd, jax.random.key(0)))
    written(tmp_path / "model")
    with pytest.raises(JspecError, match="exists and is not empty"):
        written(tmp_path / "model")
