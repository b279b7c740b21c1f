"""Lazy tensors of files written by `torch.save` (.bin, .pt), without torch. Knows nothing of
models.

Such a file is a zip archive: a pickle that describes the tensors, and one member of raw bytes for
each storage. A pickle can name any function of any module and have it called; the unpickler here
knows the handful that describe tensors and refuses every other, before anything is called.
"""

from __future__ import annotations

import collections
import functools
import math
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.tensors import FileTensor
from jspec.errors import JspecError

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype(np.float16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Storage(NamedTuple):
    """Raw numbers that tensors are views of."""

    key: str
    """Of its member in the archive."""
    dtype: np.dtype
    size: int


class _View(NamedTuple):
    """A tensor as the pickle describes it, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_torch(path: Path) -> Iterator[FileTensor]:
    """Yields each tensor of a state dict, unread, of whatever dtype. JspecError if the file is
    damaged or holds anything but tensors."""
    archive_name, described = _describe(path)
    if not isinstance(described, dict):
        raise JspecError(f"{path}: holds {type(described).__name__}, not a dict of tensors")
    for name, view in described.items():
        if not isinstance(name, str) or not isinstance(view, _View):
            raise JspecError(f"{path}: {name!r} is {type(view).__name__}, not a tensor")
        load = functools.partial(_read, path, f"{archive_name}/data/{view.storage.key}", view)
        yield FileTensor(name, view.shape, view.storage.dtype, load)


def _describe(path: Path) -> tuple[str, Any]:
    """The name of the archive's folder, and what the pickle in it describes."""
    with _open(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise JspecError(f"{path}: was not written by torch.save (no data.pkl in it)")
        folder = pickles[0].removesuffix("/data.pkl")
        byte_order = f"{folder}/byteorder"
        if byte_order in archive.namelist() and archive.read(byte_order).strip() != b"little":
            raise JspecError(f"{path}: was written on a big-endian machine; save it anew")
        with archive.open(pickles[0]) as file:
            try:
                return folder, _Unpickler(file, path).load()
            except JspecError:
                raise
            except Exception as error:  # a damaged pickle can fail in any way
                raise JspecError(f"{path}: damaged ({error}); fetch the file again") from error


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except OSError as error:
        raise JspecError(f"{path}: cannot be read ({error.strerror or error})") from error
    except zipfile.BadZipFile as error:
        raise JspecError(
            f"{path}: truncated, damaged, or written by a torch before 1.6; fetch the file again, "
            "or load and save it with a newer torch"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Builds dicts, numbers, strings and descriptions of tensors, and nothing else."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _view,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in known:
            raise JspecError(
                f"{self._path}: refused, since it would call {module}.{name}; only tensors are "
                "loaded from such files. Convert it to safetensors if you trust it"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _location, size = pid
        if kind != "storage" or storage not in _STORAGES:
            raise ValueError(f"storage {storage!r} of kind {kind!r}")
        return _Storage(str(key), _STORAGES[storage], int(size))


def _view(storage: Any, offset: int, shape: Any, strides: Any, *_rest: Any) -> _View:
    """`torch._utils._rebuild_tensor_v2`."""
    view = _View(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    last = view.offset + sum(
        (n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True)
    )
    is_inside = min((0, view.offset, *view.shape, *view.strides)) == 0
    if math.prod(view.shape) and not (is_inside and last < storage.size):
        raise ValueError(f"a tensor of shape {view.shape} reaches beyond its storage")
    return view


def _parameter(view: _View, *_rest: Any) -> _View:
    """`torch._utils._rebuild_parameter`."""
    return view


def _read(path: Path, member: str, view: _View) -> np.ndarray:
    """Opens the file anew, so that pages read for one tensor are given back before the next."""
    with _open(path) as archive:
        try:
            numbers = np.frombuffer(archive.read(member), view.storage.dtype)
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise JspecError(f"{path}: damaged ({error}); fetch the file again") from error
    if numbers.size < view.storage.size:
        raise JspecError(f"{path}: {member} is cut off; fetch the file again")
    steps = tuple(stride * numbers.itemsize for stride in view.strides)
    strided = np.lib.stride_tricks.as_strided(
        numbers[view.offset :], view.shape, steps, writeable=False
    )
    return np.array(strided, order="C")
