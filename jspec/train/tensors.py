"""Named arrays in one file, in the safetensors format, read through the page cache.

Knows nothing of what the arrays are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jspec.errors import JspecError

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
}
_LENGTH = 8
"""Bytes of the header's length, in front of it."""


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of a file with `arrays`; the same arrays give the same bytes."""
    from safetensors.numpy import save

    return save({name: np.asarray(values, order="C") for name, values in arrays.items()})


def open_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file, mapped and not read. JspecError names a file that is not whole."""
    try:
        content = np.memmap(path, np.uint8, mode="r")
        start = _LENGTH + int(content[:_LENGTH].view("<u8")[0])
        header = json.loads(bytes(content[_LENGTH:start]))
        header.pop("__metadata__", None)
        if start + max(entry["data_offsets"][1] for entry in header.values()) != content.size:
            raise ValueError("not as long as its header says")
        return {
            name: content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
            .view(_DTYPES[entry["dtype"]])
            .reshape(entry["shape"])
            for name, entry in header.items()
        }
    except FileNotFoundError:
        raise JspecError(f"{path}: no such file") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise JspecError(f"{path}: truncated or damaged ({error}); make it again") from None
