"""What a drafter is: pure functions over an opaque state, and the draft that it hands out.

A drafter knows nothing of the engine, of requests or of how its drafts are verified.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import flax.struct
from jax import Array

from jspec.sampling import Sampling


class Draft(NamedTuple):
    """A proposal for the next K positions of every row."""

    tokens: Array
    """`[B, K]` int32; entries from `num_drafted` on mean nothing."""
    probs: Array | None
    """`[B, K, V]`: the law each token was really drawn from, after temperature and filters.
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
