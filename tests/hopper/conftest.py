"""Compile-only checks for H100s; they need the wheels of the extra `hopper` and no GPU.

pytest -n 0 tests/hopper                   not part of a plain `pytest`; in one process, in order
pytest -n 0 tests/hopper --write-kernels   also writes kernels.json anew
"""

import jax
import pytest

jax.config.update("jax_enable_compilation_cache", False)  # what is loaded leaves no dumps


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-kernels", action="store_true", help="write kernels.json anew")


@pytest.fixture(scope="session")
def write_kernels(request: pytest.FixtureRequest) -> bool:
    """Whether the table of kernels is to be written instead of compared."""
    return bool(request.config.getoption("--write-kernels"))
