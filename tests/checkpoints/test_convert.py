"""Conversion: every leaf exactly once, whole or not at all, one tensor in memory."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf
from safetensors.numpy import save_file

import checkpoints
from checkpoints import hf_folder as hf_module
from checkpoints.conversion import write_checkpoint
from checkpoints.folder import (
    DestinationTaken,
    config_from_json,
    config_to_json,
    is_checkpoint,
    publish,
)
from jspec.config import ModelConfig, RopeScaling
from jspec.errors import JspecError
from jspec.params import leaf_paths


def restored(path: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    params = checkpoints.load(path, dtype=dtype).params
    return {name: np.asarray(leaf) for name, leaf in leaf_paths(params)}


def test_every_leaf_is_a_reshape_of_its_tensor(converted: Path, tensors: dict) -> None:
    leaves = restored(converted)
    expected = {
        "embed": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "lm_head": tensors["lm_head.weight"],
    }
    for i in range(2):
        layer = f"model.layers.{i}."
        expected |= {
            f"layers.{i}.input_norm": tensors[layer + "input_layernorm.weight"],
            f"layers.{i}.post_norm": tensors[layer + "post_attention_layernorm.weight"],
            f"layers.{i}.q": tensors[layer + "self_attn.q_proj.weight"].reshape(4, 8, 24),
            f"layers.{i}.k": tensors[layer + "self_attn.k_proj.weight"].reshape(2, 8, 24),
            f"layers.{i}.v": tensors[layer + "self_attn.v_proj.weight"].reshape(2, 8, 24),
            f"layers.{i}.o": tensors[layer + "self_attn.o_proj.weight"].reshape(24, 4, 8),
            f"layers.{i}.gate": tensors[layer + "mlp.gate_proj.weight"],
            f"layers.{i}.up": tensors[layer + "mlp.up_proj.weight"],
            f"layers.{i}.down": tensors[layer + "mlp.down_proj.weight"],
        }
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("changes", "leaf", "tensor"),
    [
        ({"attention_bias": True}, "layers.1.o_bias", "model.layers.1.self_attn.o_proj.bias"),
        ({"attention_bias": True}, "layers.0.k_bias", "model.layers.0.self_attn.k_proj.bias"),
        ({"mlp_bias": True}, "layers.1.down_bias", "model.layers.1.mlp.down_proj.bias"),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "layers.1.q_bias",
            "model.layers.1.self_attn.q_proj.bias",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            "layers.0.k_norm",
            "model.layers.0.self_attn.k_norm.weight",
        ),
    ],
)
def test_optional_leaves(tmp_path: Path, changes: dict, leaf: str, tensor: str) -> None:
    config = hf_config(**changes)
    tensors = hf_tensors(config)
    write_hf(tmp_path / "in", config, tensors)
    leaves = restored(checkpoints.convert(tmp_path / "in", tmp_path / "out"))
    np.testing.assert_array_equal(leaves[leaf], tensors[tensor].reshape(leaves[leaf].shape))
    assert len(leaves) == len(tensors)


def test_sharded_files_give_the_same(tmp_path: Path, converted: Path, tensors: dict) -> None:
    write_hf(tmp_path / "in", tensors=tensors, shards=3)
    leaves = restored(checkpoints.convert(tmp_path / "in", tmp_path / "out"))
    for name, leaf in restored(converted).items():
        np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)


def test_tied_models_ignore_a_saved_head(tmp_path: Path, tensors: dict) -> None:
    write_hf(tmp_path / "in", hf_config(tie_word_embeddings=True), tensors)
    dest = checkpoints.convert(tmp_path / "in", tmp_path / "out")
    assert "lm_head" not in restored(dest)
    assert checkpoints.load(dest, dtype="float32").params.lm_head is None


def test_known_buffers_are_ignored(tmp_path: Path, tensors: dict) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_hf(tmp_path / "in", tensors={**tensors, name: np.ones(4, np.float32)})
    assert restored(checkpoints.convert(tmp_path / "in", tmp_path / "out"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks the tensor 'model\.norm\.weight'"),
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'",
        ),
        (lambda t: t.pop("lm_head.weight"), r"lacks the tensor 'lm_head\.weight'"),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(24, np.float32)}),
            r"unexpected tensor 'model\.layers\.2\.input_layernorm\.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}),
            r"unexpected tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'",
        ),
        (
            lambda t: t.update({"vision.weight": np.ones(2, np.float32)}),
            r"unexpected tensor 'vision\.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": np.ones((24, 32), "f4")}),
            r"q_proj\.weight' has shape \[24, 32\], but the config needs \[32, 24\]",
        ),
    ],
)
def test_each_leaf_exactly_once(tmp_path: Path, tensors: dict, edit, message: str) -> None:
    tensors = dict(tensors)
    edit(tensors)
    write_hf(tmp_path / "in", tensors=tensors)
    with pytest.raises(JspecError, match=message):
        checkpoints.convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, tensors: dict) -> None:
    folder = write_hf(tmp_path / "in", tensors=tensors, shards=2)
    name = "model.norm.weight"
    for shard in folder.glob("model-*"):
        header = json.loads(shard.read_bytes()[8:].split(b"}}")[0] + b"}}")
        if name not in header:
            half = [t for t in header if t != "__metadata__"]
            save_file({t: tensors[t] for t in [*half, name]}, shard)
    with pytest.raises(JspecError, match=r"'model\.norm\.weight' is there twice"):
        checkpoints.convert(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("file_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_dtypes(tmp_path: Path, dtype: str, file_dtype) -> None:
    tensors = hf_tensors(hf_config(), file_dtype)
    write_hf(tmp_path / "in", tensors=tensors)
    embed = tensors["model.embed_tokens.weight"]
    own = checkpoints.convert(tmp_path / "in", tmp_path / "own")
    cast = checkpoints.convert(tmp_path / "in", tmp_path / "cast", dtype=dtype)
    assert stored_dtype(own) == np.dtype(file_dtype).name
    assert stored_dtype(cast) == dtype
    for dest in (own, cast):
        found = restored(dest, dtype)["embed"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, embed.astype(found.dtype))


def stored_dtype(folder: Path) -> str:
    return json.loads((folder / "params/embed/zarr.json").read_text())["data_type"]


def test_a_value_beyond_float16_is_refused(tmp_path: Path, tensors: dict) -> None:
    big = {**tensors, "model.norm.weight": np.full(24, 1e6, np.float32)}
    write_hf(tmp_path / "in", tensors=big)
    with pytest.raises(JspecError, match=r"'model\.norm\.weight' does not fit float16"):
        checkpoints.convert(tmp_path / "in", tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_unknown_dtype(tmp_path: Path, hf_folder: Path) -> None:
    with pytest.raises(JspecError, match="unknown dtype 'int8': choose one of float32"):
        checkpoints.convert(hf_folder, tmp_path / "out", dtype="int8")


def test_a_taken_destination_costs_no_download(
    tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints.sources.locate", lambda *_: pytest.fail("too late"))
    with pytest.raises(JspecError, match="exists and is not empty"):
        checkpoints.convert("org/name", converted)


def test_a_taken_destination_costs_no_conversion(hf_folder: Path, converted: Path) -> None:
    source = hf_module.open_hf_folder(hf_folder)
    with pytest.raises(JspecError, match="exists and is not empty"):
        write_checkpoint(source, converted, progress=lambda *_: pytest.fail("too late"))


def test_publishing_is_one_rename(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    inode = (tmp_path / "a").stat().st_ino
    with pytest.raises(DestinationTaken, match="something else was put there meanwhile"):
        publish(tmp_path / "a", tmp_path / "b")
    publish(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").stat().st_ino == inode
    assert not (tmp_path / "a").exists()


def test_destination_must_be_free(tmp_path: Path, hf_folder: Path, converted: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("keep me")
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(JspecError, match="exists and is not empty"):
        checkpoints.convert(hf_folder, tmp_path / "full")
    with pytest.raises(JspecError, match="exists and is not a folder"):
        checkpoints.convert(hf_folder, tmp_path / "file")
    with pytest.raises(JspecError, match="already a jspec checkpoint"):
        checkpoints.convert(converted, tmp_path / "out")
    assert (tmp_path / "full" / "x").read_text() == "keep me"
    (tmp_path / "empty").mkdir()
    assert is_checkpoint(checkpoints.convert(hf_folder, tmp_path / "empty"))
    assert is_checkpoint(checkpoints.convert(hf_folder, tmp_path / "new" / "deep"))


def test_progress_counts_bytes(tmp_path: Path, hf_folder: Path, tensors: dict) -> None:
    calls: list[tuple[str, int, int]] = []
    checkpoints.convert(hf_folder, tmp_path / "out", progress=lambda *args: calls.append(args))
    total = sum(array.nbytes for array in tensors.values())
    assert calls[0] == ("converting", 0, total)
    assert calls[-1] == ("converting", total, total)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert len(calls) == 1 + len(tensors)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, hf_folder: Path, error) -> None:
    def stop(_: str, done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        checkpoints.convert(hf_folder, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import checkpoints
def stop(label, done, total):
    if done > total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.convert(sys.argv[1], sys.argv[2], progress=stop)
"""


