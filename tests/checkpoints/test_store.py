"""Loading: through the cache, onto devices, and from damaged folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import hf_config, hf_tensors, write_gguf, write_hf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import checkpoints
from jspec.errors import JspecError
from jspec.params import is_spec, leaf_paths, param_specs
from jspec.sharding import tree_shardings


def as_numpy(checkpoint: checkpoints.Checkpoint) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in leaf_paths(checkpoint.params)}


def mesh_of(data: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"))


@pytest.mark.parametrize(("data", "model"), [(1, 4), (2, 2), (4, 1)])
def test_leaves_get_the_shardings_of_the_rules(converted: Path, data: int, model: int) -> None:
    mesh = mesh_of(data, model)
    plain = as_numpy(checkpoints.load(converted, dtype="float32"))
    sharded = checkpoints.load(converted, dtype="float32", mesh=mesh)
    expected = dict(leaf_paths(tree_shardings(mesh, param_specs(sharded.config), is_spec)))
    for name, leaf in leaf_paths(sharded.params):
        assert leaf.sharding == expected[name], name
        np.testing.assert_array_equal(np.asarray(leaf), plain[name], err_msg=name)


def test_a_split_leaf_is_really_split(converted: Path) -> None:
    params = checkpoints.load(converted, dtype="float32", mesh=mesh_of(1, 4)).params
    # 4 query heads on 4 devices; 2 key heads, which 4 does not divide, are replicated.
    layer = params.layers[0]
    assert layer.q.sharding == NamedSharding(mesh_of(1, 4), PartitionSpec("model", None, None))
    assert {s.data.shape for s in layer.q.addressable_shards} == {(1, 8, 24)}
    assert {s.data.shape for s in layer.k.addressable_shards} == {(2, 8, 24)}


def test_chunked_leaves_are_whole_again(tmp_path, hf_folder, converted, monkeypatch) -> None:
    monkeypatch.setattr("checkpoints.arrays.CHUNK_BYTES", 4096)
    dest = checkpoints.convert(hf_folder, tmp_path / "out")
    chunks = [file for file in (dest / "params/embed/c").rglob("*") if file.is_file()]
    assert len(chunks) > 1
    found = as_numpy(checkpoints.load(dest, dtype="float32", mesh=mesh_of(1, 4)))
    for name, leaf in as_numpy(checkpoints.load(converted, dtype="float32")).items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_as_asked(converted: Path, tensors: dict, dtype: str) -> None:
    checkpoint = checkpoints.load(converted, dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(checkpoint.params)} == {dtype}
    name = "model.layers.1.mlp.down_proj.weight"
    found = np.asarray(checkpoint.params.layers[1].down)
    np.testing.assert_array_equal(found, tensors[name].astype(found.dtype))


def test_unknown_dtype(converted: Path) -> None:
    with pytest.raises(JspecError, match="unknown dtype 'int4': choose one of float32"):
        checkpoints.load(converted, dtype="int4")


def test_our_folder_is_loaded_where_it_lies(converted: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.load(str(converted), dtype="float32", cache_dir=tmp_path / "cache")
    assert checkpoint.path == converted
    assert not (tmp_path / "cache").exists()
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.tokenizer.eos_token_id == 2


def test_a_relative_path_loads(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(converted.parent)
    assert checkpoints.load(converted.name, dtype="float32").config.vocab_size == 272


def cached(cache: Path) -> set[str]:
    return {folder.name.rsplit("-", 1)[1] for folder in (cache / "converted-1").iterdir()}


def test_foreign_folders_are_converted_once(hf_folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    labels: set[str] = set()

    def load(dtype: str) -> checkpoints.Checkpoint:
        return checkpoints.load(
            hf_folder,
            dtype=dtype,
            cache_dir=tmp_path,
            report=lines.append,
            progress=lambda label, *_: labels.add(label),
        )

    first = load("float32")
    assert labels == {"converting", "loading"}
    labels.clear()
    again = load("float32")
    assert lines == []
    assert labels == {"loading"}
    assert first.path == again.path
    # The copy in the file's own dtype serves the narrower ones as well.
    np.testing.assert_array_equal(
        np.asarray(load("bfloat16").params.embed),
        np.asarray(first.params.embed).astype(ml_dtypes.bfloat16),
    )
    assert cached(tmp_path) == {"source"}


def test_a_narrow_copy_does_not_serve_a_wider_dtype(hf_folder, tmp_path, tensors) -> None:
    checkpoints.load(hf_folder, dtype="bfloat16", cache_dir=tmp_path)
    assert cached(tmp_path) == {"bfloat16"}
    wide = checkpoints.load(hf_folder, dtype="float32", cache_dir=tmp_path)
    np.testing.assert_array_equal(wide.params.embed, tensors["model.embed_tokens.weight"])
    assert cached(tmp_path) == {"bfloat16", "source"}


def test_sixteen_bit_files_are_not_blown_up(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config(), ml_dtypes.bfloat16)
    folder = write_hf(tmp_path / "in", tensors=tensors)
    wide = checkpoints.load(folder, dtype="float32", cache_dir=tmp_path)
    stored = json.loads((wide.path / "params/embed/zarr.json").read_text())["data_type"]
    assert stored == "bfloat16"
    embed = tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(wide.params.embed, embed)


def test_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    before = checkpoints.load(folder, dtype="float32", cache_dir=tmp_path)
    tensors = hf_tensors(hf_config(), seed=1)
    write_hf(folder, tensors=tensors)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # file systems have coarse clocks
    after = checkpoints.load(folder, dtype="float32", cache_dir=tmp_path)
    assert before.path != after.path
    np.testing.assert_array_equal(after.params.final_norm, tensors["model.norm.weight"])


def test_the_loser_of_a_race_uses_the_winners_copy(hf_folder: Path, tmp_path: Path) -> None:
    winners: list[Path] = []

    def another_process(label: str, done: int, _: int) -> None:
        if label == "converting" and done == 0:
            winner = checkpoints.load(hf_folder, dtype="float32", cache_dir=tmp_path)
            winners.append(winner.path)
            (winner.path / "winner").touch()

    loser = checkpoints.load(
        hf_folder, dtype="float32", cache_dir=tmp_path, progress=another_process
    )
    assert [loser.path] == winners
    assert (loser.path / "winner").exists()
    assert len(list((tmp_path / "converted-1").iterdir())) == 1


def test_old_remains_are_swept(hf_folder: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / "converted-1" / f".{age}.partial" for age in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    checkpoints.load(hf_folder, dtype="float32", cache_dir=tmp_path)
    assert not old.exists()
    assert new.exists()


def remove(name: str):
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def cut(name: str, keep: float = 0.5):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return damage


def reshape_config(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "num_attention_heads": 2}))


def fewer_layers(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "num_hidden_layers": 1}))


def future_format(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "jspec_format": 99}))


def unknown_field(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, "colour": "blue"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("params"), r"params: damaged checkpoint \(it is incomplete\)"),
        (remove("params/embed"), r"params/embed/.*: damaged checkpoint \(it is missing\)"),
        (remove("params/layers.1.down/c"), r"layers\.1\.down/c/0/0: damaged .*missing"),
        (remove("params/layers.0.q/zarr.json"), r"layers\.0\.q/zarr\.json: damaged .*missing"),
        (remove("params/_METADATA"), "params/_METADATA: damaged .*missing"),
        (cut("params/_METADATA"), r"params/_METADATA: damaged .*bytes of \d+"),
        (cut("params/embed/c/0/0"), r"params/embed/c/0/0: damaged .*13066 bytes of 26132"),
        (cut("params/embed/c/0/0", 0.0), r"params/embed/c/0/0: damaged .*0 bytes of 26132"),
        (cut("params/layers.1.up/zarr.json"), r"layers\.1\.up/zarr\.json: damaged .*bytes of"),
        (cut("params/jspec_manifest.json"), r"jspec_manifest\.json: not valid JSON"),
        (reshape_config, r"params: damaged .*its leaves are not those of config\.json"),
        (fewer_layers, r"params: damaged .*its leaves are not those of config\.json"),
        (cut("config.json"), "config.json: not valid JSON"),
        (remove("config.json"), "not a model folder"),
        (future_format, "config.json: written by another version of jspec"),
        (unknown_field, "config.json: invalid"),
        (remove("tokenizer.json"), "has no tokenizer.json"),
        (cut("tokenizer.json"), "tokenizer.json: damaged"),
        (cut("tokenizer_config.json"), "tokenizer_config.json: not valid JSON"),
    ],
)
def test_damaged_folders(tmp_path: Path, converted: Path, damage, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(converted, folder)
    damage(folder)
    with pytest.raises(JspecError, match=message) as caught:
        checkpoints.load(folder, dtype="float32")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


LOAD_EACH = """
import sys, checkpoints
from jspec.errors import JspecError
for folder in sys.argv[1:]:
    try:
        checkpoints.load(folder, dtype="float32")
    except JspecError as error:
        print(error)
