"""Drafting with a head that reads the target's hidden states: EAGLE, EAGLE-2, EAGLE-3, MTP.

The head's own cache holds one entry for every committed token but the last, made of what the
target itself thought there; entries of drafts, made of the head's own outputs, live in a block and
are forgotten. What the newest entry says is carried into the round: it drafts the first token.

    committed a b c d (d unread by the target): entries (h_a, b) (h_b, c) (h_c, d) -> drafts x
    propose   reads (g, x) -> drafts y, where g is the head's output at the entry (h_c, d)
    verify    the target reads d x y; x accepted, y rejected, z recovered
    commit    reads (h_d, x) (h_x, z) and a place for the rejected one: always K + 1 entries, so
              nothing waits for how many were accepted

A chain is drawn from the head's law, by the row's settings; a tree is grown from its scores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec import heads
from jspec.attention import attend
from jspec.cache import Cache, CacheSpec
from jspec.drafters.base import Context, Draft, Passage, draft_token, drafted_before
from jspec.drafters.growth import TreeShape, check_ranks
from jspec.head_params import HeadConfig, HeadParams


class HeadState(flax.struct.PyTreeNode):
    """What a head knows of B rows."""

    cache: Cache
    """Of its entries."""
    carried: Array
    """`[B, D]`: the newest entry's output, for the next draft step."""
    logits: Array
    """`[B, draft V]` float32: what it predicts."""


