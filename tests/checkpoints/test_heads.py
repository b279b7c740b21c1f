"""Draft heads read from the layouts of others, and written so that others and we can read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import head_files as files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from head_files import IDS, D, V, assert_same, load, settings, target_params
from safetensors.numpy import load_file

from checkpoints import LoadedHead, is_head, save_head
from jspec.config import ModelConfig, RopeScaling
from jspec.head_params import HeadConfig, MedusaConfig, MedusaParams, init_head

LAYERS = ModelConfig(V, D, 20, 1, 4, 2, 8, 2048)
HEADS = {
    "eagle": HeadConfig("eagle", LAYERS, V, D, fc_bias=True),
    "eagle, reduced, two layers": HeadConfig(
        "eagle", dataclasses.replace(LAYERS, num_hidden_layers=2), 9, D
    ),
    "eagle3": HeadConfig("eagle3", LAYERS, 9, D, taps=(2, 4, 5)),
    "eagle3, all biases": HeadConfig(
        "eagle3",
        dataclasses.replace(LAYERS, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True),
        9,
        D,
        taps=(-2, 1),
        fc_bias=True,
        norm_before_fc=True,
        feeds_normed=True,
    ),
    "eagle3, norms, two layers": HeadConfig(
        "eagle3",
        dataclasses.replace(
            LAYERS, num_hidden_layers=2, rope_scaling=RopeScaling("llama3", 8.0, 32)
        ),
        V,
        D,
        taps=(2, 4, 5),
        norm_before_residual=True,
        fc_norm=True,
    ),
    "eagle3, narrow": HeadConfig(
        "eagle3", dataclasses.replace(LAYERS, hidden_size=16), 9, D, taps=(0, 3, 4)
    ),
    "mtp": HeadConfig("mtp", LAYERS, V, D, feeds_normed=True),
    "mtp, reduced": HeadConfig("mtp", LAYERS, 9, D, skips_first_embedding=True),
}


def random_head(config: HeadConfig, dtype: str, *, own: bool) -> LoadedHead:
    """A head of random numbers; embedding and output head are the target's unless its `own`."""
    params = init_head(config, jax.random.key(0))
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(k, x.shape).astype(dtype) for k, x in zip(keys, leaves, strict=True)]
    params = treedef.unflatten(drawn)
    target = target_params(dtype)
    if config.layers.hidden_size == D:
        params = params.replace(embed=target.embed)
    reduced = config.draft_vocab_size != V
    if reduced:
        params = params.replace(token_ids=jnp.asarray(IDS[::-1].copy(), jnp.int32))
    if not own:
        rows = target.lm_head[params.token_ids] if reduced else target.lm_head
        params = params.replace(lm_head=rows)
    return LoadedHead(config, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str, dtype: str) -> None:
    config = HEADS[name]
    own = config.family == "eagle3"
    head = random_head(config, dtype, own=own)
    save_head(tmp_path / "head", *head)
    assert is_head(tmp_path / "head")
    loaded = load(tmp_path / "head", params=target_params(dtype), dtype=dtype)
    assert_same(loaded, head)
    written = load_file(tmp_path / "head" / "model.safetensors")
    narrow = config.layers.hidden_size != D
    assert any("embed_tokens" in n for n in written) == narrow
    assert any("lm_head" in n for n in written) == own
    if not narrow:
        assert loaded.params.embed is target_params(dtype).embed
    if not own and config.draft_vocab_size == V:
        assert loaded.params.lm_head is target_params(dtype).lm_head


@pytest.mark.parametrize("family", ["eagle", "eagle3", "mtp"])
def test_what_is_shared_is_for_the_caller_to_say(tmp_path: Path, family: str) -> None:
    shared = random_head(HEADS[family], "float32", own=False)
    save_head(tmp_path / "shared", *shared, shares_lm_head=True)
    assert not any("lm_head" in n for n in load_file(tmp_path / "shared" / "model.safetensors"))
    assert_same(load(tmp_path / "shared"), shared)
    own = random_head(HEADS[family], "float32", own=True)
    own = own._replace(params=own.params.replace(embed=own.params.embed + 1))
    save_head(tmp_path / "own", *own, shares_embed=False, shares_lm_head=False)
    assert_same(load(tmp_path / "own"), own)


