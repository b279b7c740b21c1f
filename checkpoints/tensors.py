"""What every readable model looks like: settings, named lazy tensors, a tokenizer.

Knows nothing of any file format (see `hf_folder`, `gguf_file`) nor of where a model came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from checkpoints.names import NameTable
from jspec.config import ModelConfig
from jspec.errors import JspecError

if TYPE_CHECKING:
    from checkpoints.tokenizer import Tokenizer

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""The dtypes that weights may be stored and loaded in."""
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
"""Of weights that are stored beside their scales."""


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor that is still in its file."""

    name: str
    """As the file calls it."""
    shape: tuple[int, ...]
    dtype: np.dtype
    """What `load` gives: for quantised files the dtype after dequantisation. Files have tensors of
    other dtypes than `DTYPES`, too: see `refuse_other_dtypes`."""
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size of the loaded array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Source:
    """A model whose headers have been read and whose weights have not."""

    path: Path
    config: ModelConfig
    tensors: tuple[FileTensor, ...]
    names: NameTable
    tokenizer: Callable[[], Tokenizer] | None
    """None: it has none, as a draft model may."""


def as_dtype(name: str) -> np.dtype:
    """The numpy dtype called `name`; JspecError for one that weights can't have."""
    if name not in DTYPES:
        raise JspecError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def refuse_other_dtypes(file: Path, tensor: FileTensor) -> None:
    """JspecError unless `tensor` has a dtype that weights can have; `file` is for the message."""
    if tensor.dtype not in DTYPES.values():
        raise JspecError(
            f"{file}: {tensor.name!r} has dtype {tensor.dtype}; "
            f"only {', '.join(DTYPES)} can be converted"
        )
