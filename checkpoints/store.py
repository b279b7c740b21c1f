"""Loading a model by any name, through a cache of converted checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from checkpoints import arrays, sources
from checkpoints.conversion import Progress, write_checkpoint
from checkpoints.folder import (
    FORMAT,
    PARAMS_FOLDER,
    PARTIAL,
    DestinationTaken,
    is_checkpoint,
    read_config,
    refuse_existing,
)
from checkpoints.sources import Located, Report
from checkpoints.tensors import as_dtype
from checkpoints.tokenizer import Tokenizer
from jspec.config import ModelConfig
from jspec.params import Params, leaf_paths, param_specs

_STALE_SECONDS = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded model."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    path: Path
    """The folder of ours that it was restored from."""


def load(
    model: str | Path,
    *,
    dtype: str,
    mesh: Mesh | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Checkpoint:
    """The model with its weights in `dtype`, on `mesh` by the sharding rules.

    `model` is a folder, a GGUF file, a Hub id or the packaged name. What is not in our format is
    converted once, into `cache_dir` (default: the user's cache folder). Without a mesh the weights
    are on the default device. `report` gets lines for people, `progress` (label, bytes done, bytes
    in all). JspecError for what the user can put right.
    """
    located, cache = _located(model, cache_dir, report)
    sources.require_tokenizer(located)
    folder, config, params = _loaded(located, as_dtype(dtype), mesh, cache, progress)
    return Checkpoint(config, params, Tokenizer.load(folder), folder)


def load_weights(
    model: str | Path,
    *,
    dtype: str,
    mesh: Mesh | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> tuple[ModelConfig, Params]:
    """As `load`, of a model that need not have a tokenizer: a draft model speaks its target's
    tokens. Names of those that come with this package are models, too."""
    located, cache = _located(model, cache_dir, report)
    return _loaded(located, as_dtype(dtype), mesh, cache, progress)[1:]


def _located(
    model: str | Path, cache_dir: str | Path | None, report: Report | None
) -> tuple[Located, Path]:
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)
    return sources.locate(model, cache, report or _silent), cache


def _loaded(
    located: Located, target: np.dtype, mesh: Mesh | None, cache: Path, progress: Progress | None
) -> tuple[Path, ModelConfig, Params]:
    """The folder of ours, and what is in it."""
    if located.kind == "jspec":
        folder = located.path
    else:
        folder = _converted(located, target, cache, progress)
    config = read_config(folder)
    return folder, config, _restored(folder, config, target, mesh, progress or _no_progress)


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    dtype: str | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Path:
    """`dest` is a checkpoint of ours of `source` (any name `load` takes); returns its path.

    Weights are in `dtype`, by default the file's own (float32 for quantised files). One tensor is
    in memory at a time. When it fails or is killed there is no `dest`.
    """
    dest = Path(dest).expanduser().absolute()
    refuse_existing(dest)  # before any download
    if dtype is not None:
        as_dtype(dtype)
    located, _ = _located(source, cache_dir, report)
    sources.require_tokenizer(located)
    write_checkpoint(sources.open_source(located), dest, dtype, progress)
    return dest


def default_cache_dir() -> Path:
    """Where converted and fetched models are kept: the user's cache folder for jspec."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("jspec"))


def _converted(located: Located, target: np.dtype, cache: Path, progress: Progress | None) -> Path:
    """The folder in the cache that holds `located` exactly as `target` needs it.

    A copy in the file's own dtypes serves every target, so it is made whenever it is not larger
    than one in `target`; else the copy is in `target`.
    """
    slug = re.sub(r"[^\w.-]+", "--", located.name)
    # The version is in the name: another version of jspec converts again and disturbs nobody.
    stem = cache / f"converted-{FORMAT}" / f"{slug}-{sources.fingerprint(located)}"
    as_is, narrow = (stem.with_name(f"{stem.name}-{kind}") for kind in ("source", target.name))
    for folder in (as_is, narrow):
        if is_checkpoint(folder):
            return folder
    source = sources.open_source(located)
    widens = all(tensor.dtype.itemsize <= target.itemsize for tensor in source.tensors)
    folder, dtype = (as_is, None) if widens else (narrow, target.name)
    _sweep(folder.parent)
    # When two processes convert the same model, the second to finish uses the first one's.
    with contextlib.suppress(DestinationTaken):
        write_checkpoint(source, folder, dtype, progress)
    return folder


def _restored(
    folder: Path, config: ModelConfig, target: np.dtype, mesh: Mesh | None, progress: Progress
) -> Params:
    specs = param_specs(config)
    total = target.itemsize * sum(math.prod(spec.shape) for _, spec in leaf_paths(specs))
    progress("loading", 0, total)
    params = arrays.read_params(folder / PARAMS_FOLDER, specs, target, mesh)
    progress("loading", total, total)
    return params


def _sweep(folder: Path) -> None:
    """No remains of conversions that were killed a day ago or longer are in `folder`."""
    for partial in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _silent(_: str) -> None:
    pass


def _no_progress(_label: str, _done: int, _total: int) -> None:
    pass
