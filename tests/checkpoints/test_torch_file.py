"""Files of `torch.save`, read without torch; torch_golden.bin was written by torch 2.13."""

import json
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from torch_files import Call, Storage, tensor, write, write_arrays

from checkpoints.hf_folder import open_hf_folder
from checkpoints.torch_file import open_torch
from jspec.errors import JspecError

GOLDEN = Path(__file__).with_name("torch_golden.bin")


def test_tensors_are_those_that_torch_wrote():
    """Views, shared storages, a parameter, a scalar, an empty tensor, an attribute of the dict."""
    expected = json.loads(GOLDEN.with_suffix(".json").read_text())
    found = {tensor.name: tensor for tensor in open_torch(GOLDEN)}
    assert list(found) == list(expected)
    for name, values in expected.items():
        array = found[name].load()
        assert array.shape == found[name].shape
        assert array.dtype == found[name].dtype
        assert array.flags.c_contiguous
        assert array.astype(np.float64).tolist() == values
    assert found["bfloat16"].dtype == ml_dtypes.bfloat16
    assert found["float16"].dtype == np.float16


def test_a_hand_written_file(tmp_path):
    storage = Storage("FloatStorage", "0", np.arange(6, dtype=np.float32))
    write(tmp_path / "x.bin", {"w": tensor(storage, (2, 2), (3, 1), 1)}, [storage])
    (found,) = open_torch(tmp_path / "x.bin")
    np.testing.assert_array_equal(found.load(), [[1, 2], [4, 5]])


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint8", "bool", "float64", "bfloat16"]
)
def test_other_dtypes(tmp_path, dtype):
    """Read as they are; what may be a weight is not for the reader of files to say."""
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(ml_dtypes.bfloat16 if "bf" in dtype else dtype)
    write_arrays(tmp_path / "x.bin", {"d2t": array, "scalar": np.array(array[1, 2])})
    first, second = open_torch(tmp_path / "x.bin")
    assert (first.dtype, first.shape, second.shape) == (array.dtype, (2, 3), ())
    assert first.load().dtype == array.dtype
    np.testing.assert_array_equal(first.load(), array)
    assert second.load() == array[1, 2]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_tensor"),
        ("collections", "Counter"),
        ("pathlib", "Path"),
    ],
)
def test_nothing_but_tensors_is_built(tmp_path, module, name):
    """Refused when it is named, before it could be called."""
    path = tmp_path / "evil.bin"
    write(path, {"w": Call(module, name, f"touch {tmp_path}/done")})
    with pytest.raises(JspecError, match=f"refused, since it would call {module}.{name}"):
        list(open_torch(path))
    assert not (tmp_path / "done").exists()


NUMBERS = Storage("FloatStorage", "0", np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1, 2], "holds list, not a dict of tensors"),
        ({"epoch": 3}, "'epoch' is int, not a tensor"),
        ({"w": {"deep": tensor(NUMBERS, (4,), (1,))}}, "'w' is dict, not a tensor"),
        ({3: tensor(NUMBERS, (4,), (1,))}, "3 is _View, not a tensor"),
        ({"w": tensor(NUMBERS, (5,), (1,))}, "reaches beyond its storage"),
        ({"w": tensor(NUMBERS, (2, 2), (3, 1))}, "reaches beyond its storage"),
        ({"w": tensor(NUMBERS, (4,), (1,), 1)}, "reaches beyond its storage"),
        ({"w": tensor(NUMBERS, (2,), (-1,), 3)}, "reaches beyond its storage"),
        ({"w": tensor(Storage("QInt8Storage", "0", np.arange(4)), (4,), (1,))}, "QInt8Storage"),
    ],
)
def test_what_is_no_dict_of_weights_is_refused(tmp_path, tree, message):
    write(tmp_path / "x.bin", tree, [NUMBERS])
    with pytest.raises(JspecError, match=message):
        list(open_torch(tmp_path / "x.bin"))


def test_damaged_files(tmp_path):
    path = tmp_path / "x.bin"
    with pytest.raises(JspecError, match="cannot be read"):
        list(open_torch(path))
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # how old files begin
    with pytest.raises(JspecError, match=r"before 1\.6"):
        list(open_torch(path))
    path.write_bytes(GOLDEN.read_bytes()[:1500])
    with pytest.raises(JspecError, match="truncated"):
        list(open_torch(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "")
    with pytest.raises(JspecError, match=r"not written by torch\.save"):
        list(open_torch(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00X")
    with pytest.raises(JspecError, match="damaged"):
        list(open_torch(path))
    short = Storage("FloatStorage", "0", NUMBERS.array[:2])
    write(path, {"w": tensor(NUMBERS, (4,), (1,))}, [short])
    with pytest.raises(JspecError, match="cut off"):
        next(open_torch(path)).load()
    write(path, {"w": tensor(NUMBERS, (4,), (1,))})
    with pytest.raises(JspecError, match="damaged"):
        next(open_torch(path)).load()
    write(path, {"w": tensor(NUMBERS, (4,), (1,))}, [NUMBERS], members=[("byteorder", "big")])
    with pytest.raises(JspecError, match="big-endian"):
        list(open_torch(path))


def test_integers_are_no_weights(tmp_path):
    from checkpoint_files import hf_config, write_hf

    folder = write_hf(tmp_path / "in", hf_config())
    (folder / "model.safetensors").unlink()
    write_arrays(folder / "pytorch_model.bin", {"model.norm.weight": np.arange(24)})
    with pytest.raises(JspecError, match=r"'model\.norm\.weight' has dtype int64; only float32"):
        open_hf_folder(folder)


def test_a_folder_without_safetensors_is_read_from_its_bin_file(tmp_path):
    from checkpoint_files import hf_config, hf_tensors, write_hf

    config = hf_config()
    write_hf(tmp_path, config)
    tensors = {t.name: t.load() for t in open_hf_folder(tmp_path).tensors}
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    arrays = hf_tensors(config)
    names = sorted(arrays)
    shards = [names[::2], names[1::2]]
    for i, shard in enumerate(shards):
        write_arrays(tmp_path / f"pytorch_model-{i}.bin", {name: arrays[name] for name in shard})
    index = {n: f"pytorch_model-{i}.bin" for i, shard in enumerate(shards) for n in shard}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(GOLDEN, tmp_path / "training_args.bin")  # is not weights
    found = {t.name: t.load() for t in open_hf_folder(tmp_path).tensors}
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name])
