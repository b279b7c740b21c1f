"""A folder in the Hugging Face layout: config.json, *.safetensors, tokenizer files.

Knows nothing of downloads (see `hub`) or of what weights are for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from checkpoints import safetensors_file
from checkpoints.files import read_json, read_json_or_empty
from checkpoints.hf_config import model_config
from checkpoints.names import llama
from checkpoints.tensors import FileTensor, Source
from checkpoints.tokenizer import Tokenizer
from jspec.errors import JspecError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def is_hf_folder(path: Path) -> bool:
    """True where there is a config and at least one safetensors file."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


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
        tokenizer=functools.partial(Tokenizer.load, path),
    )


def source_files(path: Path) -> list[Path]:
    """The files whose change makes it another model."""
    patterns = ("*.json", "*.safetensors", "*.model", "*.jinja")
    return [file for pattern in patterns for file in path.glob(pattern)]


def _tensors(path: Path) -> Iterator[FileTensor]:
    for shard, expected in _shards(path).items():
        found = set()
        for tensor in safetensors_file.open_safetensors(path / shard):
            found.add(tensor.name)
            yield tensor
        for name in sorted(expected - found):
            raise JspecError(f"{path / shard}: lacks {name!r}, which {INDEX} says it holds")


def _shards(path: Path) -> dict[str, set[str]]:
    """Shard file name -> the tensors that the index says are in it (empty without an index)."""
    if not (path / INDEX).exists():
        files = sorted(file.name for file in path.glob("*.safetensors"))
        # Some repositories ship a whole copy beside the standard name.
        return {name: set() for name in ([SINGLE] if SINGLE in files else files)}
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise JspecError(f"{path / INDEX}: has no weight_map; fetch the file again")
    shards: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        shards.setdefault(str(file), set()).add(tensor)
    for file in shards:
        if not (path / file).is_file():
            raise JspecError(f"{path / file}: missing, but listed in {INDEX}; fetch it again")
    return shards
