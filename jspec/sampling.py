"""The law of the next token: from logits, a row's settings and the tokens before it.

`process_logits` is the one place where settings act: plain sampling, drafts, the verifier and
processed logprobs all go through it (`by_kind` skips it where no row asks for anything). Knows
nothing of speculation: a place is a place, whatever stands before it was committed or drafted.

The order is vLLM's: allowed tokens and logit_bias, bad words, min_tokens, the user's processor,
penalties, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec import draws
from jspec.draws import argmax

LogitsProcessor = Callable[[Array, Array, Array], Array]
"""`(logits [V] float32, tokens [S] int32, position) -> logits [V]`, pure. The tokens before
`position` are the text so far, those from it on are -1; -inf forbids a token."""

PAD_TOKEN = -1
"""Stands where an array of tokens has none."""


class Sampling(flax.struct.PyTreeNode):
    """Settings of B rows; rows may differ in all of them. `neutral` changes nothing."""

    temperature: Array
    """`[B]` float32; 0 is greedy, and then there are no filters."""
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
    repetition_penalty: Array
    """`[B]` float32; 1 is none. Acts on tokens of the prompt and the output."""
    presence_penalty: Array
    """`[B]` float32; 0 is none. Acts on tokens of the output."""
    frequency_penalty: Array
    """`[B]` float32; 0 is none. Acts on tokens of the output, by their count."""
    bias: Array
    """`[B, V]` float32 added to logits; -inf forbids a token."""
    biased: Array
    """`[B]` bool: `bias` is not all zero."""
    bad_words: Array
    """`[B, W, N]` int32: sequences that must not be completed, padded on the left with PAD_TOKEN;
    a row of padding is no word."""
    stop_ids: Array
    """`[B, E]` int32, padded with PAD_TOKEN: tokens that end the row."""
    prompt_lengths: Array
    """`[B]` int32: where the output begins."""
    min_lengths: Array
    """`[B]` int32: no stop token stands at a position before this one."""
    num_logprobs: Array
    """`[B]` int32: how many of the most probable tokens to report with each; -1: not even its
    own."""
    processed_logprobs: Array
    """`[B]` bool: report them after all settings, instead of the model's own."""
    processor: LogitsProcessor | None = flax.struct.field(pytree_node=False, default=None)
    """The user's own, for all rows."""


def neutral(rows: int, vocab_size: int) -> Sampling:
    """Greedy rows without stop tokens that ask for nothing."""
    zeros, counts = jnp.zeros((rows,), jnp.float32), jnp.zeros((rows,), jnp.int32)
    no = jnp.zeros((rows,), jnp.bool_)
    return Sampling(
        temperature=zeros,
        top_k=counts,
        top_p=zeros + 1.0,
        min_p=zeros,
        seed=jnp.zeros((rows,), jnp.uint32),
        coupled=no,
        repetition_penalty=zeros + 1.0,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        bias=jnp.zeros((rows, vocab_size), jnp.float32),
        biased=no,
        bad_words=jnp.full((rows, 1, 1), PAD_TOKEN, jnp.int32),
        stop_ids=jnp.full((rows, 1), PAD_TOKEN, jnp.int32),
        prompt_lengths=counts,
        min_lengths=counts,
        num_logprobs=counts - 1,
        processed_logprobs=no,
    )


class Prefix(flax.struct.PyTreeNode):
    """The tokens before each of T places: what is committed, then drafts. A chain's place j has
    the j drafts before it; a node of a tree has the path to it."""

    tokens: Array
    """`[B, S]` int32."""
    lengths: Array
    """`[B]` int32: how many of `tokens` are committed."""
    drafts: Array
    """`[B, T, D]` int32."""
    depths: Array
    """`[B, T]` int32: how many of `drafts` stand before the place."""

    @property
    def positions(self) -> Array:
        """`[B, T]` int32: the absolute position of each place."""
        return self.lengths[:, None] + self.depths

    def texts(self) -> Array:
        """`[B, T, S]` int32: all tokens before each place, then PAD_TOKEN."""
        where = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        text = self._at(jnp.broadcast_to(where, (*self.positions.shape, where.size)))
        return jnp.where(where < self.positions[..., None], text, PAD_TOKEN)

    def last(self, count: int) -> Array:
        """`[B, T, count]`: the tokens right before each place; PAD_TOKEN before the first."""
        where = self.positions[..., None] - count + jnp.arange(count, dtype=jnp.int32)
        return jnp.where(where >= 0, self._at(where), PAD_TOKEN)

    def _at(self, where: Array) -> Array:
        """The tokens at absolute positions `[B, T, M]`; out of range means nothing."""
        drafted = where - self.lengths[:, None, None]
        last = self.tokens.shape[1] - 1
        committed = jnp.take_along_axis(self.tokens[:, None], jnp.clip(where, 0, last), axis=2)
        if self.drafts.shape[2] == 0:
            return committed
        drafts = jnp.take_along_axis(self.drafts, jnp.maximum(drafted, 0), axis=2, mode="clip")
        return jnp.where(drafted >= 0, drafts, committed)


