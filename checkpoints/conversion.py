"""Any readable model -> a folder of ours, one tensor at a time, each leaf set exactly once.

Knows nothing of caches or downloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from checkpoints import arrays
from checkpoints.files import write_json
from checkpoints.folder import (
    CONFIG_FILE,
    PARAMS_FOLDER,
    config_to_json,
    publish,
    refuse_existing,
    temporary_sibling,
)
from checkpoints.tensors import FileTensor, Source, as_dtype
from jspec.errors import JspecError
from jspec.params import LeafSpec, leaf_paths, param_specs

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, bytes done, bytes in all)."""


def write_checkpoint(
    source: Source, dest: Path, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """`dest` is a whole checkpoint of `source`, its weights in `dtype` (None: the file's own).

    One tensor is in memory at a time. JspecError, and no `dest`, when it exists already, when
    the source is damaged, or when its tensors are not exactly those of its config.
    """
    refuse_existing(dest)
    specs = param_specs(source.config)
    leaves = {
        path: as_leaf(tensor, spec, as_dtype(dtype) if dtype else tensor.dtype)
        for path, spec, tensor in _matched(source, dict(leaf_paths(specs)))
    }
    # Before the weights: it may be what is wrong.
    tokenizer = None if source.tokenizer is None else source.tokenizer()
    counter = _Counter(sum(leaf.nbytes for leaf in leaves.values()), progress)
    try:
        with temporary_sibling(dest) as folder:
            arrays.write_params(folder / PARAMS_FOLDER, specs, leaves, counter.add)
            if tokenizer is not None:
                tokenizer.save(folder)
            # Last: a folder without it does not load.
            write_json(folder / CONFIG_FILE, config_to_json(source.config))
            publish(folder, dest)
    except OSError as error:
        raise JspecError(f"{dest}: cannot be written ({error.strerror or error})") from error


def _matched(
    source: Source, specs: dict[str, LeafSpec]
) -> Iterator[tuple[str, LeafSpec, FileTensor]]:
    """Yields each leaf with its one tensor. JspecError names a tensor that breaks the rule."""
    taken: dict[str, str] = {}
    for tensor in source.tensors:
        path = _leaf_of(source, tensor)
        if path is None or (path == "lm_head" and source.config.tie_word_embeddings):
            continue  # not a weight, or a saved copy of the tied embedding
        if path not in specs:
            raise JspecError(f"{source.path}: unexpected tensor {tensor.name!r}, not in the config")
        if path in taken:
            raise JspecError(f"{source.path}: the tensor {tensor.name!r} is there twice")
        taken[path] = tensor.name
        expected = file_shape(specs[path])
        if tensor.shape != expected:
            raise JspecError(
                f"{source.path}: {tensor.name!r} has shape {list(tensor.shape)}, "
                f"but the config needs {list(expected)}"
            )
        yield path, specs[path], tensor
    for path in specs:
        if path not in taken:
            name = source.names.file_name(path)
            raise JspecError(f"{source.path}: lacks the tensor {name!r}; fetch the model again")


def _leaf_of(source: Source, tensor: FileTensor) -> str | None:
    try:
        return source.names.leaf(tensor.name)
    except KeyError as error:
        raise JspecError(
            f"{source.path}: unexpected tensor {tensor.name!r}; it is no weight of this family"
        ) from error


def file_shape(spec: LeafSpec) -> tuple[int, ...]:
    """The shape in a file: heads and head size are one axis there."""
    for axis, name in enumerate(spec.axes):
        if name in ("heads", "kv_heads"):
            merged = spec.shape[axis] * spec.shape[axis + 1]
            return (*spec.shape[:axis], merged, *spec.shape[axis + 2 :])
    return spec.shape


def is_stacked(spec: LeafSpec) -> bool:
    """Whether a leaf is many tensors in a file: an expert each."""
    return spec.axes[0] == "expert"


def parts_in_file(leaf: str, spec: LeafSpec) -> list[tuple[str, LeafSpec]]:
    """What a leaf is in a file: itself or, stacked, `leaf.0`, `leaf.1`, ..."""
    if not is_stacked(spec):
        return [(leaf, spec)]
    part = LeafSpec(spec.shape[1:], spec.axes[1:], spec.dtype)
    return [(f"{leaf}.{number}", part) for number in range(spec.shape[0])]


def as_leaf(tensor: FileTensor, spec: LeafSpec, dtype: np.dtype) -> FileTensor:
    """The tensor in the shape and dtype of the leaf, still unread."""

    def load() -> np.ndarray:
        array = tensor.load().reshape(spec.shape)
        with np.errstate(over="ignore"):
            cast = array.astype(dtype, copy=False)
        if dtype == np.float16 and np.isinf(cast).any() and not np.isinf(array).any():
            raise JspecError(f"{tensor.name!r} does not fit float16: choose bfloat16 or float32")
        return cast

    return FileTensor(tensor.name, spec.shape, dtype, load)


class _Counter:
    """Adds up the bytes written and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._tell()

    def add(self, tensor: FileTensor) -> None:
        self._done += tensor.nbytes
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress("converting", self._done, self._total)
