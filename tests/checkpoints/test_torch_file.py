"""Files of `torch.save`, read without torch; torch_golden.bin was written by torch 2.13."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

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


class Storage:
    """What torch would call a storage: written as a persistent id."""

    def __init__(self, kind, key, array):
        self.kind, self.key, self.array = kind, key, array


class Global:
    """A name of a module, whether or not the module exists."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Call:
    """`function(*args)`, to be called when it is unpickled."""

    def __init__(self, module, name, *args):
        self.function, self.args = Global(module, name), args


class Pickler(pickle._Pickler):
    """Pure Python, so that it can write names that cannot be imported here."""

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return ("storage", Global("torch", obj.kind), obj.key, "cpu", obj.array.size)
        return None

    def reducer_override(self, obj):
        return (obj.function, obj.args) if isinstance(obj, Call) else NotImplemented

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.args)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


def write(path, tree, storages=(), *, members=()):
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump(tree)
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.array.tobytes())
        for name, data in members:
            archive.writestr(f"archive/{name}", data)


def tensor(storage, shape, strides, offset=0):
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, strides, False, {})


def test_a_hand_written_file(tmp_path):
    storage = Storage("FloatStorage", "0", np.arange(6, dtype=np.float32))
    write(tmp_path / "x.bin", {"w": tensor(storage, (2, 2), (3, 1), 1)}, [storage])
    (found,) = open_torch(tmp_path / "x.bin")
    np.testing.assert_array_equal(found.load(), [[1, 2], [4, 5]])


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
        ({"w": tensor(Storage("LongStorage", "0", np.arange(4)), (4,), (1,))}, "has dtype int64"),
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
        storages = {n: Storage("FloatStorage", str(j), arrays[n]) for j, n in enumerate(shard)}
        views = {
            n: tensor(s, s.array.shape, tuple(x // 4 for x in s.array.strides))
            for n, s in storages.items()
        }
        write(tmp_path / f"pytorch_model-{i}.bin", views, storages.values())
    index = {n: f"pytorch_model-{i}.bin" for i, shard in enumerate(shards) for n in shard}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(GOLDEN, tmp_path / "training_args.bin")  # is not weights
    found = {t.name: t.load() for t in open_hf_folder(tmp_path).tensors}
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name])
