"""Prompt lookup: what followed the last occurrence of the text's own ending (Saxena, 2023).

The whole search is a few vector comparisons over the token buffer, on the device, for all rows.

    tokens  a b c d a b, K 4: the suffix "a b" (a match of 2) occurred before, followed by c d a b;
            three of these are drafted, since a longer match earns a longer draft
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, Draft, Passage
from jspec.errors import JspecError


class Lookup(Protocol):
    """Settings of a drafter that follows earlier text."""

    @property
    def name(self) -> str: ...

    @property
    def num_speculative_tokens(self) -> int: ...

    @property
    def min_match(self) -> int: ...

    @property
    def growth(self) -> int: ...


def check_lookup(settings: Lookup, most: int | None = None) -> None:
    """Raises where the settings make no sense, or no match of `most` tokens could be worth it."""
    least, growth = settings.min_match, settings.growth
    if least < 1 or (most is not None and least > most):
        allowed = "at least 1" if most is None else f"from 1 to {most}"
        raise JspecError(f"{settings.name}: min_match={least}: must be {allowed}")
    if growth < 0:
        raise JspecError(f"{settings.name}: growth={growth} must not be negative")


def continuation(tokens: Array, length: Array, end: Array, count: int) -> Array:
    """The `count` tokens behind place `end` of a row's `tokens` `[S]`. Beyond the last token the
    match goes on into its own continuation, period by period."""
    period = jnp.maximum(length - 1 - end, 1)
    return tokens[end + 1 + jnp.arange(count, dtype=jnp.int32) % period]


def num_worth(settings: Lookup, match: Array) -> Array:
    """How many tokens a match of `match` tokens drafts."""
    worth = jnp.minimum(1 + settings.growth * (match - 1), settings.num_speculative_tokens)
    return jnp.where(match >= settings.min_match, worth, 0)


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
    num_best: int = 0

    def __post_init__(self) -> None:
        check_lookup(self, self.max_match)

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
        match = self.match_lengths(tokens, length)
        latest_longest = match * tokens.shape[0] + jnp.arange(tokens.shape[0])
        end = jnp.argmax(latest_longest)
        draft = continuation(tokens, length, end, self.num_speculative_tokens)
        return Draft(draft, None, num_worth(self, match[end]))

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
