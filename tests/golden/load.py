"""Reads the golden data written by `make_goldens.py` and `make_layer_goldens.py` (numpy only; no
torch, no jspec).

Letters: T tokens of the prompt, V vocabulary, 32 largest logits, 64 fixed vocabulary columns,
64 greedy tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class SmolLM2Case:
    """A prompt and what SmolLM2-135M-Instruct (Q4_1, computed in float32) makes of it."""

    name: str
    text: str
    """What was tokenised; chat marks included where the prompt is a chat."""
    token_ids: np.ndarray  # int32 [T]
    top_ids: np.ndarray  # int32 [T, 32], largest logit first
    top_logits: np.ndarray  # float32 [T, 32]
    logsumexp: np.ndarray  # float32 [T], over the whole vocabulary
    column_ids: np.ndarray  # int32 [64], ascending; the same for every case
    column_logits: np.ndarray  # float32 [T, 64], the logits of `column_ids`
    greedy_ids: np.ndarray  # int32 [64], the continuation; an end token does not stop it
    greedy_gaps: np.ndarray  # float32 [64], first minus second logit where each was chosen


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """A tiny model of one architecture and its logits; `golden_weights` gives the weights."""

    name: str
    config: dict[str, Any]
    """As in a config.json."""
    names_and_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Of every stored parameter, Hugging Face names, sorted."""
    token_ids: np.ndarray  # int32 [T]
    logits: np.ndarray  # float32 [T, V]


def smollm2_cases() -> tuple[SmolLM2Case, ...]:
    """Every prompt of the default model, in the order of their names."""
    with np.load(FOLDER / "smollm2.npz") as arrays:
        names = sorted(key.removesuffix(".text") for key in arrays if key.endswith(".text"))
        fields = [f.name for f in dataclasses.fields(SmolLM2Case)]
        per_case = [field for field in fields if field not in ("name", "text", "column_ids")]
        return tuple(
            SmolLM2Case(
                name=name,
                text=str(arrays[f"{name}.text"]),
                column_ids=arrays["column_ids"],
                **{field: arrays[f"{name}.{field}"] for field in per_case},
            )
            for name in names
        )


def smollm2_gguf_sha256() -> str:
    """The digest of the weights file that the SmolLM2 goldens were computed from."""
    with np.load(FOLDER / "smollm2.npz") as arrays:
        return str(arrays["gguf_sha256"])


def family_cases() -> tuple[FamilyCase, ...]:
    """Every tiny model, in the order of `families.json`."""
    return _cases("families", FamilyCase, "token_ids", "logits")


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """A decoder layer alone, over one text; `golden_weights` gives the weights."""

    name: str
    config: dict[str, Any]
    """As in a config.json."""
    names_and_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Of every parameter, as in published files behind the layer's prefix, sorted."""
    input: np.ndarray  # float32 [T, D]
    output: np.ndarray  # float32 [T, D]


def layer_cases() -> tuple[LayerCase, ...]:
    """Every layer, in the order of `layers.json`."""
    return _cases("layers", LayerCase, "input", "output")


def _cases[Case](stem: str, kind: Callable[..., Case], *arrays: str) -> tuple[Case, ...]:
    """What `stem.json` describes, in its order, with `arrays` of `stem.npz`."""
    described = json.loads((FOLDER / f"{stem}.json").read_text(encoding="utf-8"))
    with np.load(FOLDER / f"{stem}.npz") as found:
        return tuple(
            kind(
                name=name,
                config=case["config"],
                names_and_shapes=tuple((key, tuple(shape)) for key, shape in case["parameters"]),
                **{field: found[f"{name}.{field}"] for field in arrays},
            )
            for name, case in described.items()
        )
