"""Medusa (arXiv 2401.10774): several heads on the target's last hidden state, each for another
place ahead, and a tree of their best tokens.

The hidden state that gave the last committed token is all there is to carry; no head sees what
the others chose, so a chain would waste what they know.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec import heads
from jspec.drafters.base import Context, Draft, Passage
from jspec.drafters.growth import TreeShape, check_ranks
from jspec.head_params import MedusaConfig, MedusaParams


@dataclasses.dataclass(frozen=True)
class MedusaDrafter:
    """Drafts a tree with Medusa heads, one a level."""

    config: MedusaConfig
    tree: TreeShape
    name: str = "medusa"
    num_best: int = 0

    def __post_init__(self) -> None:
        if self.tree.depth > self.config.num_heads:
            raise ValueError(f"a tree of depth {self.tree.depth}: {self.config.num_heads=}")
        check_ranks(self.tree, self.config.draft_vocab_size)

    @property
    def num_speculative_tokens(self) -> int:
        return self.tree.depth

    @property
    def num_draft_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,)

    def init(self, batch: int, capacity: int, dtype: Any) -> Array:
        """The hidden state `[B, D]` that the last committed token came of."""
        return jnp.zeros((batch, self.config.hidden_size), dtype)

    def read(self, params: MedusaParams, state: Array, context: Context, passage: Passage) -> Array:
        return self.commit(params, state, context, passage)

    def commit(
        self, params: MedusaParams, state: Array, context: Context, passage: Passage
    ) -> Array:
        newest = jnp.maximum(passage.num_tokens - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(passage.features[0], newest, axis=1)[:, 0]
        return jnp.where((passage.num_tokens > 0)[:, None], hidden, state)

    def propose(self, params: MedusaParams, state: Array, context: Context) -> tuple[Draft, Array]:
        with jax.named_scope("draft"):
            logits = heads.medusa_logits(params, state)  # [M, B, draft V]

            def expand(level: int, tokens: Array, parents: Array) -> tuple[Array, int]:
                shape = (*tokens.shape, logits.shape[-1])
                return jnp.broadcast_to(logits[level][:, None], shape), level + 1

            draft, _ = self.tree.grow(logits[0], 1, expand)
            if params.token_ids is not None:
                draft = draft._replace(tokens=params.token_ids[draft.tokens])
            return draft, state
