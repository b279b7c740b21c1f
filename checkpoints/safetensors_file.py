"""Headers and lazy tensors of safetensors files. Knows nothing of models.

Read by hand rather than with `safetensors`: the format is a length, a JSON header and raw bytes,
and so bfloat16 needs no torch, one tensor is one read (no mapped pages that count as memory), and
damage is found, and named, before any weight is converted.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.tensors import DTYPES, FileTensor
from jspec.errors import JspecError

_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
_MAX_HEADER = 100_000_000  # the limit of the reference implementation


def open_safetensors(path: Path) -> Iterator[FileTensor]:
    """Yields each tensor of the file, unread. JspecError unless the file is whole."""
    header, data_start = _header(path)
    total = 0
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(path, name, entry)
        size = int(np.prod(shape, dtype=np.int64))
        if dtype.itemsize * size != end - begin:
            raise _damaged(path, f"the size of {name!r} does not fit its shape")
        total = max(total, data_start + end)
        load = functools.partial(_read, path, dtype, shape, data_start + begin)
        yield FileTensor(name, shape, dtype, load)
    if path.stat().st_size < total:
        raise _damaged(path, f"{path.stat().st_size} bytes of {total}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, path.stat().st_size - 8):
                raise _damaged(path, "no header")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except OSError as error:
        raise JspecError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, JspecError):
            raise
        raise _damaged(path, f"invalid header: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name may come twice."""
    for name, count in collections.Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name!r} is there twice")
    return dict(pairs)


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes_are_sane = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"the header entry of {name!r} is malformed") from error
    if not sizes_are_sane:
        raise _damaged(path, f"the header entry of {name!r} is malformed")
    if kind not in _DTYPES:
        raise JspecError(
            f"{path}: {name!r} has dtype {kind}; only {', '.join(_DTYPES)} can be converted"
        )
    return _DTYPES[kind], shape, (begin, end)


def _read(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64))
    array = np.fromfile(path, np.uint8, size * dtype.itemsize, offset=offset)
    if array.size != size * dtype.itemsize:
        raise _damaged(path, "it became shorter while it was read")
    return array.view(dtype).reshape(shape)


def _damaged(path: Path, detail: str) -> JspecError:
    return JspecError(f"{path}: truncated or damaged ({detail}); fetch the file again")