@dataclasses.dataclass(frozen=True)
class HeadDrafter:
    """Drafts with a head: K tokens one after the other, or a tree."""

    config: HeadConfig
    num_speculative_tokens: int = 4
    tree: TreeShape | None = None
    """None: a chain. A tree's depth must be `num_speculative_tokens`."""
    page_size: int = 16
    name: str = "head"
    num_best: int = 0

    def __post_init__(self) -> None:
        if self.tree is None:
            return
        if self.tree.depth != self.num_speculative_tokens:
            raise ValueError(f"{self.num_speculative_tokens=} is not the depth {self.tree.depth}")
        check_ranks(self.tree, self.config.draft_vocab_size)

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def init(self, batch: int, capacity: int, dtype: Any) -> HeadState:
        layers = self.config.layers
        spec = CacheSpec(layers.num_hidden_layers, layers.num_key_value_heads, layers.head_dim)
        return HeadState(
            cache=cache_lib.init_cache(
                spec, batch, capacity, page_size=self.page_size, dtype=dtype
            ),
            carried=jnp.zeros((batch, layers.hidden_size), dtype),
            logits=jnp.zeros((batch, self.config.draft_vocab_size), jnp.float32),
        )

    def read(
        self, params: HeadParams, state: HeadState, context: Context, passage: Passage
    ) -> HeadState:
        return self.commit(params, state, context, passage)

    def commit(
        self, params: HeadParams, state: HeadState, context: Context, passage: Passage
    ) -> HeadState:
        """Entries of the passage, in place of those that drafts had."""
        with jax.named_scope("draft"):
            width, count = passage.tokens.shape[1], passage.num_tokens
            cache = cache_lib.open_block(state.cache, width)
            fused = heads.fuse(params, self.config, passage.features)
            hidden, cache = self._forward(params, passage.tokens, fused, cache)
            newest = jnp.maximum(count - 1, 0)[:, None, None]
            output = jnp.take_along_axis(hidden, newest, axis=1)
            logits = heads.logits(params, self.config, output)[:, 0]
            carried = heads.carry(params, self.config, output)[:, 0]
            some = (count > 0)[:, None]
            # All reads of the pages come before they are written (see `cache.commit`).
            count, carried = jax.lax.optimization_barrier((count, carried))
            return HeadState(
                cache=cache_lib.commit(cache, count),
                carried=jnp.where(some, carried, state.carried),
                logits=jnp.where(some, logits, state.logits),
            )

    def propose(
        self, params: HeadParams, state: HeadState, context: Context
    ) -> tuple[Draft, HeadState]:
        with jax.named_scope("draft"):
            if self.tree is None:
                return self._chain(params, state, context), state
            return self._tree(params, state), state

    def _chain(self, params: HeadParams, state: HeadState, context: Context) -> Draft:
        K, V = self.num_speculative_tokens, self.config.layers.vocab_size
        drafts = jnp.zeros((state.logits.shape[0], K), jnp.int32)
        cache = cache_lib.open_block(state.cache, K)
        logits, carried, laws = state.logits, state.carried[:, None], []
        for i in range(K):
            known = heads.in_target_vocabulary(logits, params.token_ids, V)
            token, law = draft_token(known, context, drafts, i)
            drafts = drafts.at[:, i].set(token)
            laws.append(law)
            if i + 1 < K:
                hidden, cache = self._forward(params, token[:, None], carried, cache)
                cache = cache.replace(in_flight=i + 1)
                logits = heads.logits(params, self.config, hidden)[:, 0]
                carried = heads.carry(params, self.config, hidden)
        laws = jnp.stack(laws, axis=1)
        return Draft(drafts, laws, drafted_before(laws))

    def _tree(self, params: HeadParams, state: HeadState) -> Draft:
        assert self.tree is not None
        B, size = state.logits.shape[0], self.tree.num_read
        nothing = jnp.zeros((B, size, size), jnp.bool_)
        depths = jnp.zeros((B, size), jnp.int32)
        cache = cache_lib.open_block(state.cache, size, depths=depths, mask=nothing)
        outputs = jnp.zeros((B, 1 + size, state.carried.shape[1]), state.carried.dtype)

        def expand(memory: tuple[Cache, Array], tokens: Array, parents: Array) -> Any:
            cache, outputs = memory
            cache = _stand_below(cache, parents)
            carried = jnp.take_along_axis(outputs, parents[..., None] + 1, axis=1)
            hidden, cache = self._forward(params, self._known(params, tokens), carried, cache)
            outputs = jax.lax.dynamic_update_slice_in_dim(
                outputs, heads.carry(params, self.config, hidden), 1 + cache.in_flight, axis=1
            )
            cache = cache.replace(in_flight=cache.in_flight + tokens.shape[1])
            return heads.logits(params, self.config, hidden), (cache, outputs)

        memory = cache, outputs.at[:, 0].set(state.carried)
        draft, _ = self.tree.grow(state.logits, memory, expand)
        return draft._replace(tokens=self._known(params, draft.tokens))

    def _known(self, params: HeadParams, tokens: Array) -> Array:
        """The target's ids of tokens of the draft vocabulary."""
        return tokens if params.token_ids is None else params.token_ids[tokens]

    def _forward(
        self, params: HeadParams, tokens: Array, carried: Array, cache: Cache
    ) -> tuple[Array, Cache]:
        positions = cache.positions(tokens.shape[1])
        return heads.forward(
            params, self.config, tokens, carried, cache, positions=positions, attend=attend
        )


def _stand_below(cache: Cache, parents: Array) -> Cache:
    """The cache whose next block tokens stand below `parents` `[B, W]`, numbers of earlier ones or
    -1 for none: they see what their parents see, and themselves."""
    assert cache.mask is not None
    assert cache.depths is not None
    width, size = parents.shape[1], cache.mask.shape[1]
    itself = cache.in_flight + jnp.arange(width) == jnp.arange(size)[:, None]
    above = jnp.maximum(parents, 0)
    has_parent = parents >= 0
    seen = jnp.take_along_axis(cache.mask, above[..., None], axis=1) & has_parent[..., None]
    depth = jnp.where(has_parent, jnp.take_along_axis(cache.depths, above, axis=1) + 1, 0)
    start = cache.in_flight
    return cache.replace(
        mask=jax.lax.dynamic_update_slice_in_dim(cache.mask, seen | itself.T, start, axis=1),
        depths=jax.lax.dynamic_update_slice_in_dim(cache.depths, depth, start, axis=1),
    )
