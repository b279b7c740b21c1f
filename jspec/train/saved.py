"""Training states on disk: whole files named after their step, the newest whole one wins.

A state that was written and read again is the same, bit for bit. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.errors import JspecError
from jspec.train import tensors
from jspec.train.shards import Shards

_KEPT = 2
"""The newest that are kept, beside the best."""


class Checkpoints:
    """The states saved in a folder."""

    def __init__(self, folder: Path) -> None:
        self._files = Shards(folder, "safetensors")
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Any, *, best: int | None) -> None:
        """The state of `step` is there; older ones are gone but for the last and that of `best`."""
        arrays = {name: np.asarray(leaf) for name, leaf in _leaves(jax.device_get(state))}
        self._files.write(step, tensors.to_bytes(arrays))
        for old in self._files.numbers()[:-_KEPT]:
            if old != best:
                self._files.path(old).unlink()

    def load(self, step: int, like: Any) -> Any:
        """The state of `step`, a tree like `like`, on the default device.

        JspecError naming the file where it is damaged or of another tree.
        """
        path = self._files.path(step)
        arrays = tensors.open_file(path)
        expected = dict(_leaves(like))
        if arrays.keys() != expected.keys():
            (name, *_) = sorted(arrays.keys() ^ expected.keys())
            raise JspecError(f"{path}: {name!r} is in only one of the file and the training")
        for name, leaf in expected.items():
            if (arrays[name].shape, arrays[name].dtype) != (leaf.shape, leaf.dtype):
                raise JspecError(f"{path}: {name!r} is not of the training's shape and dtype")
        leaves = [jnp.array(arrays[name]) for name in expected]
        return jax.tree.structure(like).unflatten(leaves)

    def latest(self, like: Any, report: Callable[[str], None]) -> tuple[int, Any] | None:
        """Step and state of the newest file that is whole; None where there is none. Damaged ones
        are passed over with a word."""
        for step in reversed(self._files.numbers()):
            try:
                return step, self.load(step, like)
            except JspecError as error:
                report(f"passed over: {error}")
        return None


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """`("trained.layers.0.q", leaf)` for each leaf."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]
