"""Prompt lookup: what followed the last occurrence of the text's own ending (Saxena, 2023).

The whole search is a few vector comparisons over the token buffer, on the device, for all rows.

    tokens  a b c d a b, K 4: the suffix "a b" (a match of 2) occurred before, followed by c d a b;
            three of these are drafted, since a longer match earns a longer draft
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, Draft, Passage
from jspec.errors import JspecError


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Proposes the continuation of the longest earlier match of the suffix, the latest if tied."""

    num_speculative_tokens: int = 6
    min_match: int = 1
    """Shortest suffix, in tokens, worth following."""
    growth: int = 2
    """A match of m tokens drafts at most `1 + growth * (m - 1)`. A match of one token is right
    half of the time, and its one draft is free where a block of one is padded to two; a match of
    eight is followed for three tokens and more (Spec-Bench, SmolLM2)."""
    max_match: int = 8
    """Longest suffix compared; longer ones count as this long."""
    window: int | None = None
    """How many of the last tokens to search; None: all."""
    name: str = "ngram"
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise JspecError(
                f"ngram: min_match={self.min_match}: must be from 1 to {self.max_match}"
            )
        if self.growth < 0:
            raise JspecError(f"{self.growth=} must not be negative")

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(self, params: Any, state: tuple[()], context: Context, passage: Passage) -> tuple[()]:
        return state

    def propose(self, params: Any, state: tuple[()], context: Context) -> tuple[Draft, tuple[()]]:
        with jax.named_scope("draft"):
            return jax.vmap(self._propose_row)(context.tokens, context.lengths), state

    def commit(
        self, params: Any, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def _propose_row(self, tokens: Array, length: Array) -> Draft:
        """`tokens` `[S]`, `length` scalar."""
        K = self.num_speculative_tokens
        match = self.match_lengths(tokens, length)
        latest_longest = match * tokens.shape[0] + jnp.arange(tokens.shape[0])
        end = jnp.argmax(latest_longest)
        # Beyond the last token the match goes on into its own continuation, period by period.
        period = jnp.maximum(length - 1 - end, 1)
        draft = tokens[end + 1 + jnp.arange(K, dtype=jnp.int32) % period]
        worth = jnp.minimum(1 + self.growth * (match[end] - 1), K)
        return Draft(draft, None, jnp.where(match[end] >= self.min_match, worth, 0))

    def match_lengths(self, tokens: Array, length: Array) -> Array:
        """`[S]`: how many tokens up to each one equal the row's last tokens, 0..max_match."""
        where = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        alive = where < length - 1  # the suffix does not match itself
        if self.window is not None:
            alive &= where >= length - self.window
        match = jnp.zeros_like(where)
        for back in range(self.max_match):
            alive &= (where >= back) & (jnp.roll(tokens, back) == tokens[length - 1 - back])
            match += alive.astype(jnp.int32)
        return match
