"""A folder in the Hugging Face layout: config.json, weights, tokenizer files. Weights are
*.safetensors or, where there are none, pytorch_model*.bin.

Knows nothing of downloads (see `hub`) or of what weights are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoints.files import read_json, read_json_or_empty
from checkpoints.hf_config import model_config
from checkpoints.names import llama
from checkpoints.safetensors_file import open_safetensors
from checkpoints.tensors import FileTensor, Source, refuse_other_dtypes
from checkpoints.tokenizer import Tokenizer, has_tokenizer
from checkpoints.torch_file import open_torch
from jspec.errors import JspecError


class Format(NamedTuple):
    """How the weights of a folder are stored."""

    single: str
    """The one file of weights that are not in shards."""
    index_file: str
    """Says which shard holds which tensor."""
    pattern: str
    open: Callable[[Path], Iterator[FileTensor]]


FORMATS = (
    Format("model.safetensors", "model.safetensors.index.json", "*.safetensors", open_safetensors),
    Format("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin", open_torch),
)
"""The first that a folder has is read."""


def format_of(path: Path) -> Format | None:
    """That of the weights in a folder, an index without its shards included."""
    has = (f for f in FORMATS if (path / f.index_file).is_file() or any(path.glob(f.pattern)))
    return next(has, None)


def is_hf_folder(path: Path) -> bool:
    """True where there is a config and at least one file of weights."""
    return (path / "config.json").is_file() and format_of(path) is not None


def open_hf_folder(path: Path) -> Source:
    """The model in the folder, headers read. JspecError names what is missing or damaged."""
    config_file = path / "config.json"
    config = model_config(
        read_json(config_file),
        read_json_or_empty(path / "generation_config.json"),
        name=str(config_file),
    )
    return Source(
        path=path,
        config=config,
        tensors=tuple(_tensors(path)),
        names=llama.HF,
        tokenizer=functools.partial(Tokenizer.load, path) if has_tokenizer(path) else None,
    )


def source_files(path: Path) -> list[Path]:
    """The files whose change makes it another model."""
    patterns = ("*.json", *(f.pattern for f in FORMATS), "*.model", "*.jinja")
    return [file for pattern in patterns for file in path.glob(pattern)]


def _tensors(path: Path) -> Iterator[FileTensor]:
    weights = format_of(path)
    if weights is None:
        return
    for shard, expected in _shards(path, weights).items():
        found = set()
        for tensor in weights.open(path / shard):
            refuse_other_dtypes(path / shard, tensor)
            found.add(tensor.name)
            yield tensor
        for name in sorted(expected - found):
            raise JspecError(
                f"{path / shard}: lacks {name!r}, which {weights.index_file} says it holds"
            )


def _shards(path: Path, weights: Format) -> dict[str, set[str]]:
    """Shard file name -> the tensors that the index says are in it (empty without an index)."""
    index = path / weights.index_file
    if not index.exists():
        return {name: set() for name in unindexed_files(path, weights)}
    shards: dict[str, set[str]] = {}
    for tensor, file in weight_map(index).items():
        shards.setdefault(file, set()).add(tensor)
    for file in shards:
        if not (path / file).is_file():
            raise JspecError(f"{path / file}: missing, but listed in {index.name}; fetch it again")
    return shards


def unindexed_files(path: Path, weights: Format) -> list[str]:
    """The files of weights in a folder without an index."""
    files = sorted(file.name for file in path.glob(weights.pattern))
    # Some repositories ship a whole copy beside the standard name.
    return [weights.single] if weights.single in files else files


def weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the file that holds it, as an index has it. JspecError when it is damaged."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise JspecError(f"{index}: has no weight_map; fetch the file again")
    return {tensor: str(file) for tensor, file in found.items()}
