"""The tables of names: every leaf has one name in each format, and nothing else has one."""

from __future__ import annotations

import pytest

from checkpoints.names import NameTable
from checkpoints.names.llama import GGUF, HF
from jspec.config import ModelConfig
from jspec.params import leaf_paths, param_specs

EVERYTHING = ModelConfig(
    8, 4, 4, 11, 2, 1, 2, 8, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True
)


@pytest.mark.parametrize("table", [HF, GGUF])
def test_one_name_for_every_leaf(table: NameTable) -> None:
    leaves = [path for path, _ in leaf_paths(param_specs(EVERYTHING))]
    names = [table.file_name(leaf) for leaf in leaves]
    assert len(set(names)) == len(leaves) == 3 + 11 * 18
    assert [table.leaf(name) for name in names] == leaves


def test_some_names() -> None:
    assert HF.leaf("model.layers.10.self_attn.q_proj.weight") == "layers.10.q"
    assert GGUF.leaf("blk.3.ffn_down.weight") == "layers.3.down"
    assert GGUF.leaf("blk.3.attn_q_norm.weight") == "layers.3.q_norm"
    assert GGUF.file_name("embed") == "token_embd.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ],
)
def test_known_non_weights(name: str) -> None:
    assert HF.leaf(name) is None
    assert GGUF.leaf("rope_freqs.weight") is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weights",
        "model_layers.1.self_attn.q_proj.weight",
        "blk.1.attn_q.weight",
        "layers.0.q",
        "",
    ],
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(KeyError):
        HF.leaf(name)