def chain_prefix(tokens: Array, lengths: Array, drafts: Array) -> Prefix:
    """The K + 1 places before, between and behind `drafts` `[B, K]`."""
    B, K = drafts.shape
    return Prefix(
        tokens=tokens,
        lengths=lengths,
        drafts=jnp.broadcast_to(drafts[:, None], (B, K + 1, K)),
        depths=jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), (B, K + 1)),
    )


def probs_from_logits(logits: Array, sampling: Sampling, prefix: Prefix) -> Array:
    """The law `[B, T, V]` float32 that the rows' settings make of `[B, T, V]` logits. All zero
    where no token is allowed. Temperature 0 gives a one-hot law, at the first of the largest."""
    return by_kind(
        logits,
        sampling,
        prefix,
        greedy=lambda x: jax.nn.one_hot(argmax(x), x.shape[-1], dtype=jnp.float32),
        soft=lambda x: softmax(x, inverse_temperature(sampling)[:, None]),
    )


def by_kind[Result](
    logits: Array,
    sampling: Sampling,
    prefix: Prefix,
    *,
    greedy: Callable[[Array], Result],
    soft: Callable[[Array], Result],
) -> Result:
    """Reads the law of each place in the cheapest way that the rows' settings allow.

    `soft` gets logits for which softmax(logits / temperature), temperature 0 counted as 1, is the
    law; `greedy` gets logits whose argmax is the token of every row. What they do to a row does
    not depend on the other rows: processed logits of a row that asks for nothing are its logits.
    """
    logits = logits.astype(jnp.float32)
    is_greedy = sampling.temperature == 0
    every, some = jnp.all(is_greedy), jnp.any(is_greedy)
    needed = _adjusts(sampling, prefix) | _filters(sampling) | (some & ~every)
    kind = jnp.where(needed, 2, jnp.where(every, 0, 1))
    return jax.lax.switch(
        kind,
        (
            lambda: greedy(logits),
            lambda: soft(logits),
            lambda: soft(process_logits(logits, sampling, prefix)),
        ),
    )


def inverse_temperature(sampling: Sampling) -> Array:
    """`[B]`: what processed logits are multiplied by; 1 for greedy rows."""
    warm = sampling.temperature > 0
    return jnp.where(warm, 1.0 / jnp.where(warm, sampling.temperature, 1.0), 1.0)


