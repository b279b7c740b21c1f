"""Draft heads from files of others and of ours: EAGLE-1/2, EAGLE-3, MTP, Medusa, exits.

What a file lacks and a head shares with its target (embedding, output head) is the target's own
array. Knows nothing of how heads compute (see `jspec.heads`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from checkpoints.conversion import as_leaf, file_shape, is_stacked, parts_in_file
from checkpoints.files import read_json_or_empty
from checkpoints.heads_config import OURS, config_of, layer_settings
from checkpoints.heads_source import (
    HeadSource,
    open_source,
    settings_file,
    tensor_files,
)
from checkpoints.heads_vocabulary import token_ids_of
from checkpoints.hf_layers import ZERO_CENTRED
from checkpoints.names.heads import JOINED_NORM, VOCABULARY, layout_of
from checkpoints.sources import shipped_path
from checkpoints.tensors import FileTensor, as_dtype, refuse_other_dtypes
from jspec.config import ModelConfig
from jspec.errors import JspecError
from jspec.head_params import AnyConfig, AnyParams, HeadConfig, specs_of
from jspec.params import LeafSpec, Params, is_spec, leaf_paths
from jspec.sharding import named_sharding

_ROWS = 4096
"""Of an embedding, compared at a time."""


class LoadedHead(NamedTuple):
    """A draft head in memory."""

    config: AnyConfig
    params: AnyParams


def is_head(path: str | Path) -> bool:
    """Whether a folder or file holds a draft head, by its settings or the names of its tensors:
    also one within a whole model, or of a kind that `load_head` refuses. Weights are not read.
    False for what does not exist or is damaged."""
    path = shipped_path(path)
    try:
        settings = read_json_or_empty(settings_file(path)) if path.is_dir() else {}
        return _says_head(settings) or layout_of(tensor_files(path)) is not None
    except JspecError:
        return False


def load_head(
    source: str | Path,
    *,
    target_config: ModelConfig,
    target_params: Params,
    dtype: str,
    mesh: Mesh | None = None,
    rope_theta: float | None = None,
) -> LoadedHead:
    """The head in a folder or file, or one of those that come with this package by its name; its
    weights in `dtype`, on `mesh` by the sharding rules.

    The layout is told by the names of the tensors. Within a whole model's folder only the head's
    tensors are read. Embedding and output head are the target's arrays where the file has none
    or has the same numbers; the embedding is then the very object `target_params.embed`.

    A config without `rope_theta` means 10000, as EAGLE-3's trainer has it; others run such heads
    with the target's base. `rope_theta` overrides what the config says. (Which hidden states a
    head reads has a trap as well: see `heads_config`. Both can be replaced in the result.)

    JspecError when there is no head, it is of a kind that cannot be run (linear attention,
    parallel drafting, ...), is for another target, or its tensors are not exactly those of its
    config.
    """
    target_dtype = as_dtype(dtype)
    head = open_source(source)
    leaves = _leaves(head)
    vocabulary = {name: leaves.pop(name) for name in VOCABULARY if name in leaves}
    token_ids = token_ids_of(head.path, vocabulary, target_config.vocab_size)
    rows = target_config.vocab_size if token_ids is None else len(token_ids)
    config = config_of(head, leaves, target_config, rows)
    if JOINED_NORM in leaves:
        leaves["fc_norms.0"] = leaves.pop(JOINED_NORM)
    building = _Building(head, leaves, target_params, token_ids, target_dtype, mesh)
    if rope_theta is not None and isinstance(config, HeadConfig):
        layers = dataclasses.replace(config.layers, rope_theta=rope_theta)
        config = dataclasses.replace(config, layers=layers)
    return LoadedHead(config, _tree(building, specs_of(config)))


@dataclasses.dataclass(frozen=True)
class _Building:
    """What every array of a head is made from."""

    head: HeadSource
    leaves: Mapping[str, FileTensor]
    target: Params
    token_ids: np.ndarray | None
    dtype: np.dtype
    mesh: Mesh | None

    @functools.cached_property
    def target_rows(self) -> Array:
        """The target's output head, `[draft V, D]`; one array, however many heads share it."""
        array = self.target.embed if self.target.lm_head is None else self.target.lm_head
        if self.token_ids is not None:
            rows = array[self.token_ids]
            array = _placed(self, rows, LeafSpec(rows.shape, ("vocab", None)))
        return array if array.dtype == self.dtype else array.astype(self.dtype)


def _says_head(settings: Mapping[str, Any]) -> bool:
    keys = (OURS, "speculators_model_type", "medusa_num_heads")
    named = settings.get("architectures") or []
    words = r"(?i)eagle|medusa|mtp|speculator|draftmodel|jspecexits"
    return any(key in settings for key in keys) or any(re.search(words, str(x)) for x in named)


def _leaves(head: HeadSource) -> dict[str, FileTensor]:
    """Leaf -> its one tensor. JspecError names one that is unknown or there twice."""
    one_more = head.names.layout == "mtp" and (
        layer_settings(head.settings).get("model_type") in ZERO_CENTRED
    )
    found: dict[str, FileTensor] = {}
    for name, tensor in head.tensors.items():
        try:
            leaf = head.names.leaf(name)
        except KeyError as error:
            raise _unexpected(head, name) from error
        if leaf is None:
            continue
        if leaf in found:
            raise JspecError(f"{head.path}: {name!r} and {found[leaf].name!r} are the same tensor")
        if leaf not in VOCABULARY:
            refuse_other_dtypes(head.path, tensor)
        found[leaf] = _plus_one(tensor) if one_more and "norm" in leaf else tensor
    return found


def _plus_one(tensor: FileTensor) -> FileTensor:
    def load() -> np.ndarray:
        return tensor.load().astype(np.float32) + 1

    return dataclasses.replace(tensor, dtype=np.dtype(np.float32), load=load)