"""


def test_damage_that_leaves_the_size(tmp_path: Path, converted: Path) -> None:
    """In a process of its own: when one read fails Orbax leaves the others running, and that they
    end in nothing is reported (as unraisable) at some later time."""
    folders = []
    for name in ("params/embed/zarr.json", "params/embed/c/0/0", "params/_METADATA"):
        folders.append(tmp_path / f"model{len(folders)}")
        shutil.copytree(converted, folders[-1])
        file = folders[-1] / name
        file.write_bytes(b"\xff" * file.stat().st_size)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_EACH, *map(str, folders)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(folders), done.stdout
    for line, folder in zip(lines, folders, strict=True):
        assert line.startswith(f"{folder / 'params'}: damaged checkpoint (")


def test_gguf_files_load_too(tmp_path: Path, hf_folder: Path, tensors: dict) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", hf_config(), tensors)
    found = checkpoints.load(file, dtype="float32", cache_dir=tmp_path)
    expected = checkpoints.load(hf_folder, dtype="float32", cache_dir=tmp_path)
    assert found.config == expected.config
    for name, leaf in as_numpy(expected).items():
        np.testing.assert_array_equal(as_numpy(found)[name], leaf, err_msg=name)


def test_the_packaged_model(default_model: checkpoints.Checkpoint) -> None:
    config = default_model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert config.rope_theta == 100000.0
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (default_model.tokenizer.eos_token_id,)
    assert default_model.tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert default_model.params.embed.dtype == np.float32


def test_what_a_layer_could_have_is_not_written_down(tmp_path, hf_folder, monkeypatch) -> None:
    """A checkpoint says what is there, so leaves that come to be optional later change nothing; one
    that names what is missing, as they did once, is read as well."""
    new = checkpoints.convert(hf_folder, tmp_path / "new")
    metadata = "params/_METADATA"
    assert "latent" not in (new / metadata).read_text()
    monkeypatch.setattr("checkpoints.arrays._plain", lambda tree: tree)
    old = checkpoints.convert(hf_folder, tmp_path / "old")
    monkeypatch.undo()
    assert "latent" in (old / metadata).read_text()
    expected = as_numpy(checkpoints.load(new, dtype="float32"))
    found = as_numpy(checkpoints.load(old, dtype="float32"))
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)
