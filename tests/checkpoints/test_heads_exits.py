"""Trained exits: written and read again, and files that cannot be used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import head_files as files
import jax.numpy as jnp
import numpy as np
import pytest
from head_files import IDS, TARGET, D, L, V, assert_same, load, target_params, write_head

from checkpoints import is_head, save_head
from jspec.errors import JspecError
from jspec.head_params import ExitsConfig, ExitsParams

LAYERS = (2, 5, 7)
CONFIG = ExitsConfig(LAYERS, D, V, len(IDS))


def exits(layers: tuple[int, ...] = LAYERS, bias: bool = True) -> dict[str, np.ndarray]:
    """The names of a file; the lm_head is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shapes |= {f"exits.{layer}.norm.weight": (D,), f"exits.{layer}.block.weight": (D, D)}
        if bias:
            shapes[f"exits.{layer}.block.bias"] = (D,)
    return files.numbers(shapes)


def written(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """A folder as `save_head` writes it, but for `settings`."""
    ours = {"format": 1, "family": "exits", "layers": list(LAYERS), "hidden_size": D}
    ours |= {"vocab_size": V, "draft_vocab_size": len(IDS)} | settings
    return write_head(folder, tensors, {"architectures": ["JspecExits"], "jspec": ours})


def params(lm_head: Any = None) -> ExitsParams:
    tensors = exits()
    return ExitsParams(
        norms=tuple(jnp.asarray(tensors[f"exits.{i}.norm.weight"]) for i in LAYERS),
        blocks=tuple(jnp.asarray(tensors[f"exits.{i}.block.weight"]) for i in LAYERS),
        biases=tuple(jnp.asarray(tensors[f"exits.{i}.block.bias"]) for i in LAYERS),
        lm_head=target_params().lm_head[IDS] if lm_head is None else lm_head,
        token_ids=jnp.asarray(IDS, jnp.int32),
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """The file has nothing of the target's, and names tensors by layers."""
    from safetensors.numpy import load_file

    save_head(tmp_path / "exits", CONFIG, params())
    assert is_head(tmp_path / "exits")
    tensors = load_file(tmp_path / "exits" / "model.safetensors")
    expected = exits() | files.vocabulary()
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array)
    settings = json.loads((tmp_path / "exits" / "config.json").read_text())
    assert settings["architectures"] == ["JspecExits"]
    loaded = load(tmp_path / "exits")
    assert loaded.config == CONFIG
    for i, layer in enumerate(LAYERS):
        np.testing.assert_array_equal(loaded.params.norms[i], exits()[f"exits.{layer}.norm.weight"])
    np.testing.assert_array_equal(loaded.params.lm_head, target_params().lm_head[IDS])
    assert_same(load(written(tmp_path / "by hand", exits() | files.vocabulary())), loaded)


def test_the_whole_vocabulary_is_the_targets_own_array(tmp_path: Path) -> None:
    folder = written(tmp_path, exits(), draft_vocab_size=V)
    loaded = load(folder)
    assert loaded.params.lm_head is target_params().lm_head
    assert loaded.params.token_ids is None
    assert load(folder, dtype="bfloat16").params.norms[0].dtype == jnp.bfloat16


def test_an_lm_head_of_their_own(tmp_path: Path) -> None:
    other = target_params().lm_head[IDS] + 1
    save_head(tmp_path / "exits", CONFIG, params(other), shares_lm_head=False)
    np.testing.assert_array_equal(load(tmp_path / "exits").params.lm_head, other)


def test_without_settings_and_without_biases(tmp_path: Path) -> None:
    folder = write_head(tmp_path, exits(bias=False) | files.vocabulary())
    assert is_head(folder)
    config, loaded = load(folder)
    assert config == CONFIG
    np.testing.assert_array_equal(loaded.biases[1], np.zeros(D))


WIDE = dataclasses.replace(TARGET, hidden_size=2 * D)
SMALL = dataclasses.replace(TARGET, vocab_size=V - 1)
LARGE = dataclasses.replace(TARGET, vocab_size=V + 1)
FLAT = dataclasses.replace(TARGET, num_hidden_layers=7)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (WIDE, f"for a target of width {D}, but the target's hidden_size is {2 * D}; give"),
        (LARGE, f"'t2d' has shape .{V}., but the target has {V + 1} tokens; give"),
        (FLAT, "has an exit behind 7 layers, but the target has only 7; give the exits of this"),
    ],
)
def test_exits_of_another_target(tmp_path: Path, target: Any, message: str) -> None:
    refused(written(tmp_path, exits() | files.vocabulary()), message, target=target)


def test_another_vocabulary_without_a_list_of_tokens(tmp_path: Path) -> None:
    folder = written(tmp_path, exits(), draft_vocab_size=V)
    refused(folder, f"a vocabulary of {V} tokens, but the target has {V - 1}; give", target=SMALL)


@pytest.mark.parametrize(
    ("lacking", "settings", "message"),
    [
        ("exits.5.norm.weight", {}, r"lacks the tensor 'exits\.5\.norm\.weight'; fetch"),
        ("exits.5.block.weight", {}, r"lacks the tensor 'exits\.5\.block\.weight'; fetch"),
        ("exits.7.block.bias", {}, r"lacks the tensor 'exits\.7\.block\.bias'; fetch"),
        ("exits.5", {}, "of exits behind 2, 7 layers, but its config.json says 2, 5, 7; fetch"),
        ("none", {"layers": [5, 2, 7]}, r"config\.json: invalid \(.*ascending\); save"),
        ("none", {"layers": 3}, r"config\.json: invalid"),
        ("none", {"draft_vocab_size": 8}, "know 9 tokens, but its config.json 8; fetch"),
        ("none", {"family": "medusa"}, "says family 'medusa', but the tensors are those of 'exits"),
    ],
)
def test_damaged_files(tmp_path: Path, lacking: str, settings: Any, message: str) -> None:
    tensors = exits() | files.vocabulary()
    kept = {name: x for name, x in tensors.items() if not name.startswith(lacking)}
    refused(written(tmp_path, kept, **settings), message)


def test_tensors_that_no_exit_has(tmp_path: Path) -> None:
    more = {"exits.5.gate.weight": np.ones((D, D), np.float32)}
    refused(written(tmp_path / "a", exits() | files.vocabulary() | more), r"'exits\.5\.gate")
    wrong = {"exits.5.block.weight": np.ones((D, D + 1), np.float32)}
    folder = written(tmp_path / "b", exits() | files.vocabulary() | wrong)
    refused(folder, rf"'exits\.5\.block\.weight' has shape \[{D}, {D + 1}\], but \[{D}, {D}\]")
    folder = write_head(tmp_path / "c", exits((0, L - 1)) | files.vocabulary())
    refused(folder, "an exit behind 0 layers; exits are behind 1 or more")


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(JspecError, match=message) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