def _tree(building: _Building, specs: Any) -> Any:
    """The tree of `specs` with arrays. JspecError names a tensor that is not one of it."""
    known = dict(leaf_paths(specs))
    in_file = {part for leaf, spec in known.items() for part, _ in parts_in_file(leaf, spec)}
    for leaf, tensor in building.leaves.items():
        if leaf not in in_file:
            raise _unexpected(building.head, tensor.name)
    arrays = [_array(building, leaf, spec) for leaf, spec in known.items()]
    return jax.tree.structure(specs, is_leaf=is_spec).unflatten(arrays)


def _array(building: _Building, leaf: str, spec: LeafSpec) -> Array:
    if leaf == "token_ids" and building.token_ids is not None:
        return _placed(building, building.token_ids, spec)
    if is_stacked(spec):
        return _placed(building, _stacked(building, leaf, spec), spec)
    tensor = building.leaves.get(leaf)
    ours = _targets(building, leaf, spec)
    if tensor is None:
        return _without_tensor(building, leaf, spec) if ours is None else ours
    tensor = _rows_of(building, leaf, spec, tensor)
    _check_shape(building, leaf, spec, tensor)
    numbers = tensor.load()
    if ours is not None and _same(numbers, ours):
        return ours
    loaded = dataclasses.replace(tensor, load=lambda: numbers)
    return _placed(building, _as_leaf(building, loaded, spec), spec)


def _stacked(building: _Building, leaf: str, spec: LeafSpec) -> np.ndarray:
    """Experts in one array; no two of them are in memory beside it."""
    whole = np.empty(spec.shape, building.dtype)
    for place, (part, part_spec) in zip(whole, parts_in_file(leaf, spec), strict=True):
        tensor = building.leaves.get(part)
        if tensor is None:
            raise _lacking(building, part)
        _check_shape(building, part, part_spec, tensor)
        place[...] = _as_leaf(building, tensor, part_spec)
    return whole


def _as_leaf(building: _Building, tensor: FileTensor, spec: LeafSpec) -> np.ndarray:
    return as_leaf(tensor, spec, np.dtype(spec.dtype or building.dtype)).load()


def _targets(building: _Building, leaf: str, spec: LeafSpec) -> Array | None:
    """The target's array that a head shares under this name, or would if it had none."""
    if leaf == "embed":
        array = building.target.embed
    elif leaf == "lm_head" or (
        leaf.startswith("lm_heads.") and "lm_heads.0" not in building.leaves
    ):
        array = building.target_rows
    else:
        return None
    return array if array.shape == spec.shape else None


def _without_tensor(building: _Building, leaf: str, spec: LeafSpec) -> Array:
    """Residual blocks (vLLM's Medusa heads) may be without biases; nothing else may be left out."""
    if leaf.startswith("biases.") and "biases.0" not in building.leaves:
        return _placed(building, np.zeros(spec.shape, building.dtype), spec)
    joined = leaf == "fc_norms.0" and spec.shape[0] != building.target.embed.shape[1]
    hint = ' (or config.json lacks "bias": false)' if leaf == "fc_bias" else ""
    raise _lacking(building, JOINED_NORM if joined else leaf, hint)


def _lacking(building: _Building, leaf: str, hint: str = "") -> JspecError:
    name = building.head.names.file_name(leaf)
    return JspecError(
        f"{building.head.path}: lacks the tensor {name!r}{hint}; fetch the head again"
    )


def _rows_of(building: _Building, leaf: str, spec: LeafSpec, tensor: FileTensor) -> FileTensor:
    """`tensor`, or of a whole vocabulary's output head the rows of the draft tokens."""
    ids = building.token_ids
    whole = (building.target.embed.shape[0], *spec.shape[1:])
    if ids is None or not leaf.startswith("lm_head") or tensor.shape != whole:
        return tensor
    return dataclasses.replace(tensor, shape=spec.shape, load=lambda: tensor.load()[ids])


def _check_shape(building: _Building, leaf: str, spec: LeafSpec, tensor: FileTensor) -> None:
    expected = file_shape(spec)
    if tensor.shape == expected:
        return
    hint = "fetch the head again"
    if leaf.startswith("lm_head") and building.token_ids is None:
        hint = "a head with a vocabulary of its own needs 'd2t'"
    raise JspecError(
        f"{building.head.path}: {tensor.name!r} has shape {list(tensor.shape)}, but "
        f"{list(expected)} is expected; {hint}"
    )


def _placed(building: _Building, array: Any, spec: LeafSpec) -> Array:
    if building.mesh is None:
        return jnp.asarray(array)
    return jax.device_put(array, named_sharding(building.mesh, spec.shape, spec.axes))


def _same(numbers: np.ndarray, ours: Array) -> bool:
    """Whether one is the other, or the other rounded to its dtype, both of one shape. Ends at a
    difference."""
    rows = min(_ROWS, len(numbers))
    for start in range(0, len(numbers), rows):
        start = min(start, len(numbers) - rows)  # one shape, so that it is compiled once
        theirs = numbers[start : start + rows]
        mine = np.asarray(jax.lax.dynamic_slice_in_dim(ours, start, rows))
        with np.errstate(over="ignore"):
            if not any(
                np.array_equal(*pair)
                for pair in (
                    (theirs.astype(mine.dtype), mine),
                    (theirs, mine.astype(theirs.dtype)),
                )
            ):
                return False
    return True


def _unexpected(head: HeadSource, name: str) -> JspecError:
    return JspecError(
        f"{head.path}: unexpected tensor {name!r}; a head of the family {head.names.layout} "
        "with this config.json has none of that name"
    )
