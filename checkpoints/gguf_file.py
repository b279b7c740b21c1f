"""A GGUF file: settings, dequantised tensors, tokenizer. Knows nothing of downloads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import gguf_config, gguf_tokenizer
from checkpoints.names import llama
from checkpoints.tensors import DTYPES, FileTensor, Source
from jspec.errors import JspecError


def open_gguf(path: Path) -> Source:
    """The model in the file, headers read. JspecError names what is damaged or unsupported."""
    reader = _reader(path)
    data = _metadata(reader, path)
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    factors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    config = gguf_config.model_config(data, shapes, factors, name=str(path))
    # The llama architecture stores q and k rows for rotary pairs (0, 1), (2, 3), ...
    interleaved = data["general.architecture"] == "llama"

    def lazy(tensor: Any) -> FileTensor:
        heads = _heads(tensor.name, config.num_attention_heads, config.num_key_value_heads)
        load = functools.partial(_load, path, tensor, heads if interleaved else None)
        return FileTensor(tensor.name, shapes[tensor.name], _dtype(tensor), load)

    return Source(
        path=path,
        config=config,
        tensors=tuple(map(lazy, reader.tensors)),
        names=llama.GGUF,
        tokenizer=functools.partial(gguf_tokenizer.from_metadata, data, name=str(path)),
    )


def deinterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of Hugging Face: the first halves of all pairs, then the second.

    With a head of 4 rows: before r0 r1 r2 r3 (pairs r0 r1 and r2 r3), after r0 r2 r1 r3.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _reader(path: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise JspecError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise JspecError(
            f"{path}: not a GGUF file, truncated or damaged ({_one_line(error)}); "
            "fetch the file again"
        ) from error


def _metadata(reader: Any, path: Path) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError) as error:
        raise JspecError(
            f"{path}: damaged metadata ({_one_line(error)}); fetch the file again"
        ) from error


def _heads(name: str, heads: int, kv_heads: int) -> int | None:
    """Heads in the rows of a q or k tensor; None for every other tensor."""
    if ".attn_q." in name:
        return heads
    return kv_heads if ".attn_k." in name else None


def _dtype(tensor: Any) -> np.dtype:
    return {"F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"]}.get(
        tensor.tensor_type.name, DTYPES["float32"]
    )


def _load(path: Path, tensor: Any, heads: int | None) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        array = dequantize(tensor.data, tensor.tensor_type).astype(_dtype(tensor), copy=False)
    except (NotImplementedError, ValueError) as error:
        raise JspecError(
            f"{path}: {tensor.name!r} of type {tensor.tensor_type.name} cannot be dequantised"
        ) from error
    return array if heads is None else deinterleave(array, heads)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
