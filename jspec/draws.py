"""Random draws that are functions of (seed, position, purpose) alone, and the argmax they need.

The generator is Threefry-2x32 (Salmon et al., SC 2011), and its numbers are those of `jax.random`;
written out here, so that XLA fuses it into whatever reads the noise: six times faster on a CPU,
and the noise of a vocabulary is never in memory. Knows nothing of settings or models.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

GROUP_SIZE = 16
"""Tokens a group (see `Law`)."""
_NUM_CHUNKS = 128
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class Purpose(enum.IntEnum):
    """What a draw at a position is for. Draws of different purposes are independent."""

    TARGET = 0
    """The token that the target itself puts there (recovered, bonus, plain, coupled)."""
    DRAFT = 1
    """The token that a drafter proposes there."""
    ACCEPT = 2
    """The coin that decides whether the proposal stands."""
    LEVEL = 3
    """The seed of what a cascade draws below the target; its position is the level."""


Key = tuple[Array, Array]
"""Two uint32 words, arrays of one shape."""


@jax.jit  # traced once a shape
def threefry(key: Key, counter: Key) -> Key:
    """20 rounds of Threefry-2x32; shapes broadcast."""
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for i in range(5):
        for turn in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(turn)) | (y >> jnp.uint32(32 - turn)))
        x, y = x + words[(i + 1) % 3], y + words[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y


def draw_key(seed: Array, positions: Array, purpose: Array | int) -> Key:
    """The key of one draw for each position: `fold_in(fold_in(key(seed), position), purpose)` in
    the words of `jax.random`. Shapes broadcast; nothing else enters (invariant 4)."""
    key = jnp.zeros_like(seed, jnp.uint32), seed.astype(jnp.uint32)
    for word in (positions, jnp.asarray(purpose)):
        key = threefry(key, (jnp.uint32(0), word.astype(jnp.uint32)))
    return key


def random_bits(key: Key, lane: int, index: Array) -> Array:
    """32 random bits for each `index`; `lane` tells apart the uses that one draw makes of its key.
    Lane 0 is `jax.random.bits`."""
    x, y = threefry(key, (jnp.uint32(lane), index.astype(jnp.uint32)))
    return x ^ y


def uniform(key: Key, index: Array | None = None) -> Array:
    """A number in [0, 1) for each key, a multiple of 2**-24; the first of those that a key has,
    or those at `index`."""
    bits = random_bits(key, 0, jnp.zeros_like(key[0]) if index is None else index)
    return (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)


def exponential(key: Key, lane: int, index: Array) -> Array:
    """Standard exponential noise. Its smallest values are 2**-32 apart, so that tokens with
    probabilities far below 2**-24, float32's steps near one, still get their share."""
    bits = random_bits(key, lane, index).astype(jnp.float32)
    below_one = jnp.float32(1 - 2**-24)
    return -jnp.log1p(-jnp.minimum(bits * jnp.float32(2**-32) + jnp.float32(2**-33), below_one))


class Law(NamedTuple):
    """softmax(logits * scale) for any number of places. Probabilities are not written out: one
    pass over the logits gives the weights of groups of `GROUP_SIZE` tokens, and the rest is read
    where it is needed."""

    logits: Array
    """`[..., V]` float32; -inf has no chance, the largest is finite."""
    scale: Array
    """`[...]`."""
    peak: Array
    """`[...]`: the largest logit; infinite if any is NaN."""
    group_weights: Array
    """`[..., groups]`: sums of exp((logits - peak) * scale). Token v lies in group v % groups."""


@jax.jit  # traced once a shape
def law_of(logits: Array, scale: Array) -> Law:
    """The law of `[..., V]` logits; `scale` `[...]` is the inverse temperature."""
    peak = jnp.max(logits, axis=-1)
    above = _grouped(logits) - peak[..., None, None]
    weights = jnp.sum(jnp.exp(above * scale[..., None, None]), axis=-2)
    weights = jax.lax.optimization_barrier(weights)
    # A maximum overlooks NaN on some devices (on a CPU, XLA's does); a sum does not.
    hides_nan = jnp.isnan(jnp.sum(weights, axis=-1)) & (peak > -jnp.inf)
    return Law(logits, scale, jnp.where(hides_nan, jnp.inf, peak), weights)