@jax.jit  # traced once a shape
def softmax(logits: Array, scale: Array) -> Array:
    """softmax(logits * scale) over the last axis, zeros where all are -inf; `scale` `[...]`."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp((logits - jnp.where(peak > -jnp.inf, peak, 0.0)) * scale[..., None])
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


@jax.jit  # traced once a shape
def process_logits(logits: Array, sampling: Sampling, prefix: Prefix) -> Array:
    """`[B, T, V]` float32: the logits after all settings but the temperature, with -inf for what
    is filtered out; a greedy row keeps its largest token alone. NaN stays NaN."""
    logits = jax.lax.cond(
        _adjusts(sampling, prefix),
        lambda: _adjust(logits.astype(jnp.float32), sampling, prefix),
        lambda: logits.astype(jnp.float32),
    )
    return jax.lax.cond(
        _filters(sampling) | jnp.any(sampling.temperature == 0),
        lambda: _filter(logits, sampling),
        lambda: logits,
    )


def _adjusts(sampling: Sampling, prefix: Prefix) -> Array:
    """Whether any row has a setting that changes logits."""
    if sampling.processor is not None:
        return jnp.bool_(True)
    return jnp.any(
        sampling.biased
        | (sampling.bad_words[..., -1] != PAD_TOKEN).any(axis=1)
        | (prefix.lengths < sampling.min_lengths)
        | _penalised(sampling)
    )


def _penalised(sampling: Sampling) -> Array:
    return (
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )


def _adjust(logits: Array, sampling: Sampling, prefix: Prefix) -> Array:
    logits = logits + sampling.bias[:, None]
    logits = _forbid(logits, _bad_endings(sampling, prefix))
    too_early = prefix.positions < sampling.min_lengths[:, None]
    stops = jnp.where(too_early[..., None], sampling.stop_ids[:, None], PAD_TOKEN)
    logits = _forbid(logits, stops)
    if sampling.processor is not None:
        by_place = jax.vmap(jax.vmap(sampling.processor))
        logits = by_place(logits, prefix.texts(), prefix.positions).astype(jnp.float32)
    return jax.lax.cond(
        jnp.any(_penalised(sampling)),
        lambda: _penalise(logits, sampling, prefix),
        lambda: logits,
    )


def _forbid(logits: Array, tokens: Array) -> Array:
    """-inf at `tokens` `[B, T, M]`, PAD_TOKEN among them."""
    B, T, V = logits.shape
    where = jnp.where(tokens == PAD_TOKEN, V, tokens)
    rows, places = jnp.arange(B)[:, None, None], jnp.arange(T)[:, None]
    return logits.at[rows, places, where].set(-jnp.inf, mode="drop")


def _bad_endings(sampling: Sampling, prefix: Prefix) -> Array:
    """`[B, T, W]`: the token that would complete each bad word, PAD_TOKEN where none would."""
    words = sampling.bad_words[:, None]  # [B, 1, W, N]
    start, end = words[..., :-1], words[..., -1]
    before = prefix.last(start.shape[-1])
    where = prefix.positions[..., None] - start.shape[-1] + jnp.arange(start.shape[-1])
    before = jnp.where(where >= sampling.prompt_lengths[:, None, None], before, PAD_TOKEN - 1)
    fits = jnp.all((start == PAD_TOKEN) | (start == before[:, :, None]), axis=-1)
    return jnp.where(fits, end, PAD_TOKEN)


def _penalise(logits: Array, sampling: Sampling, prefix: Prefix) -> Array:
    """Repetition (arXiv 1909.05858), then frequency and presence penalties (OpenAI's)."""
    in_prompt, in_output = _counts(sampling, prefix, logits.shape[-1])
    repetition, frequency, presence = (
        x[:, None, None]
        for x in (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
    )
    seen = (in_prompt[:, None] > 0) | (in_output > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    return logits - frequency * in_output - presence * jnp.minimum(in_output, 1.0)


def _counts(sampling: Sampling, prefix: Prefix, vocab_size: int) -> tuple[Array, Array]:
    """How often each token stands in the prompt, `[B, V]`, and in the output before each place,
    `[B, T, V]`; float32. Counted anew: nothing to keep in step with what is accepted."""
    B, S = prefix.tokens.shape
    T, D = prefix.drafts.shape[1:]
    rows, where = jnp.arange(B)[:, None], jnp.arange(S)
    tokens = jnp.where(where < prefix.lengths[:, None], prefix.tokens, vocab_size)
    is_prompt = where < sampling.prompt_lengths[:, None]
    none = jnp.zeros((B, vocab_size), jnp.float32)
    in_prompt = none.at[rows, jnp.where(is_prompt, tokens, vocab_size)].add(1.0, mode="drop")
    in_output = none.at[rows, jnp.where(is_prompt, vocab_size, tokens)].add(1.0, mode="drop")
    before = jnp.arange(D) < prefix.depths[..., None]
    drafts = jnp.where(before, prefix.drafts, vocab_size)
    in_output = jnp.broadcast_to(in_output[:, None], (B, T, vocab_size))
    places = jnp.arange(T)[:, None]
    return in_prompt, in_output.at[rows[..., None], places, drafts].add(1.0, mode="drop")


def _filters(sampling: Sampling) -> Array:
    """Whether any row that is not greedy cuts off improbable tokens."""
    asked = (sampling.min_p > 0) | (sampling.top_k > 0) | (sampling.top_p < 1)
    return jnp.any(asked & (sampling.temperature > 0))


def _filter(logits: Array, sampling: Sampling) -> Array:
    """min_p, top_k, top_p, each on what the one before left; ties at a threshold are all kept."""
    scale, top_k, top_p, min_p = (
        x[:, None, None]
        for x in (inverse_temperature(sampling), sampling.top_k, sampling.top_p, sampling.min_p)
    )
    scaled = logits * scale
    floor = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(min_p)

    def kth_largest() -> Array:
        ones = jnp.ones_like(scaled)
        found = _threshold(scaled, ones, top_k.astype(jnp.float32))
        return jnp.where(top_k > 0, jnp.maximum(floor, found), floor)

    floor = jax.lax.cond(jnp.any(sampling.top_k > 0), kth_largest, lambda: floor)

    def nucleus() -> Array:
        kept = jnp.where(scaled >= floor, scaled, -jnp.inf)
        found = _threshold(scaled, jax.nn.softmax(kept, axis=-1), top_p)
        return jnp.where(top_p < 1, jnp.maximum(floor, found), floor)

    floor = jax.lax.cond(jnp.any(sampling.top_p < 1), nucleus, lambda: floor)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    is_largest = index == argmax(logits)[..., None]
    greedy = (sampling.temperature == 0)[:, None, None]
    dropped = jnp.where(greedy, ~is_largest & ~jnp.isnan(logits), scaled < floor)
    return jnp.where(dropped, -jnp.inf, logits)


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


def draw_key(sampling: Sampling, positions: Array, purpose: Array | int) -> draws.Key:
    """The keys of draws at `positions` `[B, T]`; `purpose` is one for all rows or `[B]`."""
    each = jnp.broadcast_to(jnp.asarray(purpose, jnp.int32), sampling.seed.shape)
    # XLA's simplifier goes round in circles over a `where` that reaches the generator (0.12).
    each = jax.lax.optimization_barrier(each)
    return draws.draw_key(sampling.seed[:, None], positions, each[:, None])
