"""No drafts: plain decoding is the engine's loop with K = 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.drafters.base import Context, Draft, Passage


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing."""

    name: str = "none"
    num_speculative_tokens: int = 0
    num_draft_nodes: int = 0
    taps: tuple[int, ...] = ()
    num_best: int = 0

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(self, params: Any, state: tuple[()], context: Context, passage: Passage) -> tuple[()]:
        return state

    def propose(self, params: Any, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        batch = context.lengths.shape[0]
        nothing = jnp.zeros((batch, 0), jnp.int32)
        return Draft(nothing, None, jnp.zeros((batch,), jnp.int32)), state

    def commit(
        self, params: Any, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state
