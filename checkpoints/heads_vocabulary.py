"""Which of the target's tokens a draft head knows, as its files have it: d2t, t2d, token_map.

Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints.tensors import FileTensor
from jspec.errors import JspecError


def token_ids_of(
    path: Path, tensors: Mapping[str, FileTensor], vocab_size: int
) -> np.ndarray | None:
    """`[draft V]` int32, the target's token of each draft token; None if a head knows them all.

        d2t        0 1 1 4      offsets: 0 + 0, 1 + 1, 2 + 1, 3 + 4
        token_map  0 2 3 7      the same as ids
        t2d        1 0 1 1 0 0 0 1

    JspecError when they are no tokens of the target, or contradict one another.
    """
    if "token_map" in tensors:
        ids = _integers(path, tensors["token_map"])
    elif "d2t" in tensors:
        offsets = _integers(path, tensors["d2t"])
        ids = offsets + np.arange(len(offsets))
    elif "t2d" in tensors:
        raise JspecError(f"{path}: has 't2d' but lacks 'd2t'; fetch the head again")
    else:
        return None
    _check_range(path, ids, vocab_size)
    if len(ids) == vocab_size:
        if not np.array_equal(ids, np.arange(vocab_size)):
            raise JspecError(f"{path}: 'd2t' permutes the whole vocabulary; it must be zero")
        return None
    if "t2d" in tensors:
        _check_mask(path, tensors["t2d"], ids, vocab_size)
    return ids.astype(np.int32)


def to_offsets(token_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors d2t (int64) and t2d (bool) of `token_ids`: the inverse of `token_ids_of`."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[token_ids] = True
    return {"d2t": token_ids.astype(np.int64) - np.arange(len(token_ids)), "t2d": mask}


def _integers(path: Path, tensor: FileTensor) -> np.ndarray:
    if len(tensor.shape) != 1 or not np.issubdtype(tensor.dtype, np.integer):
        raise JspecError(
            f"{path}: {tensor.name!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
            "but must be integers in one axis; fetch the head again"
        )
    return tensor.load().astype(np.int64)


def _check_range(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        found = f"tokens {ids.min()} to {ids.max()}" if len(ids) else "no token"
        raise JspecError(
            f"{path}: the draft vocabulary holds {found}, but the target has {vocab_size}; "
            "give the head of this target"
        )
    if len(np.unique(ids)) != len(ids):
        raise JspecError(f"{path}: the draft vocabulary holds a token twice; fetch the head again")


def _check_mask(path: Path, mask: FileTensor, ids: np.ndarray, vocab_size: int) -> None:
    if mask.shape != (vocab_size,):
        raise JspecError(
            f"{path}: 't2d' has shape {list(mask.shape)}, but the target has {vocab_size} tokens; "
            "give the head of this target"
        )
    if not np.array_equal(np.flatnonzero(mask.load()), np.sort(ids)):
        raise JspecError(f"{path}: 't2d' and 'd2t' name different tokens; fetch the head again")
