"""Which implementation of a kernel runs: Hopper's own, or plain JAX through XLA.

    MOSAIC     the Hopper kernel, compiled for the GPU
    INTERPRET  the same kernel, interpreted on a CPU: slow, for tests
    XLA        plain JAX, on any device

`None` chooses by the device. A kernel that declines a shape says why; the choice then falls back
to XLA with one warning for each kernel and reason.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import jax


class Implementation(enum.StrEnum):
    """What computes a kernel's result."""

    MOSAIC = "mosaic"
    INTERPRET = "interpret"
    XLA = "xla"


_default: ContextVar[Implementation | None] = ContextVar("implementation", default=None)


@contextlib.contextmanager
def use(implementation: Implementation | str) -> Iterator[None]:
    """Inside, `None` means this implementation: to compile for a GPU from a machine without one,
    to compare, to test. It acts when a program is traced, not when it runs."""
    token = _default.set(Implementation(implementation))
    try:
        yield
    finally:
        _default.reset(token)


def current() -> Implementation:
    """What `None` means here and now."""
    return _default.get() or _of_device()


def choose(
    kernel: str, implementation: Implementation | str | None, declined: str | None
) -> Implementation:
    """The implementation that runs.

    Args:
      kernel: its name, for the warning.
      implementation: what the caller asked for; None: by `use`, else by the device.
      declined: why the Hopper kernel cannot take these shapes, or None if it can.
    """
    chosen = current() if implementation is None else Implementation(implementation)
    if chosen is not Implementation.XLA and declined is not None:
        _warn(kernel, declined)
        return Implementation.XLA
    return chosen


@functools.cache
def _of_device() -> Implementation:
    device = jax.devices()[0]
    is_hopper = device.platform == "gpu" and device.compute_capability == "9.0"
    return Implementation.MOSAIC if is_hopper else Implementation.XLA


@functools.cache  # once for each kernel and reason
def _warn(kernel: str, declined: str) -> None:
    warnings.warn(f"{kernel} runs as plain XLA, not as a Hopper kernel: {declined}", stacklevel=4)
