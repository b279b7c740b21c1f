"""Files as `torch.save` writes them, made without torch."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

KINDS = {
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


class Storage:
    """What torch would call a storage: written as a persistent id."""

    def __init__(self, kind: str, key: str, array: np.ndarray) -> None:
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


def write(
    path: Path,
    tree: Any,
    storages: Iterable[Storage] = (),
    *,
    members: Iterable[tuple[str, bytes | str]] = (),
) -> None:
    """A file with `tree` pickled, its storages, and more members of the archive."""
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            Pickler(file, protocol=2).dump(tree)
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.array.tobytes())
        for name, data in members:
            archive.writestr(f"archive/{name}", data)


def tensor(
    storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> Call:
    """A view of a storage, in elements."""
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, strides, False, {})


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A state dict with a storage for each tensor."""
    storages = {
        name: Storage(KINDS[array.dtype], str(i), np.array(array, order="C"))
        for i, (name, array) in enumerate(arrays.items())
    }
    views = {
        name: tensor(s, s.array.shape, tuple(n // s.array.itemsize for n in s.array.strides))
        for name, s in storages.items()
    }
    write(path, views, storages.values())
