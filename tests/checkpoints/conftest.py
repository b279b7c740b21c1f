"""Fixtures of the checkpoints tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf

import checkpoints


@pytest.fixture(scope="session")
def tensors() -> dict:
    """The weights in `hf_folder`, under their Hugging Face names."""
    return hf_tensors(hf_config())


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> Path:
    """A tiny Llama as Hugging Face lays it out. Not to be changed."""
    return write_hf(tmp_path_factory.mktemp("hf") / "tiny", tensors=tensors)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, hf_folder: Path) -> Path:
    """`hf_folder` in our format. Not to be changed."""
    return checkpoints.convert(hf_folder, tmp_path_factory.mktemp("ours") / "tiny")
