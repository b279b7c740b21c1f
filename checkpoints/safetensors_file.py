"""Lazy tensors of safetensors files. Knows nothing of models."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.tensors import DTYPES, FileTensor
from jspec.errors import JspecError

_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}


def open_safetensors(path: Path) -> Iterator[FileTensor]:
    """Yields each tensor of the file, unread. JspecError unless the file is whole."""
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            header = file.get_slice(name)
            kind, shape = header.get_dtype(), tuple(header.get_shape())
            if kind not in _DTYPES:
                raise JspecError(
                    f"{path}: {name!r} has dtype {kind}; only {', '.join(_DTYPES)} can be converted"
                )
            yield FileTensor(name, shape, _DTYPES[kind], functools.partial(_read, path, name))


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
