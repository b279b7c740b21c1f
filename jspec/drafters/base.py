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
from jspec.cache import Cache, KeysValues
from jspec.draws import Purpose, argmax
from jspec.sampling import Prefix, Sampling, by_kind, draw_key, inverse_temperature, softmax
from jspec.tree import Tree


class Start(NamedTuple):
    """How far a drafter took last token and drafts through the target's own layers."""

    hidden: tuple[Array, ...]
    """`[B, P+1, D]` each: the inputs of layers 0 to i, the first that has not run."""
    block: tuple[KeysValues, ...]
    """`[B, P+1, Nkv, H]` each: keys and values of the layers that have."""


class Draft(NamedTuple):
    """A proposal for what comes next in every row: a chain of K tokens, or a tree of P."""

    tokens: Array
    """`[B, P]` int32; entries from `num_drafted` on mean nothing."""
    probs: Array | None
    """`[B, P, V]`: the law each token was really drawn from, after all of the row's settings.
    None: the drafter is deterministic, each token certain."""
    num_drafted: Array
    """`[B]` int32 in 0..P."""
    tree: Tree | None = None
    """How the tokens hang together; None: each behind the one before, and P = K."""
    start: Start | None = None
    """Where the target's pass over the block begins; None: at the tokens."""


class Context(flax.struct.PyTreeNode):
    """What a drafter may look at."""

    tokens: Array
    """`[B, S]` int32; the first `lengths[b]` of row b are committed."""
    lengths: Array
    """`[B]` int32, at least 1."""
    sampling: Sampling
    cache: Cache | None = None
    """The target's, with all that is committed but each row's last token; for what drafts with
    the target's own layers. None: there is none."""


class Reading(NamedTuple):
    """All that the target read in one pass, kept or not: a block, or a chunk of a prompt."""

    tokens: Array
    """`[B, N]` int32: the last token and all drafts, in the draft's order; or the chunk."""
    best: Array
    """`[B, N, R]` int32: the likeliest tokens behind each, likeliest first, by the target's own
    logits; R is `Drafter.num_best` or more."""
    num_tokens: Array
    """`[B]` int32 in 0..N: tokens that count."""


class Passage(NamedTuple):
    """Tokens that were committed, with what the target thought when it read the ones before.

    tokens t0 t1 t2 t3 committed, t3 not yet read: the passage from t0 has num_tokens 3,
    tokens t1 t2 t3 and the features h0 h1 h2 that the target had at t0 t1 t2
    """

    tokens: Array
    """`[B, T]` int32: the token behind each place."""
    features: tuple[Array, ...]
    """`[B, T, D]` each: the target's hidden states at the places, those of `Drafter.taps`."""
    num_tokens: Array
    """`[B]` int32 in 0..T: places that count."""
    reading: Reading | None = None
    """For drafters with `num_best`."""


class Drafter(Protocol):
    """Frozen static settings with four pure methods.

    The engine calls `read` once for every chunk of the prompts, then `propose` and `commit` once
    a round. Both see every token that a row commits exactly once, in order.
    """

    @property
    def name(self) -> str:
        """How the drafter is called in outputs and on the command line."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """K: tokens that one round can accept at most."""
        ...

    @property
    def num_draft_nodes(self) -> int:
        """P: tokens a draft at most; K, unless drafts are trees."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Which hidden states of the target it wants to see: entries of `Output.hidden`."""
        ...

    @property
    def num_best(self) -> int:
        """R: how many of the target's likeliest tokens it wants to see behind each token that the
        target reads; 0: it learns from nothing but what is committed."""
        ...

    def init(self, batch: int, capacity: int, dtype: Any) -> Any:
        """The state of `batch` empty rows with room for `capacity` tokens each."""
        ...

    def read(self, params: Any, state: Any, context: Context, passage: Passage) -> Any:
        """Takes in what was committed, without a proposal of its own before it: a chunk of the
        prompts, or what another drafter proposed. `context` has all that is committed."""
        ...

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        """Drafts the positions from `context.lengths` on."""
        ...

    def commit(self, params: Any, state: Any, context: Context, passage: Passage) -> Any:
        """Learns what was committed after its proposal: the accepted drafts and the next token, as
        far as no stop rule cut them, 0..K+1 tokens. `context` has them already."""
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
        depths=jnp.full((drafts.shape[0], 1), index, jnp.int32),
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


def rows_where(chosen: Array, x: Array, y: Array) -> Array:
    """Rows of `x` where `chosen` `[B]`, of `y` elsewhere."""
    return jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
