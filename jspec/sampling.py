"""Probabilities from logits, and draws that depend on (seed, position, purpose) alone.

`probs_from_logits` is the one function that turns logits into a law: plain sampling, drafts and
the verifier all use it. Knows nothing of speculation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array


class Purpose(enum.IntEnum):
    """What a draw at a position is for. Draws of different purposes are independent."""

    TARGET = 0
    """The token that the target itself puts there (recovered, bonus, plain, coupled)."""
    DRAFT = 1
    """The token that a drafter proposes there."""
    ACCEPT = 2
    """The coin that decides whether the proposal stands."""


class Sampling(flax.struct.PyTreeNode):
    """Settings of B rows; rows may differ in all of them."""

    temperature: Array
    """`[B]` float32; 0 is greedy."""
    top_k: Array
    """`[B]` int32; 0 keeps all."""
    top_p: Array
    """`[B]` float32 in (0, 1]; 1 keeps all."""
    min_p: Array
    """`[B]` float32 in [0, 1]; 0 keeps all."""
    seed: Array
    """`[B]` uint32."""
    coupled: Array
    """`[B]` bool: verify by the coupled rule instead of rejection sampling."""


def probs_from_logits(logits: Array, sampling: Sampling) -> Array:
    """The law `[B, T, V]` float32 that the rows' settings make of `[B, T, V]` logits.

    Temperature first, then min_p, top_k, top_p, each on what the one before left (the order of
    vLLM). Ties at a threshold are all kept. Temperature 0 gives a one-hot law at the first of
    the largest logits. A filter that no row asks for costs nothing.
    """
    logits = logits.astype(jnp.float32)
    return jax.lax.cond(jnp.all(sampling.temperature == 0), _greedy, _soft, logits, sampling)


def argmax(x: Array) -> Array:
    """int32 index of the first largest entry on the last axis; two plain reductions, which XLA
    vectorises on a CPU where its own argmax is several times slower over a vocabulary."""
    size = x.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    is_top = x >= jnp.max(x, axis=-1, keepdims=True)
    return jnp.minimum(jnp.min(jnp.where(is_top, index, size), axis=-1), size - 1)


def _greedy(logits: Array, sampling: Sampling) -> Array:
    del sampling
    return jax.nn.one_hot(argmax(logits), logits.shape[-1], dtype=jnp.float32)


def _soft(logits: Array, sampling: Sampling) -> Array:
    temperature, top_k, top_p, min_p = (
        x[:, None, None]
        for x in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    )
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    floor = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(min_p)
    scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    scaled = _when(sampling.top_k > 0, lambda x: _keep_top_k(x, top_k), scaled)
    scaled = _when(sampling.top_p < 1, lambda x: _keep_top_p(x, top_p), scaled)
    return jnp.where(temperature > 0, jax.nn.softmax(scaled, axis=-1), _greedy(logits, sampling))


def _when(asked: Array, keep: Callable[[Array], Array], scaled: Array) -> Array:
    return jax.lax.cond(jnp.any(asked), keep, lambda x: x, scaled)


def _keep_top_k(scaled: Array, k: Array) -> Array:
    """Masks what is below the k-th largest; rows with k = 0 are left alone."""
    threshold = _threshold(scaled, jnp.ones_like(scaled), k.astype(jnp.float32))
    return jnp.where((scaled >= threshold) | (k == 0), scaled, -jnp.inf)


def _keep_top_p(scaled: Array, p_kept: Array) -> Array:
    """Masks what is outside the smallest set of largest tokens whose mass reaches `p_kept`."""
    threshold = _threshold(scaled, jax.nn.softmax(scaled, axis=-1), p_kept)
    return jnp.where((scaled >= threshold) | (p_kept >= 1), scaled, -jnp.inf)


def _threshold(values: Array, weights: Array, wanted: Array) -> Array:
    """The largest t for which the weight of `values >= t` reaches `wanted`; `[B, T, 1]`.

    A bisection over the 32 bits of a float, each step one masked sum over the vocabulary: no
    sort, and the same reductions whether or not the vocabulary is sharded.
    """
    keys = _ordered_bits(values)

    def raise_bit(i: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        weight = jnp.sum(jnp.where(keys >= candidate, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(weight >= wanted, candidate, threshold)

    start = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    found = jax.lax.fori_loop(0, 32, raise_bit, start)
    lowest = _ordered_bits(jnp.float32(-jnp.inf))  # below it lie only the bits of NaNs
    return _from_ordered_bits(jnp.maximum(found, lowest))


def _ordered_bits(values: Array) -> Array:
    """uint32 keys in the order of the floats (sign flipped, negatives reversed)."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _from_ordered_bits(keys: Array) -> Array:
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(keys & sign, keys ^ sign, ~keys), jnp.float32)


def draw_key(seed: Array, position: Array, purpose: Array | int) -> Array:
    """The key of one draw. Scalars in, a scalar key out; nothing else enters (invariant 4)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)


def gumbel_noise(seed: Array, positions: Array, purpose: Array | Purpose, vocab_size: int) -> Array:
    """Standard Gumbel noise `[B, T, V]` for `positions` `[B, T]` of rows with `seed` `[B]`.

    `purpose` is one for all rows or `[B]`. Entry v does not depend on `vocab_size`.
    """

    def one(seed: Array, position: Array, purpose: Array) -> Array:
        return jax.random.gumbel(draw_key(seed, position, purpose), (vocab_size,), jnp.float32)

    by_position = jax.vmap(one, (None, 0, None))
    return jax.vmap(by_position)(
        seed, positions, jnp.broadcast_to(jnp.asarray(purpose), seed.shape)
    )


def uniform_draw(seed: Array, positions: Array, purpose: Purpose) -> Array:
    """A number in [0, 1) for each of `positions` `[B, T]`."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(draw_key(seed, position, purpose), dtype=jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seed, positions)


def draw(law: Array, sampling: Sampling, positions: Array, purpose: Array | Purpose) -> Array:
    """A token `[B, T]` int32 from each law `[B, T, V]` (normalised or not), by Gumbel's argmax.

    Greedy rows have one-hot laws, so where all are greedy no noise is made.
    """

    def noisy(law: Array) -> Array:
        noise = gumbel_noise(sampling.seed, positions, purpose, law.shape[-1])
        return argmax(jnp.log(law) + noise)

    return jax.lax.cond(jnp.all(sampling.temperature == 0), argmax, noisy, law)
