"""A target and its states that several test files learn from."""

from pathlib import Path

import numpy as np
import pytest
from tiny_training import CONFIG, TARGET, silent

import jspec
from jspec.model import llama
from jspec.train.states import write_states
from jspec.train.text import write_text


@pytest.fixture(scope="session")
def llm() -> jspec.LLM:
    return jspec.LLM(
        llama(CONFIG), params=TARGET.params, drafter="none", dtype="float32", batch_sizes=(30,)
    )


@pytest.fixture(scope="session")
def states(llm: jspec.LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 90 texts of the target's own, in three shards, at all taps."""
    root = tmp_path_factory.mktemp("training")
    rng = np.random.default_rng(0)
    write_text(
        llm,
        [rng.integers(0, 60, rng.integers(2, 8)).tolist() for _ in range(90)],
        root / "text",
        shard_size=30,
        temperatures=[1.0],
        max_tokens=24,
        seed=0,
        settings={"model": "tiny"},
        progress=silent,
    )
    write_states(TARGET, root / "text", root / "states", taps=(0, 1, 2), progress=silent)
    return root / "states"
