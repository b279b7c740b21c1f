"""A draft head that checks what something cheaper drafts: `cascade(ngram, mtp:PATH)`.

To a cascade the head is a model with a cache: one entry a token, made of the token and of what was
thought at the one before. What the newest entry hands on is kept in the cache as well, as the keys
of a layer behind the head's own, so that tentative tokens, rows of different speed and commits
need no more care than keys and values do.

    committed a b c d (d unread): entries (h_a, b) (h_b, c), and h_c for the next
    check     reads (h_c, d), then drafts x y as (g_d, x) (g_x, y), where g is its own output
    commit    the same entries of what the target thought: (h_c, d) (h_d, x), and h_x for the next

The passes over a block are in turn, a token each: the head reads its own output (drafting with a
head is no faster). After EAGLE, arXiv 2401.15077, and MTP, 2412.19437.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec import heads
from jspec.attention import attend
from jspec.cache import Cache, CacheSpec, KeysValues
from jspec.drafters.base import Context, Passage
from jspec.head_params import HeadConfig, HeadParams
from jspec.model import Model, Output

_PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class HeadVerifier:
    """Judges by a head's laws."""

    config: HeadConfig
    name: str = "head"
    num_shared: int = 0
    says: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def model(self) -> Model:
        return head_model(self.config)

    def init(self, batch: int, capacity: int, dtype: Any) -> Cache:
        spec, D = self.model.cache_spec, self.config.layers.hidden_size
        cache = cache_lib.init_cache(spec, batch, capacity, page_size=_PAGE_SIZE, dtype=dtype)
        slots = cache.pages[0].keys.shape[:2]
        handed_on = KeysValues(jnp.zeros((*slots, 1, D), dtype), jnp.zeros((*slots, 1, 0), dtype))
        return cache.replace(pages=(*cache.pages, handed_on), lengths=cache.lengths - 1)

    def cache(self, state: Cache, context: Context) -> Cache:
        return state

    def read(self, params: HeadParams, state: Cache, context: Context, passage: Passage) -> Cache:
        width = passage.tokens.shape[1]
        cache = cache_lib.open_block(state, width)
        positions = cache.positions(width)
        tokens = jnp.take_along_axis(
            context.tokens, jnp.maximum(positions + 1, 0), axis=1, mode="clip"
        )
        fused = heads.fuse(params, self.config, passage.features)
        before = cache_lib.newest_keys(state, -1)
        carried = jnp.concatenate([before, fused[:, :-1]], axis=1)
        _, cache = heads.forward(
            params, self.config, tokens, carried, cache, positions=positions, attend=attend
        )
        return cache_lib.commit_read(_hand_on(cache, fused), passage.num_tokens)

    def commit(self, params: HeadParams, state: Cache, context: Context, passage: Passage) -> Cache:
        return self.read(params, state.replace(block=()), context, passage)


@functools.cache
def head_model(config: HeadConfig) -> Model:
    """A head as a model; its parameters are the head's."""
    layers = config.layers

    def forward(params: HeadParams, tokens: Array, cache: Cache) -> Output:
        start, carried, outputs = cache.in_flight, cache_lib.newest_keys(cache, -1), []
        for i in range(tokens.shape[1]):
            cache = cache.replace(in_flight=start + i)
            hidden, cache = heads.forward(
                params,
                config,
                tokens[:, i : i + 1],
                carried,
                cache,
                positions=cache.positions(1),
                attend=attend,
            )
            carried = heads.carry(params, config, hidden)
            cache = _hand_on(cache, carried)
            outputs.append(hidden)
        logits = heads.logits(params, config, jnp.concatenate(outputs, axis=1))
        known = heads.in_target_vocabulary(logits, params.token_ids, layers.vocab_size)
        return Output(known, (), cache.replace(in_flight=start))

    spec = CacheSpec(layers.num_hidden_layers, layers.num_key_value_heads, layers.head_dim)
    return Model(forward, layers.vocab_size, layers.max_position_embeddings, spec)


def _hand_on(cache: Cache, carried: Array) -> Cache:
    """The cache with what entries `[B, T, D]` hand on, behind those in flight."""
    keys = carried[:, :, None]
    return cache_lib.append(cache, len(cache.pages) - 1, keys, keys[..., :0])
