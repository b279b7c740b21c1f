"""A tiny target, text and states that the tests of training share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tiny

from jspec.params import Params, init_params
from jspec.train import tensors
from jspec.train.settings import Settings
from jspec.train.states import TargetOfText, write_states

CONFIG = dataclasses.replace(tiny.CONFIG, eos_token_ids=(60,))


def _bigram() -> Params:
    """A random model with a sharp law that hangs mostly on the last token: there is something
    to learn in a few steps."""
    params = init_params(CONFIG, jax.random.key(0))
    return params.replace(embed=50 * params.embed, lm_head=50 * params.lm_head)


TARGET = TargetOfText("tiny", CONFIG, _bigram())
QUICK = Settings(
    steps=12,
    batch_tokens=128,
    sequence_length=64,
    learning_rate=3e-3,
    warmup=2,
    draft_vocab_size=40,
    unroll=2,
    dtype="float32",
)


def silent(label: str, done: int, total: int) -> None:
    pass


def write_text_shards(folder: Path, num_shards: int, *, examples: int = 30, first: int = 0) -> Path:
    """Texts that count on from a random start, prompt and answer of random length."""
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"model": "tiny", "seed": 0}))
    for number in range(first, first + num_shards):
        rng = np.random.default_rng(number)
        lines = []
        for _ in range(examples):
            start, prompt, answer = rng.integers([0, 2, 10], [60, 8, 30])
            ids = ((start + 7 * np.arange(prompt + answer)) % 60).tolist()
            lines.append(json.dumps({"prompt": ids[:prompt], "answer": ids[prompt:]}))
        (folder / f"{number:05}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_states(root: Path, *, num_shards: int = 3, taps: Sequence[int] = (0, 1, 2)) -> Path:
    """A folder of states of such texts."""
    text = write_text_shards(root / "text", num_shards)
    write_states(TARGET, text, root / "states", taps=taps, progress=silent)
    return root / "states"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_nearly_equal(folder: Path, other: Path, checkpoint: str) -> None:
    """A checkpoint of two trainings, up to the rounding of sums: weights within 1e-4."""
    ours, theirs = (tensors.open_file(f / "checkpoints" / checkpoint) for f in (folder, other))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=2e-3, atol=2e-5, err_msg=name)
        if name.startswith("trained"):
            assert np.abs(values - theirs[name]).max() < 1e-4, name
