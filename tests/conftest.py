"""Shared by all tests: four virtual CPU devices, strict dtypes, compiled programs kept."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

from checkpoints import DEFAULT_MODEL

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    """Compilation dominates test time; a second run finds its programs in the cache."""
    folder = config.rootpath / ".pytest_cache" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_file():
    """A file's programs go with it: each is tens of memory maps, of which Linux gives a process
    65,530, and a worker that kept the programs of all files died in XLA's compiler."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def default_model():
    """The default model in float32, through the same cache and sources as a user's."""
    import checkpoints

    return checkpoints.load(DEFAULT_MODEL, dtype="float32")
