"""Logical axes to mesh axes: the one rule table. Knows nothing of what the arrays mean.

A leaf names its axes ("vocab", "heads", ...); the table says on which mesh axis each is split.
An axis that the mesh lacks, or whose size it does not divide, is replicated.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
}


def named_sharding(
    mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> NamedSharding:
    """The sharding of one array on `mesh` by RULES."""

    def mesh_axis(size: int, axis: str | None) -> str | None:
        name = RULES.get(axis) if axis is not None else None
        return name if name in mesh.shape and size % mesh.shape[name] == 0 else None

    return NamedSharding(mesh, PartitionSpec(*map(mesh_axis, shape, axes)))


def tree_shardings(mesh: Mesh, specs: Any, is_leaf: Any) -> Any:
    """A tree of shardings for a tree of specs (anything with `.shape` and `.axes`)."""
    return jax.tree.map(lambda s: named_sharding(mesh, s.shape, s.axes), specs, is_leaf=is_leaf)
