"""Lazy tensors of safetensors files. Knows nothing of models."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.tensors import DTYPES, FLOAT8, FileTensor
from jspec.errors import JspecError

_DTYPES = {
    "F32": DTYPES["float32"],
    "BF16": DTYPES["bfloat16"],
    "F16": DTYPES["float16"],
    "F8_E4M3": FLOAT8,
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def open_safetensors(path: Path) -> Iterator[FileTensor]:
    """Yields each tensor of the file, unread, of whatever dtype numpy has. JspecError unless the
    file is whole."""
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            header = file.get_slice(name)
            kind, shape = header.get_dtype(), tuple(header.get_shape())
            if kind not in _DTYPES:
                raise JspecError(
                    f"{path}: {name!r} has dtype {kind}; only {', '.join(_DTYPES)} can be read"
                )
            # The library reads no 8-bit floats into numpy.
            read = _read_bytes if kind == "F8_E4M3" else _read
            yield FileTensor(name, shape, _DTYPES[kind], functools.partial(read, path, name))


def _open(path: Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework="np")
    except OSError as error:
        raise JspecError(f"{path}: cannot be read ({error.strerror or error})") from error
    except safetensors.SafetensorError as error:
        raise JspecError(f"{path}: truncated or damaged ({error}); fetch the file again") from error


def _read(path: Path, name: str) -> np.ndarray:
    """Opens the file anew, so that pages read for one tensor are given back before the next."""
    with _open(path) as file:
        return file.get_tensor(name)


def _read_bytes(path: Path, name: str) -> np.ndarray:
    """As `_read` for 8-bit floats: what the header says, straight from the file. `_open` has found
    the file to be whole."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))[name]
        file.seek(header["data_offsets"][0], 1)
        numbers = np.fromfile(file, FLOAT8, math.prod(header["shape"]))
    return numbers.reshape(header["shape"])