def probs_at(law: Law, place: Array) -> Array:
    """`[B, V]`: the probabilities at one `place` `[B]` of each row of a law of `[B, T]` places."""
    rows = jnp.arange(place.size)
    logits, scale, peak, group_weights = (x[rows, place] for x in law)
    total = jnp.sum(group_weights, axis=-1)
    return jnp.exp((logits - peak[:, None]) * scale[:, None]) / total[:, None]


def prob_of(law: Law, tokens: Array) -> Array:
    """The probability of one of `tokens` `[...]` at each place."""
    chosen = jnp.take_along_axis(law.logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.exp((chosen - law.peak) * law.scale) / jnp.sum(law.group_weights, axis=-1)


@jax.jit  # traced once a shape
def draw(law: Law, key: Key) -> Array:
    """A token `[...]` int32 from each law, with keys `[...]`; see `draw_weighted`."""

    def weights_in(group: Array) -> Array:
        members = jnp.take_along_axis(_grouped(law.logits), group[..., None], axis=-1)[..., 0]
        return jnp.exp((members - law.peak[..., None]) * law.scale[..., None])

    return _race(law.group_weights, weights_in, key)


@jax.jit  # traced once a shape
def draw_weighted(weights: Array, key: Key) -> Array:
    """A token `[...]` int32 in proportion to `weights` `[..., V]`, with keys `[...]`.

    An exponential race (the Gumbel-max trick): the argmax of weight / noise. It is run over
    groups of tokens first, by their total weights, then inside the winner, which has the same law
    for a sixteenth of the noise. With one key, draws from similar laws mostly agree.
    """
    groups = _grouped(weights, pad=0.0)

    def weights_in(group: Array) -> Array:
        return jnp.take_along_axis(groups, group[..., None], axis=-1)[..., 0]

    return _race(jnp.sum(groups, axis=-2), weights_in, key)


def _race(group_weights: Array, weights_in: Callable[[Array], Array], key: Key) -> Array:
    """Weights `[..., groups]` and those in a group `[..., 1]`, `[..., GROUP_SIZE]`."""
    num_groups = group_weights.shape[-1]
    key = (key[0][..., None], key[1][..., None])
    group = argmax(group_weights / exponential(key, 1, jnp.arange(num_groups)))[..., None]
    tokens = group + num_groups * jnp.arange(GROUP_SIZE, dtype=jnp.int32)
    winner = argmax(weights_in(group) / exponential(key, 0, tokens))
    return jnp.take_along_axis(tokens, winner[..., None], axis=-1)[..., 0]


def _grouped(x: Array, pad: float = -jnp.inf) -> Array:
    """`[..., GROUP_SIZE, groups]`: token v lies in group `v % groups`."""
    missing = -x.shape[-1] % GROUP_SIZE
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=pad)
    return x.reshape(*x.shape[:-1], GROUP_SIZE, -1)


def argmax(x: Array) -> Array:
    """int32 index of the first of the largest entries on the last axis."""
    return largest(x)[1]


@jax.jit  # traced once a shape
def largest(x: Array) -> tuple[Array, Array]:
    """Value and int32 index of the first of the largest entries on the last axis; NaN counts as
    infinite.

    By chunks and then inside one: plain maxima, which XLA vectorises on a CPU, where its own
    argmax is ten times slower.
    """
    size = x.shape[-1]
    if size <= _NUM_CHUNKS:
        return _max(x), _first_largest(x)
    missing = -size % _NUM_CHUNKS
    if missing:
        pads = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
        x = jnp.pad(x, pads, constant_values=-jnp.inf)
    chunks = x.reshape(*x.shape[:-1], _NUM_CHUNKS, -1)  # so a split vocabulary stays split
    peaks = _max(chunks)
    which = _first_largest(peaks)
    inside = jnp.take_along_axis(chunks, which[..., None, None], axis=-2)[..., 0, :]
    index = jnp.minimum(which * chunks.shape[-1] + _first_largest(inside), size - 1)
    return jnp.max(peaks, axis=-1), index


def _max(x: Array) -> Array:
    """Over the last axis; infinite if any is NaN, which a maximum overlooks on some devices."""
    return jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.inf, jnp.max(x, axis=-1))


def _first_largest(x: Array) -> Array:
    size = x.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    is_top = x >= jnp.max(x, axis=-1, keepdims=True)
    return jnp.minimum(jnp.min(jnp.where(is_top, index, size), axis=-1), size - 1)