def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path: Path, hf_folder: Path) -> None:
    dest = tmp_path / "out"
    done = run(KILLED, hf_folder, dest, 0.5)
    assert done.returncode == -9, done.stderr
    remains = list(tmp_path.iterdir())
    assert remains, "it was to be killed amid writing"
    for folder in (dest, *remains):
        with pytest.raises(JspecError):
            checkpoints.load(folder, dtype="float32")
    assert restored(checkpoints.convert(hf_folder, dest))


def run(code: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )


def test_one_tensor_is_alive_at_a_time(tmp_path: Path, hf_folder: Path) -> None:
    alive, most = 0, 0

    def counted(load):
        def inner() -> np.ndarray:
            nonlocal alive, most
            array = load().copy()  # owns its memory, so that views of it keep it alive
            alive += 1
            most = max(most, alive)
            weakref.finalize(array, dropped)
            return array

        return inner

    def dropped() -> None:
        nonlocal alive
        alive -= 1

    source = hf_module.open_hf_folder(hf_folder)
    tensors = [dataclasses.replace(t, load=counted(t.load)) for t in source.tensors]
    write_checkpoint(dataclasses.replace(source, tensors=tuple(tensors)), tmp_path / "out")
    # Two, as the frame that wrote the last one may hold it while the next is read.
    assert 1 <= most <= 2


