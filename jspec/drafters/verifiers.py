"""What accepts inside a cascade, before the target does.

A verifier is a model and the cache that it runs on. Knows nothing of windows or of who drafts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp

from jspec import cache as cache_lib
from jspec.cache import Cache
from jspec.config import ModelConfig
from jspec.drafters.base import Context, Passage
from jspec.exits import exit_model
from jspec.model import Model

_PAGE_SIZE = 16


class Verifier(Protocol):
    """Frozen static settings with pure methods; see `drafters.base.Drafter` for `init`, `read`
    and `commit`."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model:
        """What judges, by `check.check`, on the cache that `cache` gives."""
        ...

    @property
    def num_shared(self) -> int:
        """Layers of the target's that it runs, on the target's cache; 0: it has its own."""
        ...

    @property
    def says(self) -> tuple[int, ...]:
        """Which of its hidden states it hands on: those that the target can go on from."""
        ...

    @property
    def reads(self) -> tuple[int, ...]:
        """Which hidden states of the target it wants to see in passages."""
        ...

    def init(self, batch: int, capacity: int, dtype: Any) -> Any: ...

    def read(self, params: Any, state: Any, context: Context, passage: Passage) -> Any: ...

    def commit(self, params: Any, state: Any, context: Context, passage: Passage) -> Any:
        """`read` behind a proposal, whose block the state still has."""
        ...

    def cache(self, state: Any, context: Context) -> Cache:
        """With all that is committed but each row's last token."""
        ...


@dataclasses.dataclass(frozen=True)
class ExitVerifier:
    """The target's own first layers, on its cache: nothing to keep, nothing to read. Parameters
    are those of `exits.exit_model`."""

    model: Model
    num_shared: int
    name: str
    reads: tuple[int, ...] = ()

    @property
    def says(self) -> tuple[int, ...]:
        return tuple(range(self.num_shared + 1))

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(self, params: Any, state: tuple[()], context: Context, passage: Passage) -> tuple[()]:
        return state

    def commit(
        self, params: Any, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def cache(self, state: tuple[()], context: Context) -> Cache:
        assert context.cache is not None
        return context.cache


def exit_verifier(config: ModelConfig, layer: int) -> ExitVerifier:
    """The target's exit behind `layer` layers."""
    return ExitVerifier(exit_model(config, layer), layer, f"early_exit:{layer}")


@dataclasses.dataclass(frozen=True)
class ModelVerifier:
    """A model of its own, with the target's vocabulary."""

    model: Model
    name: str = "model"
    num_shared: int = 0
    says: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()

    def init(self, batch: int, capacity: int, dtype: Any) -> Cache:
        spec = self.model.cache_spec
        return cache_lib.init_cache(spec, batch, capacity, page_size=_PAGE_SIZE, dtype=dtype)

    def read(self, params: Any, state: Cache, context: Context, passage: Passage) -> Cache:
        width = passage.tokens.shape[1]
        block = jnp.take_along_axis(context.tokens, state.positions(width), axis=1, mode="clip")
        out = self.model.forward(params, block, cache_lib.open_block(state, width))
        return cache_lib.commit_read(out.cache, passage.num_tokens)

    def commit(self, params: Any, state: Cache, context: Context, passage: Passage) -> Cache:
        return cache_lib.commit(state, passage.num_tokens)

    def cache(self, state: Cache, context: Context) -> Cache:
        return state
