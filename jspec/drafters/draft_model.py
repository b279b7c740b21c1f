"""A second, smaller model with the same vocabulary as drafter (arXiv 2211.17192, 2302.01318).

Its cache stays two tokens behind: a draft step feeds the last two tokens and keeps the second's
logits. So the token that a fully accepted draft ends in, which the draft model has never read,
needs no special care.

    committed a b c d (L = 4), K = 2; pages hold a b
    step 0 reads (c d) at slots 2, 3  -> drafts x
    step 1 reads (d x) at slots 3, 4  -> drafts y; in flight: c d x
    n tokens emitted: the first n of (c d x) are committed, and the cache is two behind again
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache
from jspec.drafters.base import Context, Draft, Passage, draft_token, drafted_before
from jspec.model import Model, Output


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts K tokens one after the other with `model`."""

    model: Model
    vocab_size: int
    """The target's; the draft's own may be padded differently."""
    num_speculative_tokens: int = 6
    page_size: int = 16
    name: str = "draft model"
    taps: tuple[int, ...] = ()
    num_best: int = 0

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens

    def init(self, batch: int, capacity: int, dtype: Any) -> Cache:
        cache = cache_lib.init_cache(
            self.model.cache_spec, batch, capacity, page_size=self.page_size, dtype=dtype
        )
        return cache.replace(lengths=cache.lengths - 1)

    def read(self, params: Any, state: Cache, context: Context, passage: Passage) -> Cache:
        width = passage.tokens.shape[1]
        slots = jnp.maximum(state.positions(width), 0)
        block = jnp.take_along_axis(context.tokens, slots, axis=1, mode="clip")
        out = self.model.forward(params, block, cache_lib.open_block(state, width))
        return cache_lib.commit_read(out.cache, passage.num_tokens)

    def propose(self, params: Any, state: Cache, context: Context) -> tuple[Draft, Cache]:
        with jax.named_scope("draft"):
            return self._propose(params, state, context)

    def commit(self, params: Any, state: Cache, context: Context, passage: Passage) -> Cache:
        return cache_lib.commit(state, passage.num_tokens)

    def _propose(self, params: Any, state: Cache, context: Context) -> tuple[Draft, Cache]:
        K = self.num_speculative_tokens

        def step(carry: tuple[Array, Array, Cache], i: Array) -> tuple[Any, Array]:
            pair, drafts, cache = carry
            out = self.model.forward(params, pair, cache)
            logits = fit_vocabulary(out.logits[:, 1], self.vocab_size)
            token, law = draft_token(logits, context, drafts, i)
            pair = jnp.stack([pair[:, 1], token], axis=1)
            cache = out.cache.replace(in_flight=cache.in_flight + 1)
            return (pair, drafts.at[:, i].set(token), cache), law

        where = context.lengths[:, None] + jnp.array([-2, -1])
        pair = jnp.take_along_axis(context.tokens, jnp.maximum(where, 0), axis=1)
        block = cache_lib.open_block(state, K + 1).replace(in_flight=jnp.int32(0))
        nothing = jnp.zeros((pair.shape[0], K), jnp.int32)
        (_, drafts, state), laws = jax.lax.scan(step, (pair, nothing, block), jnp.arange(K))
        laws = laws.transpose(1, 0, 2)
        return Draft(drafts, laws, drafted_before(laws)), state


@functools.cache
def fitted(model: Model, vocab_size: int) -> Model:
    """The same model with logits over `vocab_size` tokens: its own, if it has as many."""
    if model.vocab_size == vocab_size:
        return model

    def forward(params: Any, tokens: Array, cache: Cache) -> Output:
        out = model.forward(params, tokens, cache)
        return out._replace(logits=fit_vocabulary(out.logits, vocab_size))

    return dataclasses.replace(model, forward=forward, forward_from=None, vocab_size=vocab_size)


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """Logits cut or padded with -inf on the last axis to `vocab_size` entries."""
    extra = vocab_size - logits.shape[-1]
    if extra <= 0:
        return logits[..., :vocab_size]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, extra)], constant_values=-jnp.inf)
