"""Our folder of a model: config.json, params/ (Orbax), tokenizer files.

It appears whole or not at all. Knows nothing of other formats, nor of how params are stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints.files import read_json
from jspec.config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from jspec.errors import JspecError

FORMAT = 1
"""Version of the folder's layout; another number is refused."""
FORMAT_KEY, CONFIG_FILE, PARAMS_FOLDER = "jspec_format", "config.json", "params"

PARTIAL = ".partial"


class DestinationTaken(JspecError):
    """Another process wrote the same destination first."""


def is_checkpoint(path: Path) -> bool:
    """True for a folder that `write_checkpoint` made (whole or since damaged)."""
    if not (path / CONFIG_FILE).is_file():
        return False
    try:
        return FORMAT_KEY in read_json(path / CONFIG_FILE)
    except JspecError:
        # A damaged config beside our params: let `read_config` say what is wrong with it.
        return (path / PARAMS_FOLDER).is_dir()


def read_config(path: Path) -> ModelConfig:
    """The settings in a folder of ours. JspecError when they are damaged or of another version."""
    file = path / CONFIG_FILE
    data = read_json(file)
    if data.pop(FORMAT_KEY, None) != FORMAT:
        raise JspecError(f"{file}: written by another version of jspec; convert the model again")
    try:
        return config_from_json(data)
    except (TypeError, ValueError) as error:
        raise JspecError(f"{file}: invalid ({error}); convert the model again") from error


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The config as JSON values, with the version of the format."""
    return {FORMAT_KEY: FORMAT, **dataclasses.asdict(config)}


def config_from_json(data: dict[str, Any]) -> ModelConfig:
    """The inverse of `config_to_json` (less the version). TypeError for unknown fields."""
    nested = {"rope_scaling": RopeScaling, "latent": LatentConfig, "experts": ExpertsConfig}
    parts = {key: kind(**data[key]) for key, kind in nested.items() if data.get(key) is not None}
    return ModelConfig(**{**data, **parts, "eos_token_ids": tuple(data.get("eos_token_ids", ()))})


def refuse_existing(dest: Path) -> None:
    """JspecError unless `dest` is free: absent, or an empty folder."""
    if dest.is_symlink() or (dest.exists() and not dest.is_dir()):
        raise JspecError(f"{dest}: exists and is not a folder; choose another destination")
    if dest.is_dir() and any(dest.iterdir()):
        raise JspecError(
            f"{dest}: exists and is not empty; remove it or choose another destination"
        )


@contextlib.contextmanager
def temporary_sibling(dest: Path) -> Iterator[Path]:
    """A new folder beside `dest`, on the same file system; gone afterwards if still there.

    Its name begins with a dot and ends in `.partial`; a killed process leaves it behind.
    """
    folder = dest.parent / f".{dest.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, dest: Path) -> None:
    """Renames `folder` to `dest` in one step. DestinationTaken when there is one by now."""
    try:
        folder.rename(dest)
    except OSError as error:
        if not dest.exists():
            raise
        raise DestinationTaken(f"{dest}: something else was put there meanwhile") from error