MEASURED = """
import os, sys
import checkpoints
def resident(*_):
    pages = int(open("/proc/self/statm").read().split()[1])
    sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
sizes = []
checkpoints.convert(sys.argv[1], sys.argv[3] + "/out/small", progress=resident)
before = sizes[-1]
checkpoints.convert(sys.argv[2], sys.argv[3] + "/out/large", progress=resident)
print(max(sizes) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_peak_memory_is_a_few_tensors(tmp_path: Path, hf_folder: Path) -> None:
    """Sampled after every leaf. Not ru_maxrss: a child starts with its parent's."""
    config = hf_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=20)
    tensors = hf_tensors(config)
    total = sum(array.nbytes for array in tensors.values())
    write_hf(tmp_path / "large", config, tensors)
    done = run(MEASURED, hf_folder, tmp_path / "large", tmp_path)
    assert done.returncode == 0, done.stderr
    assert total > 60e6
    assert int(done.stdout) < 15e6  # the largest tensor has 1 MB; the rest is the allocator's


def test_config_round_trip() -> None:
    scaling = RopeScaling("yarn", factor=4.0, attention_factor=1.5, truncate=False)
    config = ModelConfig(
        9, 8, 8, 1, 2, 1, 4, 16, rope_scaling=scaling, bos_token_id=1, eos_token_ids=(2, 3)
    )
    data = json.loads(json.dumps(config_to_json(config)))
    del data["jspec_format"]
    assert config_from_json(data) == config


def test_tokenizer_goes_along(converted: Path, hf_folder: Path) -> None:
    ours, theirs = (checkpoints.Tokenizer.load(f) for f in (converted, hf_folder))
    text = "hello world 42 <|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template


def test_missing_tokenizer(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "in")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(JspecError, match=r"has no tokenizer\.json"):
        checkpoints.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_params_are_on_the_default_device(converted: Path) -> None:
    first, *_, last = jax.devices()
    assert checkpoints.load(converted, dtype="float32").params.embed.devices() == {first}
    with jax.default_device(last):
        assert checkpoints.load(converted, dtype="float32").params.embed.devices() == {last}
