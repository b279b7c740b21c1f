"""Where the tensors of a draft head are: in a folder or one file, alone or within a whole model.

Knows nothing of settings, nor of how a head computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.files import read_json_or_empty
from checkpoints.folder import CONFIG_FILE
from checkpoints.hf_folder import FORMATS, format_of, unindexed_files, weight_map
from checkpoints.names.heads import HeadNames, exit_layers, exits, layout_of, nextn
from checkpoints.safetensors_file import open_safetensors
from checkpoints.sources import shipped_path
from checkpoints.tensors import FLOAT8, FileTensor
from checkpoints.torch_file import open_torch
from jspec.errors import JspecError

MEDUSA_FILE = "medusa_lm_head.pt"
SUPPORTED = "EAGLE, EAGLE-2, EAGLE-3, MTP and Medusa heads, trained exits"

_OPENERS = {".safetensors": open_safetensors} | dict.fromkeys((".bin", ".pt", ".pth"), open_torch)
_SCALE, _BLOCK = "_scale_inv", 128
"""DeepSeek's 8-bit weights: behind a weight's name, the factor of each square of so many rows and
columns (the README of its DeepSeek-V3 weights)."""
_UNSUPPORTED = {
    r"\.linear_attn\.": "linear attention",
    r"^mask_hidden$": "parallel drafting (P-EAGLE)",
    r"(^|\.)\d+\.[1-9]\d*\.linear\.|(^|\.)blocks\.\d+\.layers\.[1-9]": (
        "a second residual block of a Medusa head"
    ),
}
"""Patterns of names that only a head of a kind that we cannot run has."""


class HeadSource(NamedTuple):
    """A head on this machine; its weights are unread."""

    path: Path
    settings: dict[str, Any]
    """config.json, {} where there is none."""
    names: HeadNames
    tensors: dict[str, FileTensor]
    """By the name in the file; 8-bit weights are dequantised when loaded."""


def open_source(source: str | Path) -> HeadSource:
    """The head in a folder or file, of whose tensors the headers are read. JspecError when there
    is none, it is of a kind that we cannot run, or a file is damaged."""
    path = shipped_path(source)
    settings = read_json_or_empty(settings_file(path))
    files = tensor_files(path)
    names = layout_of(files)
    if names is None:
        raise JspecError(f"{path}: {_what_it_is(settings, files)}; supported: {SUPPORTED}")
    if names.family == "mtp":
        names = _one_module(path, names, list(files))
    if names.family == "exits":
        names = exits(exit_layers(files))
    owned = {name: file for name, file in files.items() if re.fullmatch(names.owned, name)}
    refuse_unsupported(path, owned)
    return HeadSource(path, settings, names, _dequantised(path, _opened(owned)))


def settings_file(path: Path) -> Path:
    """The config.json in a folder, or beside a file."""
    return (path if path.is_dir() else path.parent) / CONFIG_FILE


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> its file, for all tensors there are. Reads an index, or else headers."""
    if path.is_file():
        files = [path]
    elif not path.is_dir():
        raise JspecError(f"{path}: no such file or folder; give the folder of a draft head")
    elif (path / MEDUSA_FILE).is_file():
        files = [path / MEDUSA_FILE]
    else:
        weights = format_of(path)
        if weights is None:
            expected = ", ".join([f.single for f in FORMATS])
            raise JspecError(f"{path}: has no weights ({expected} or {MEDUSA_FILE})")
        index = path / weights.index_file
        if index.is_file():
            return {name: path / file for name, file in weight_map(index).items()}
        files = [path / name for name in unindexed_files(path, weights)]
    return {tensor.name: file for file in files for tensor in _open(file)}


def refuse_unsupported(path: Path, names: Iterable[str]) -> None:
    """JspecError, which names the tensor, for a kind of layer or head that we cannot run."""
    for name in names:
        for pattern, kind in _UNSUPPORTED.items():
            if re.search(pattern, name):
                raise JspecError(
                    f"{path}: {name!r} belongs to {kind}, which is not supported; only layers with "
                    "softmax attention and single residual blocks are"
                )


def _what_it_is(settings: dict[str, Any], files: dict[str, Path]) -> str:
    """What was found in place of a head, for a message."""
    kind = settings.get("speculators_model_type")
    if kind:
        return f"holds a speculator of the type {kind!r}, which is not supported"
    named = settings.get("architectures") or [settings.get("model_type", "unknown")]
    first = next(iter(files), None)
    return f"holds no draft head (architecture {named[0]}, first tensor {first!r})"


def _one_module(path: Path, names: HeadNames, files: list[str]) -> HeadNames:
    """`names` for the one MTP module there is. JspecError where there are several, each with
    weights of its own for another draft step."""
    marks = [name for name in files if re.fullmatch(names.marks, name)]
    if len(marks) > 1:
        raise JspecError(
            f"{path}: holds {len(marks)} MTP modules ({marks[0]!r}, {marks[1]!r}, ...); "
            "only one, which drafts all tokens, is supported"
        )
    layer = re.match(r"model\.layers\.(\d+)\.", marks[0])
    return names if layer is None else nextn(layer[1])


def _open(file: Path) -> list[FileTensor]:
    opener = _OPENERS.get(file.suffix)
    if opener is None:
        raise JspecError(f"{file}: not a file of a draft head; give one of {', '.join(_OPENERS)}")
    return list(opener(file))


def _opened(files: dict[str, Path]) -> dict[str, FileTensor]:
    """The tensors of these names, from these files and no others."""
    found = {}
    for file in dict.fromkeys(files.values()):
        if not file.is_file():
            raise JspecError(f"{file}: missing, but listed in the index beside it; fetch it again")
        held = {tensor.name: tensor for tensor in _open(file)}
        for name in (name for name, place in files.items() if place == file):
            if name not in held:
                raise JspecError(f"{file}: lacks {name!r}, which the index says it holds")
            found[name] = held[name]
    return found


def _dequantised(path: Path, tensors: dict[str, FileTensor]) -> dict[str, FileTensor]:
    """`tensors`, but 8-bit weights and their scales as one tensor each, in float32."""
    weights = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != FLOAT8:
            continue
        scale = weights.pop(name + _SCALE, None)
        blocks = tuple(math.ceil(size / _BLOCK) for size in tensor.shape)
        if scale is None or scale.shape != blocks or len(blocks) != 2:
            raise JspecError(
                f"{path}: {name!r} is in float8 without a factor for each {_BLOCK} x {_BLOCK} "
                f"block ({name + _SCALE!r}); use the unquantised head"
            )
        weights[name] = _scaled(tensor, scale)
    return weights


def _scaled(tensor: FileTensor, scale: FileTensor) -> FileTensor:
    def load() -> np.ndarray:
        factors = scale.load().astype(np.float32).repeat(_BLOCK, 0).repeat(_BLOCK, 1)
        rows, columns = tensor.shape
        return tensor.load().astype(np.float32) * factors[:rows, :columns]

    return FileTensor(tensor.name, tensor.shape, np.dtype(np.float32), load)
