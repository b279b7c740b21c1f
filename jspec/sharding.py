"""Logical axes to mesh axes: the one rule table. Knows nothing of what the arrays mean.

A leaf names its axes ("vocab", "heads", ...); the table says on which mesh axis each is split.
An axis without a rule, one that the mesh lacks, or whose size it does not divide, is replicated.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
}


def partition_spec(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
    """How one array is split on `mesh` by RULES."""

    def mesh_axis(size: int, axis: str | None) -> str | None:
        name = RULES.get(axis) if axis is not None else None
        return name if name in mesh.shape and size % mesh.shape[name] == 0 else None

    return PartitionSpec(*map(mesh_axis, shape, axes))


def named_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """The sharding of one array on `mesh` by RULES."""
    return NamedSharding(mesh, partition_spec(mesh, shape, axes))


def tree_shardings(mesh: Mesh, specs: Any, is_leaf: Any) -> Any:
    """A tree of shardings for a tree of specs (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda s: named_sharding(mesh, s.shape, s.axes), specs, is_leaf=is_leaf)


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Programs traced inside know that they run on `mesh`, and may split their work over it by
    hand (`jspec.attention`)."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
