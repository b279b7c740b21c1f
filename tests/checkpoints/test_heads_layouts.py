"""EAGLE and EAGLE-3 heads in the layouts of others: spellings of names, sources of settings; what
is taken for a head at all."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import head_files as files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf
from head_files import (
    IDS,
    TARGET,
    D,
    H,
    L,
    N,
    V,
    assert_same,
    load,
    renamed,
    settings,
    target_params,
    write_head,
)
from jax.sharding import Mesh, PartitionSpec

from checkpoints import is_head
from jspec.config import RopeScaling
from jspec.params import leaf_paths
from jspec.sharding import named_sharding

EMBEDDING = np.asarray(target_params().embed)


# EAGLE-1


def test_eagle(tmp_path: Path) -> None:
    """As yuhuili's are: a torch file with a copy of the target's embedding."""
    tensors = {"embed_tokens.weight": EMBEDDING, **files.eagle()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)  # a buffer
    folder = write_head(tmp_path, tensors, settings(), "pytorch_model.bin")
    assert is_head(folder)
    config, params = load(folder)
    assert (config.family, config.taps, config.fc_bias) == ("eagle", (-1,), True)
    assert (config.draft_vocab_size, config.target_hidden_size) == (V, D)
    assert config.layers.rope_theta == 10000.0
    assert config.layers.max_position_embeddings == TARGET.max_position_embeddings
    assert (config.layers.num_hidden_layers, config.layers.eos_token_ids) == (1, ())
    assert params.embed is target_params().embed
    assert params.lm_head is target_params().lm_head
    assert params.layers[0].input_norm is None
    np.testing.assert_array_equal(params.fc, tensors["fc.weight"])
    np.testing.assert_array_equal(
        params.layers[0].o, tensors["layers.0.self_attn.o_proj.weight"].reshape(D, N, H)
    )


def test_eagle_without_bias_and_with_a_tied_target(tmp_path: Path) -> None:
    folder = write_head(tmp_path, files.eagle(bias=False), settings(bias=False))
    target = target_params(tied=True)
    config, params = load(folder, params=target)
    assert not config.fc_bias
    assert params.fc_bias is None
    assert params.embed is target.embed
    assert params.lm_head is target.embed


def test_eagle_of_two_layers(tmp_path: Path) -> None:
    config, params = load(write_head(tmp_path, files.eagle(layers=2), settings()))
    assert config.layers.num_hidden_layers == 2  # though config.json says 1
    assert params.layers[0].input_norm is None
    assert params.layers[1].input_norm is not None


@pytest.mark.parametrize(
    ("copy", "shared"),
    [
        (EMBEDDING, True),
        (EMBEDDING + np.eye(V, D, -V + 1, dtype=np.float32), False),  # its last row
        (np.roll(EMBEDDING, 1), False),
    ],
)
def test_an_embedding_is_shared_if_it_is_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: np.ndarray, shared: bool
) -> None:
    monkeypatch.setattr("checkpoints.heads._ROWS", 16)  # of 40
    write_head(tmp_path, files.eagle() | {"embed_tokens.weight": copy}, settings())
    params = load(tmp_path).params
    assert (params.embed is target_params().embed) == shared
    np.testing.assert_array_equal(params.embed, copy)


@pytest.mark.parametrize(
    ("stored", "loaded"), [("bfloat16", "float16"), ("float16", "bfloat16"), ("float32", "float16")]
)
def test_a_rounded_copy_is_a_copy(tmp_path: Path, stored: str, loaded: str) -> None:
    """One was rounded to the dtype of the other, below the least normal number of float16, too."""
    embedding = EMBEDDING.copy()
    embedding[3] *= 1e-6
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    origin = embedding.astype(kinds[loaded if stored == "float16" else stored])
    copy = origin.astype(kinds[stored])
    target = target_params(loaded).replace(embed=jnp.asarray(origin.astype(kinds[loaded])))
    write_head(tmp_path, files.eagle() | {"embed_tokens.weight": copy}, settings())
    params = load(tmp_path, params=target, dtype=loaded).params
    assert params.embed is target.embed
    assert params.fc.dtype == loaded


def test_what_is_shared_with_a_target_in_another_dtype(tmp_path: Path) -> None:
    """The embedding is the target's all the same; the output head is in the head's own dtype."""
    write_head(tmp_path, files.eagle(), settings())
    params = load(tmp_path, dtype="bfloat16").params
    assert params.embed is target_params().embed
    assert (params.fc.dtype, params.lm_head.dtype) == ("bfloat16", "bfloat16")


# EAGLE-3

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": settings(architectures=None),
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x/y"}},
    "draft_vocab_size": len(IDS),
    "norm_before_residual": False,
}


def test_eagle3(tmp_path: Path) -> None:
    tensors = files.eagle3()
    folder = write_head(tmp_path, tensors, settings(**EAGLE3), "pytorch_model.bin")
    assert is_head(folder)
    config, params = load(folder)
    assert (config.family, config.taps) == ("eagle3", (2, L // 2, L - 3))
    assert (config.draft_vocab_size, config.layers.vocab_size) == (len(IDS), V)
    assert params.embed is target_params().embed
    assert params.token_ids.dtype == np.int32
    np.testing.assert_array_equal(params.token_ids, IDS)
    for field, name in {
        "lm_head": "lm_head",
        "fc": "fc",
        "embed_norm": "midlayer.input_layernorm",
        "feature_norm": "midlayer.hidden_norm",
        "final_norm": "norm",
    }.items():
        np.testing.assert_array_equal(getattr(params, field), tensors[f"{name}.weight"])
    flags = (config.norm_before_residual, config.norm_before_fc, config.fc_norm, config.fc_bias)
    assert (*flags, config.feeds_normed) == (False,) * 5


def test_a_head_that_torch_wrote(tmp_path: Path) -> None:
    """torch_golden_head.bin is of torch 2.13: parameters in float16, d2t in int64, t2d in bool.
    Tensor number i holds ((7 j + 3 i) mod 11 - 5) / 16."""
    data = settings(
        vocab_size=16, hidden_size=8, intermediate_size=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, draft_vocab_size=4,
    )  # fmt: skip
    write_head(tmp_path, {}, data)
    shutil.copy(Path(__file__).with_name("torch_golden_head.bin"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    config = dataclasses.replace(TARGET, vocab_size=16, hidden_size=8)
    target = target_params().replace(embed=jnp.ones((16, 8)), lm_head=jnp.ones((16, 8)))
    params = load(tmp_path, target=config, params=target, dtype="float16").params
    np.testing.assert_array_equal(params.token_ids, [0, 2, 3, 15])
    for i, array in ((0, params.embed_norm), (2, params.layers[0].q), (12, params.lm_head)):
        expected = ((np.arange(array.size) * 7 + 3 * i) % 11 - 5) / 16
        np.testing.assert_array_equal(np.asarray(array).ravel(), expected)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: "model." + name,
        lambda name: "model." + name.replace("midlayer.", "layers.0."),
        lambda name: name if name == "lm_head.weight" else name.replace("mid", "model.mid"),
    ],
)
def test_spellings_of_eagle3(tmp_path: Path, rename: Any) -> None:
    tensors = files.eagle3(layers=2)
    plain = load(write_head(tmp_path / "plain", tensors, settings(**EAGLE3)))
    assert plain.config.layers.num_hidden_layers == 2
    assert plain.params.layers[0].input_norm is None
    assert plain.params.layers[1].q.shape == (N, H, D)
    folder = write_head(tmp_path / "other", renamed(tensors, rename), settings(**EAGLE3))
    assert_same(load(folder), plain)


def test_speculators(tmp_path: Path) -> None:
    """Qwen3's layers, the target's norm and head left over from training, an explicit context."""
    tensors = renamed(files.eagle3(), lambda name: name.replace("midlayer.", "layers.0."))
    qk = {f"layers.0.self_attn.{x}_norm.weight": np.full(H, 1.5, np.float32) for x in "qk"}
    extra = {
        "verifier_norm.weight": np.ones(D, np.float32),
        "verifier_lm_head.weight": tensors["lm_head.weight"],
    }
    layers = settings(
        architectures=None, model_type="qwen3", max_position_embeddings=8192, rope_theta=1e6
    )
    data = SPECULATORS | {"transformer_layer_config": layers, "norm_before_residual": True}
    config, params = load(write_head(tmp_path, tensors | qk | extra, data))
    assert is_head(tmp_path)
    assert config.layers.qk_norm
    assert config.norm_before_residual
    assert (config.layers.max_position_embeddings, config.layers.rope_theta) == (8192, 1e6)
    np.testing.assert_array_equal(params.layers[0].q_norm, qk["layers.0.self_attn.q_norm.weight"])


IDS_KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({}, (2, 4, 5)),
        ({IDS_KEY: []}, (2, 4, 5)),
        ({IDS_KEY: [2, 5, 7]}, (2, 5, 7)),  # inputs, as vLLM counts
        ({"eagle_config": {IDS_KEY: [1, 3, 4]}}, (2, 4, 5)),  # outputs, as SpecForge counts
        ({"eagle_config": {IDS_KEY: [2, 4, 7]}}, (2, 4, 7)),
        ({"eagle_config": {IDS_KEY: [0, 3, 4]}}, (0, 3, 4)),
        (SPECULATORS | {IDS_KEY: [1, 3, 4]}, (1, 3, 4)),  # always inputs
    ],
)
def test_which_hidden_states_eagle3_reads(tmp_path: Path, changes: Any, taps: Any) -> None:
    write_head(tmp_path, files.eagle3(), settings(**EAGLE3) | changes)
    assert load(tmp_path).config.taps == taps


def test_eagle3_of_two_hidden_states(tmp_path: Path) -> None:
    write_head(tmp_path, files.eagle3(taps=2), settings(**EAGLE3, **{IDS_KEY: [3, 6]}))
    assert load(tmp_path).params.fc.shape == (D, 2 * D)


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_flags_of_eagle3(tmp_path: Path, place: str) -> None:
    flags = {"norm_before_residual": True, "norm_output": True, "fc_norm": True}
    norms = {f"fc_norm.{i}.weight": np.full(D, i + 1, np.float32) for i in range(3)}
    data = settings(**EAGLE3) | (flags if place == "top" else {"eagle_config": flags})
    config, params = load(write_head(tmp_path, files.eagle3() | norms, data))
    assert config.norm_before_residual
    assert config.feeds_normed
    assert (config.fc_norm, config.norm_before_fc) == (True, False)
    assert [float(x[0]) for x in params.fc_norms] == [1, 2, 3]


def test_a_norm_over_all_features_counts_without_its_flag(tmp_path: Path) -> None:
    norm = {"input_norm.weight": np.arange(3 * D, dtype=np.float32)}
    config, params = load(write_head(tmp_path, files.eagle3() | norm, settings(**EAGLE3)))
    assert (config.fc_norm, config.norm_before_fc) == (False, True)
    np.testing.assert_array_equal(params.fc_norms, [norm["input_norm.weight"]])


def test_eagle3_of_another_width(tmp_path: Path) -> None:
    """It needs an embedding of its own."""
    own = np.ones((V, 16), np.float32)
    tensors = files.eagle3(width=16) | {"embed_tokens.weight": own}
    data = settings(**EAGLE3, hidden_size=16, target_hidden_size=D)
    config, params = load(write_head(tmp_path, tensors, data))
    assert (config.layers.hidden_size, config.target_hidden_size) == (16, D)
    assert params.fc.shape == (16, 3 * D)
    np.testing.assert_array_equal(params.embed, own)


def test_eagle3_with_the_whole_vocabulary(tmp_path: Path) -> None:
    """The buffers d2t and t2d are there in some files, and say nothing."""
    tensors = files.eagle3(reduced=False)
    buffers = {"d2t": np.zeros(V, np.int64), "t2d": np.zeros(V, np.bool_)}
    config, params = load(write_head(tmp_path, tensors | buffers, settings(**EAGLE3)))
    assert config.draft_vocab_size == V
    assert params.token_ids is None
    del tensors["lm_head.weight"]
    params = load(write_head(tmp_path, tensors, settings())).params
    assert params.lm_head is target_params().lm_head


def test_an_output_head_that_is_left_out_has_the_targets_rows(tmp_path: Path) -> None:
    tensors = files.eagle3()
    del tensors["lm_head.weight"]
    params = load(write_head(tmp_path, tensors, settings(**EAGLE3))).params
    np.testing.assert_array_equal(params.lm_head, np.asarray(target_params().lm_head)[IDS])


def test_rotary_positions(tmp_path: Path) -> None:
    """No base means 10000; a scaling is kept; the context grows to the target's unless dynamic
    scaling computes with it."""
    write_head(tmp_path, files.eagle3(), settings(**EAGLE3, rope_theta=5e5))
    assert load(tmp_path).config.layers.rope_theta == 5e5
    config = load(tmp_path, rope_theta=123.0).config
    assert config == dataclasses.replace(
        load(tmp_path).config,
        layers=dataclasses.replace(load(tmp_path).config.layers, rope_theta=123.0),
    )
    yarn = {"rope_type": "yarn", "factor": 4.0}
    write_head(tmp_path, files.eagle3(), settings(**EAGLE3, rope_scaling=yarn))
    layers = load(tmp_path).config.layers
    assert layers.rope_scaling == RopeScaling("yarn", 4.0, 2048)
    assert layers.max_position_embeddings == 4096
    dynamic = {"type": "dynamic", "factor": 2.0}
    write_head(tmp_path, files.eagle3(), settings(**EAGLE3, rope_scaling=dynamic))
    assert load(tmp_path).config.layers.max_position_embeddings == 2048


# What is a head, and where it goes


def test_a_model_is_no_head(tmp_path: Path) -> None:
    assert not is_head(write_hf(tmp_path / "one"))
    assert not is_head(write_hf(tmp_path / "shards", shards=2))
    write_head(tmp_path / "bin", hf_tensors(hf_config()), hf_config(), "pytorch_model.bin")
    assert not is_head(tmp_path / "bin")
    assert not is_head(tmp_path / "one" / "model.safetensors")
    assert not is_head(tmp_path / "one" / "tokenizer.json")
    assert not is_head(tmp_path / "absent")
    assert not is_head("org/name")
    (tmp_path / "empty").mkdir()
    assert not is_head(tmp_path / "empty")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"damaged")
    assert not is_head(tmp_path / "one")
    (tmp_path / "one" / "config.json").write_text("{")
    assert not is_head(tmp_path / "one")


def test_a_converted_model_is_no_head(converted: Path) -> None:
    assert not is_head(converted)


def test_settings_tell_heads_that_cannot_be_run(tmp_path: Path) -> None:
    for i, data in enumerate(
        [{"speculators_model_type": "dflash"}, {"architectures": ["DFlashDraftModel"]}]
    ):
        assert is_head(write_head(tmp_path / str(i), {"x": EMBEDDING}, data))


@pytest.mark.parametrize("reduced", [True, False])
def test_on_a_mesh(tmp_path: Path, reduced: bool) -> None:
    """The target is split over its vocabulary; the file has a copy of its embedding."""
    tensors = files.eagle3(reduced=reduced) | {"embed_tokens.weight": EMBEDDING}
    del tensors["lm_head.weight"]
    write_head(tmp_path, tensors, settings(**EAGLE3))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    split = named_sharding(mesh, (V, D), ("vocab", None))
    target = target_params()
    target = target.replace(
        embed=jax.device_put(target.embed, split), lm_head=jax.device_put(target.lm_head, split)
    )
    head = load(tmp_path, params=target, mesh=mesh)
    specs = {name: leaf.sharding.spec for name, leaf in leaf_paths(head.params)}
    assert specs["layers.0.q"] == PartitionSpec("model", None, None)
    assert specs["layers.0.gate"] == PartitionSpec("model", None)
    assert specs["lm_head"] == PartitionSpec(None if reduced else "model", None)  # nine rows
    assert head.params.embed is target.embed
    assert (head.params.lm_head is target.lm_head) != reduced
    assert_same(load(tmp_path), head)
