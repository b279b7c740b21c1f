"""Parameter trees to and from Orbax. Knows nothing of files it did not write or of tokenizers.

Zarr without OCDBT and without compression: a leaf is a folder of plain chunks, so a leaf can be
written as soon as it is read, damage is found where it is, and loading costs about a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints.files import read_json, write_json
from checkpoints.tensors import FileTensor
from jspec.errors import JspecError
from jspec.params import Params, is_spec, leaf_paths
from jspec.sharding import tree_shardings

CHUNK_BYTES = 32 << 20
"""Leaves are cut into chunks of at most this size, so that a device reads little but its shard."""
MANIFEST = "jspec_manifest.json"


def write_params(
    folder: Path,
    specs: Params,
    leaves: Mapping[str, FileTensor],
    on_leaf: Callable[[FileTensor], None],
) -> None:
    """`folder` is an Orbax checkpoint of the tree `specs` with the values of `leaves` (by path).

    One leaf is in memory at a time, and Orbax's copy of it. `on_leaf` is called after each is
    written.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    class LeafHandler(type_handlers.NumpyHandler):
        """Loads, writes and drops one leaf after the other."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            for tensor, info, arg in zip(values, infos, args, strict=True):
                for written in await super().serialize([tensor.load()], [info], [arg]):
                    written.result()
                on_leaf(tensor)
            return []

        def memory_size(self, values: Any) -> Any:
            """Bytes to write and to read, for Orbax before 0.12; not of arrays as it assumes."""
            return [(tensor.nbytes, tensor.nbytes) for tensor in values]

    registry = type_handlers.create_type_handler_registry((FileTensor, LeafHandler()))
    order = [leaves[path] for path, _ in leaf_paths(specs)]
    tree = _plain(jax.tree.structure(specs, is_leaf=is_spec).unflatten(order))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    with _quiet(), _checkpointer(type_handler_registry=registry) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    write_json(folder / MANIFEST, _manifest(folder, specs))


def read_params(folder: Path, specs: Params, dtype: np.dtype, mesh: Mesh | None) -> Params:
    """The tree of the checkpoint in `folder`, cast to `dtype`, on `mesh` by the sharding rules.

    Without a mesh it is on the default device. JspecError when the folder is damaged or holds
    another model than `specs`.
    """
    import orbax.checkpoint as ocp

    _check_manifest(folder, specs)
    if mesh is None:
        default = jnp.zeros(()).sharding  # heeds `jax.default_device`
        shardings = jax.tree.map(lambda _: default, specs, is_leaf=is_spec)
    else:
        shardings = tree_shardings(mesh, specs, is_spec)

    def restore_arg(spec: Any, sharding: Any) -> Any:
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=dtype, sharding=sharding, global_shape=spec.shape
        )

    args = _plain(jax.tree.map(restore_arg, specs, shardings, is_leaf=is_spec))
    item = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=is_spec)
    try:
        with _quiet(), _checkpointer() as checkpointer:
            restore = ocp.args.PyTreeRestore(_plain(item), args, partial_restore=True)
            arrays = dict(leaf_paths(checkpointer.restore(folder.resolve(), args=restore)))
    except Exception as error:  # Orbax raises plain Exception around what TensorStore raises
        cause = _root_cause(error)
        if not isinstance(cause, Exception):  # Ctrl-C, wrapped on its way out
            raise cause from None
        if isinstance(cause, (RuntimeError, MemoryError)):  # no memory on a device, and the like
            raise
        raise _damaged(folder, _first_line(cause)) from error
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    return structure.unflatten([arrays[path] for path, _ in leaf_paths(specs)])


def _plain(node: Any) -> Any:
    """A tree of parameters as dicts and lists of what is there. Orbax writes down what is not, too,
    and a file should not depend on which optional leaves a layer could have."""
    if isinstance(node, (list, tuple)) and not is_spec(node):
        return [_plain(each) for each in node]
    if not isinstance(node, flax.struct.PyTreeNode):
        return node
    return {name: _plain(value) for name, value in vars(node).items() if value is not None}


def _manifest(folder: Path, specs: Params) -> dict[str, Any]:
    """The size of each file in the folder, and the shape of each leaf."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {
        "files": {file.relative_to(folder).as_posix(): file.stat().st_size for file in files},
        "leaves": {path: list(spec.shape) for path, spec in leaf_paths(specs)},
    }


def _check_manifest(folder: Path, specs: Params) -> None:
    """JspecError unless all files are there in full, and hold the leaves of `specs`.

    Orbax would find out too, but late, amid other reads, and without the name of the file.
    """
    if not (folder / MANIFEST).is_file():
        raise _damaged(folder, "it is incomplete")
    manifest = read_json(folder / MANIFEST)
    for name, size in manifest.get("files", {}).items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise _damaged(folder / name, "it is missing") from error
        if found != size:
            raise _damaged(folder / name, f"{found} bytes of {size}")
    expected = {path: list(spec.shape) for path, spec in leaf_paths(specs)}
    if manifest.get("leaves") != expected:
        raise _damaged(folder, "its leaves are not those of config.json")


def _damaged(path: Path, detail: str) -> JspecError:
    return JspecError(
        f"{path}: damaged checkpoint ({detail}); "
        "delete the model's folder and convert or load the model again"
    )


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _checkpointer(**options: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, use_compression=False, **options
        )
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns about OCDBT and metadata that are left out here on purpose."""
    from absl import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
