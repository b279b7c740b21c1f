"""What a drafter is: pure functions over an opaque state, and the draft that it hands out.

A drafter knows nothing of the engine, of requests or of how its drafts are verified.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import Purpose, argmax
from jspec.sampling import Prefix, Sampling, by_kind, draw_key, inverse_temperature, softmax


class Draft(NamedTuple):
    """A proposal for the next K positions of every row."""

    tokens: Array
    """`[B, K]` int32; entries from `num_drafted` on mean nothing."""
    probs: Array | None
    """`[B, K, V]`: the law each token was really drawn from, after all of the row's settings.
    None: the drafter is deterministic, each token certain."""
    num_drafted: Array
    """`[B]` int32 in 0..K."""


class Context(flax.struct.PyTreeNode):
    """What a drafter may look at."""

    tokens: Array
    """`[B, S]` int32; the first `lengths[b]` of row b are committed."""
    lengths: Array
    """`[B]` int32, at least 1."""
    sampling: Sampling


class Drafter(Protocol):
    """Frozen static settings with four pure methods.

    The engine calls `prefill` after new prompts and before every burst of rounds (it does nothing
    for rows that are up to date), then `propose` and `commit` once a round.
    """

    @property
    def name(self) -> str:
        """How the drafter is called in outputs and on the command line."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """K: tokens a draft at most."""
        ...

    def init(self, batch: int, capacity: int, dtype: Any) -> Any:
        """The state of `batch` empty rows with room for `capacity` tokens each."""
        ...

    def prefill(self, params: Any, state: Any, context: Context) -> Any:
        """Catches up with the committed tokens."""
        ...

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        """Drafts the positions from `context.lengths` on."""
        ...

    def commit(self, params: Any, state: Any, num_emitted: Array) -> Any:
        """Learns that `num_emitted` `[B]` tokens (0..K+1) were committed after the proposal:
        the accepted drafts and the next token, as far as no stop rule cut them."""
        ...


def draft_token(
    logits: Array, context: Context, drafts: Array, index: Array | int
) -> tuple[Array, Array]:
    """Draft number `index` from `[B, V]` logits: a token `[B]` and the law `[B, V]` that it was
    drawn from, by the same settings as the target's. `drafts` `[B, K]` holds those before it.

    A law of zeros says that the settings forbid every token that the logits know: the row must
    not draft here (see `drafted_before`).
    """
    sampling = context.sampling
    place = Prefix(
        tokens=context.tokens,
        lengths=context.lengths,
        drafts=drafts[:, None],
        depths=jnp.full((1,), index, jnp.int32),
    )
    scale = inverse_temperature(sampling)[:, None]

    def greedy(logits: Array) -> tuple[Array, Array]:
        token = argmax(logits)
        return token, jax.nn.one_hot(token, logits.shape[-1], dtype=jnp.float32)

    def soft(logits: Array) -> tuple[Array, Array]:
        # Under the coupled rule the draft uses the target's own noise: equal laws, equal tokens.
        purpose = jnp.where(sampling.coupled, Purpose.TARGET, Purpose.DRAFT)
        key = draw_key(sampling, place.positions, purpose)
        return draws.draw(draws.law_of(logits, scale), key), softmax(logits, scale)

    token, law = by_kind(logits[:, None], sampling, place, greedy=greedy, soft=soft)
    return token[:, 0], law[:, 0]


def drafted_before(laws: Array) -> Array:
    """`[B]`: drafts before the first whose law, of `[B, K, V]`, is all zeros."""
    some = jnp.any(laws > 0, axis=-1).astype(jnp.int32)
    return jnp.sum(jnp.cumprod(some, axis=1), axis=1, dtype=jnp.int32)