@pytest.mark.parametrize("rows", [V, len(IDS)])
def test_saved_medusa_heads_are_loaded(tmp_path: Path, rows: int) -> None:
    config = MedusaConfig(2, D, V, rows)
    arrays = {n: jnp.asarray(x) for n, x in files.medusa(2, rows).items()}
    params = MedusaParams(
        blocks=(arrays["0.0.linear.weight"], arrays["1.0.linear.weight"]),
        biases=(arrays["0.0.linear.bias"], arrays["1.0.linear.bias"]),
        lm_heads=(arrays["0.1.weight"], arrays["1.1.weight"]),
        token_ids=None if rows == V else jnp.asarray(IDS, jnp.int32),
    )
    save_head(tmp_path / "head", config, params)
    assert is_head(tmp_path / "head")
    assert_same(load(tmp_path / "head"), LoadedHead(config, params))
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written.keys() == arrays.keys() | (set() if rows == V else {"d2t", "t2d"})
    save_head(tmp_path / "shared", config, params, shares_lm_head=True)
    shared = load(tmp_path / "shared").params.lm_heads
    ids = np.arange(V) if rows == V else IDS
    np.testing.assert_array_equal(shared[0], np.asarray(target_params().lm_head)[ids])
    assert shared[1] is shared[0]


def test_the_layout_that_others_read(tmp_path: Path) -> None:
    """Names, shapes, dtypes and settings as FACTS has them."""
    config = dataclasses.replace(HEADS["eagle3"], norm_before_fc=True)
    save_head(tmp_path / "head", *random_head(config, "bfloat16", own=True))
    written = load_file(tmp_path / "head" / "model.safetensors")
    expected = files.eagle3() | files.numbers({"input_norm.weight": (3 * D,)})
    assert {n: x.shape for n, x in written.items()} == {n: x.shape for n, x in expected.items()}
    kinds = {"d2t": np.dtype(np.int64), "t2d": np.dtype(np.bool_)}
    assert {n: x.dtype for n, x in written.items()} == {
        n: kinds.get(n, np.dtype(ml_dtypes.bfloat16)) for n in written
    }
    np.testing.assert_array_equal(written["d2t"] + np.arange(9), IDS[::-1])
    np.testing.assert_array_equal(np.flatnonzero(written["t2d"]), IDS)
    data = json.loads((tmp_path / "head" / "config.json").read_text())
    public = settings(bos_token_id=None, eos_token_id=None, architectures=None, torch_dtype=None)
    assert {key: data[key] for key in public} == public
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert data["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (data["hidden_size"], data["draft_vocab_size"], data["torch_dtype"]) == (
        D,
        9,
        "bfloat16",
    )
    assert (data["norm_before_fc"], data["norm_output"], data["fc_norm"]) == (True, False, False)
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert data["eagle_config"] == ids | {"use_aux_hidden_state": True}


@pytest.mark.parametrize(
    ("name", "file_names"),
    [
        ("eagle", files.eagle().keys()),
        ("mtp", files.qwen_mtp().keys()),
        (
            "eagle3, norms, two layers",
            files.eagle3(2, reduced=False).keys() | {f"fc_norm.{i}.weight" for i in range(3)},
        ),
    ],
)
def test_names_that_others_read(tmp_path: Path, name: str, file_names: set[str]) -> None:
    head = random_head(HEADS[name], "float32", own=name.startswith("eagle3"))
    save_head(tmp_path / "head", *head)
    assert load_file(tmp_path / "head" / "model.safetensors").keys() == set(file_names)


def test_settings_that_others_read(tmp_path: Path) -> None:
    def written(name: str) -> dict[str, Any]:
        save_head(tmp_path / name, *random_head(HEADS[name], "float32", own=True))
        return json.loads((tmp_path / name / "config.json").read_text())

    plain = written("eagle3")
    assert not plain["attention_bias"] | plain["mlp_bias"] | plain["norm_output"]
    biased = written("eagle3, all biases")
    assert biased["attention_bias"] & biased["mlp_bias"] & biased["norm_output"]
    assert (plain["model_type"], biased["model_type"]) == ("llama", "qwen3")
    assert "eagle_config" not in biased  # it reads a final state, which others cannot
    normed = written("eagle3, norms, two layers")
    assert normed["norm_before_residual"] & normed["fc_norm"]
    assert normed["num_hidden_layers"] == 2
    assert normed["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert written("eagle3, narrow")["target_hidden_size"] == D
    assert (written("eagle")["bias"], written("eagle, reduced, two layers")["bias"]) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    "name",
    [
        "eagle",
        "eagle, reduced, two layers",
        "eagle3",
        "eagle3, norms, two layers",
        "eagle3, narrow",
        "mtp",
    ],
)
def test_our_own_key_adds_nothing_to_what_others_read(tmp_path: Path, name: str) -> None:
    """Without it the same head is read from the public settings, but for the longer context."""
    head = random_head(HEADS[name], "float32", own=name.startswith("eagle3"))
    save_head(tmp_path / "head", *head)
    file = tmp_path / "head" / "config.json"
    data = json.loads(file.read_text())
    del data["jspec"]
    file.write_text(json.dumps(data))
    layers = dataclasses.replace(head.config.layers, max_position_embeddings=4096)
    assert_same(
        load(tmp_path / "head"),
        head._replace(config=dataclasses.replace(head.config, layers=layers)),
    )
