"""The rules of `reference`, for Hopper GPUs in Pallas Mosaic GPU.

The work is reading laws of V tokens from memory; everything else is a handful of numbers a row.
So three kernels read, and what lies between and behind them is plain JAX on `[B, K]`, `[B, 16]`
and `[.., chunks]` numbers:

    sum_kernel       one reading of every place's logits: peak and normaliser
    coupled_kernel   one reading of every place's logits: peak and the race between groups
    residual_kernel  one reading of one place a row, and of the drafts' laws that are subtracted
                     from it: the sum of what is left, and the race between its groups

The vocabulary is viewed as `[16, groups]`, as in `jspec.draws` (token v lies in group v % groups),
and the groups are cut into chunks, one for each block of threads, so that one row fills a GPU. A
thread holds all sixteen members of its groups in registers. Each block writes the partial result
of its chunk: a sum relative to the chunk's own peak, the best of a race. No law is written out.

Loads are plain coalesced ones, 16 bytes a thread: every number is used once, by the thread that
loads it, so shared memory and TMA would add a step, and TMA cannot address rows whose length is
not a multiple of 16 bytes. The last chunk ends with the last group and repeats some of the one
before it; repeated groups are left out of sums and races.

What costs a copy: V that is no multiple of 16, or below 16 * `CHUNK`, is padded. Groups that are
no multiple of 4 (V of 64) cost nothing but narrower loads.

The noise is that of `jspec.draws`, bit for bit up to the logarithm's last places. So tokens are
those of `reference`, but where rounding decides a near tie.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import draws
from jspec.draws import GROUP_SIZE, Key
from pallas_kernels.rejection_sampling import reference
from pallas_kernels.rejection_sampling.reference import Decision, Outcome

CHUNK = 512
"""Groups a block of threads: four for each of its 128 threads, so 64 numbers in registers."""
_LOWEST = -3e38  # finite: the peak of a chunk in which no token is allowed
_LAST = 2**31 - 1
_PARAMS = plgpu.CompilerParams(approx_math=False)  # exp as exact as the reference's


# What the kernels share -----------------------------------------------------------------------


class _Chunk(NamedTuple):
    """The groups of one block of threads."""

    start: Any
    layout: Any
    groups: Any
    """`[CHUNK]` int32."""
    is_new: Any
    """`[CHUNK]` bool: not of the chunk before."""

    def load(self, ref: Any, *index: Any) -> tuple[Any, ...]:
        """The sixteen members of each group, float32, from `[..., 16, groups]`."""
        members = (ref.at[*index, j, pl.ds(self.start, CHUNK)] for j in range(GROUP_SIZE))
        return tuple(plgpu.load(m, layout=self.layout).astype(jnp.float32) for m in members)


def _chunk(num_groups: int) -> _Chunk:
    first, vector = lax.axis_index("chunk") * CHUNK, math.gcd(num_groups, 4)
    # A product last: so the compiler sees that vectors are aligned.
    start = (
        jnp.minimum(lax.axis_index("chunk") * (CHUNK // vector), (num_groups - CHUNK) // vector)
        * vector
    )
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), vec_size=vector)
    groups = start + plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
    return _Chunk(start, layout, groups, groups >= first)


def _peak_and_weights(chunk: _Chunk, logits: tuple[Any, ...], scale: Any) -> tuple[Any, Any]:
    """A chunk's largest logit, infinite if one is NaN, and the groups' sums of
    exp((logits - peak) * scale)."""
    largest = functools.reduce(jnp.maximum, (jnp.where(x != x, jnp.inf, x) for x in logits))
    peak = jnp.maximum(jnp.max(largest), jnp.float32(_LOWEST))
    weights = sum(jnp.exp((x - peak) * scale) for x in logits)
    return peak, jnp.where(chunk.is_new, weights, jnp.float32(0.0))


def _noise(key: Key, groups: Any) -> Any:
    """`draws.exponential` of lane 1, by a formula that needs no log1p: with y = 1 - x rounded,
    log(1 - x) = log(y) * x / (1 - y) to the last places (Kahan)."""
    bits = draws.random_bits(key, 1, groups).astype(jnp.float32)
    one, below_one = jnp.float32(1.0), jnp.float32(1 - 2**-24)
    x = jnp.minimum(bits * jnp.float32(2**-32) + jnp.float32(2**-33), below_one)
    y = one - x
    return jnp.where(y == one, x, -jnp.log(y) * (x / (one - y)))


def _race(chunk: _Chunk, weights: Any, noise: Any) -> tuple[Any, Any]:
    """The largest weight / noise of the chunk, and the first group that has it."""
    values = jnp.where(chunk.is_new, weights / noise, jnp.float32(-1.0))
    best = jnp.max(values)
    return best, jnp.min(jnp.where(values >= best, chunk.groups, jnp.int32(_LAST)))


# The kernels ----------------------------------------------------------------------------------


def sum_kernel(logits_ref, scale_ref, peak_ref, total_ref):
    """Peak and sum of one chunk of one place; grid (chunk, place, row)."""
    row, place, nth = map(lax.axis_index, ("row", "place", "chunk"))
    chunk = _chunk(logits_ref.shape[-1])
    logits = chunk.load(logits_ref, row, place)
    peak, weights = _peak_and_weights(chunk, logits, scale_ref[row])
    peak_ref[row, place, nth] = peak
    total_ref[row, place, nth] = jnp.sum(weights)


def coupled_kernel(logits_ref, scale_ref, key0_ref, key1_ref, peak_ref, best_ref, group_ref):
    """Peak and race of one chunk of one place; grid (chunk, place, row)."""
    row, place, nth = map(lax.axis_index, ("row", "place", "chunk"))
    chunk = _chunk(logits_ref.shape[-1])
    logits = chunk.load(logits_ref, row, place)
    peak, weights = _peak_and_weights(chunk, logits, scale_ref[row])
    noise = _noise((key0_ref[row, place], key1_ref[row, place]), chunk.groups)
    peak_ref[row, place, nth] = peak
    best_ref[row, place, nth], group_ref[row, place, nth] = _race(chunk, weights, noise)


def residual_kernel(
    target_ref,  # [B, T, 16, groups]: logits, or probabilities
    place_ref,  # [B]: which of the T
    scale_ref,  # [B]; it and the next two are not read if the target is probabilities
    peak_ref,
    total_ref,
    draft_ref,  # [B, K, 16, groups]: laws, or [B, K]: tokens
    first_ref,  # [B]: the first of the K that is subtracted
    count_ref,  # [B]: how many are; a row of -1 reads nothing and writes zeros
    factor_ref,  # [B, S]: how often each is
    key0_ref,  # [B]
    key1_ref,
    sum_ref,  # [B, S+1, chunks], and so the next two
    best_ref,
    group_ref,
    *,
    from_logits: bool,
    num_groups: int,
):
    """Stage s is what s subtractions leave of the target: its sum and race; grid (chunk, row)."""
    row, nth = map(lax.axis_index, ("row", "chunk"))
    count = count_ref[row]

    @pl.when(count >= 0)
    def _work():
        chunk = _chunk(target_ref.shape[-1])
        left = chunk.load(target_ref, row, place_ref[row])
        if from_logits:
            peak, scale, total = peak_ref[row], scale_ref[row], total_ref[row]
            left = tuple(jnp.exp((x - peak) * scale) / total for x in left)
        noise = _noise((key0_ref[row], key1_ref[row]), chunk.groups)

        def report(stage, left):
            weights = jnp.where(chunk.is_new, sum(left), jnp.float32(0.0))
            sum_ref[row, stage, nth] = jnp.sum(weights)
            best_ref[row, stage, nth], group_ref[row, stage, nth] = _race(chunk, weights, noise)

        def subtract(stage, left):
            at = first_ref[row] + stage
            if len(draft_ref.shape) == 2:
                report(stage, left)
                return _without(chunk, left, draft_ref[row, at], num_groups)
            draft = chunk.load(draft_ref, row, at)  # on its way while the stage is reported
            report(stage, left)
            less = (x - factor_ref[row, stage] * y for x, y in zip(left, draft, strict=True))
            return tuple(jnp.maximum(x, jnp.float32(0.0)) for x in less)

        report(count, lax.fori_loop(0, count, subtract, left))

    @pl.loop(count + 1, sum_ref.shape[1])
    def _fill(stage):
        sum_ref[row, stage, nth] = jnp.float32(0.0)
        best_ref[row, stage, nth] = jnp.float32(0.0)
        group_ref[row, stage, nth] = jnp.int32(0)


def _without(chunk: _Chunk, left: tuple[Any, ...], token: Any, num_groups: int) -> tuple[Any, ...]:
    """`left` with nothing at `token`."""
    member, group = lax.div(token, jnp.int32(num_groups)), lax.rem(token, jnp.int32(num_groups))
    gone = (jnp.where(member == j, group, jnp.int32(-1)) for j in range(GROUP_SIZE))
    return tuple(
        jnp.where(chunk.groups == g, jnp.float32(0.0), x) for g, x in zip(gone, left, strict=True)
    )


# Launches -------------------------------------------------------------------------------------


def _launch(
    body: Any, dtypes: tuple[Any, ...], entries: int, grid: dict[str, int], *args: Array
) -> list[Array]:
    """A block of threads for each chunk of the first argument, step of `grid`, and row; outputs
    `[B, entries, chunks]`, one of each dtype."""
    rows, num_chunks = args[0].shape[0], -(-args[0].shape[-1] // CHUNK)
    out = tuple(jax.ShapeDtypeStruct((rows, entries, num_chunks), dtype) for dtype in dtypes)
    steps = {"chunk": num_chunks, **grid, "row": rows}
    return plgpu.kernel(
        body,
        out_type=out,
        grid=tuple(steps.values()),
        grid_names=tuple(steps),
        compiler_params=_PARAMS,
    )(*args)


def _num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP_SIZE)


def _grouped(x: Array, pad: float) -> Array:
    """`[..., V]` as `[..., 16, groups]`, at least one chunk of groups."""
    num_groups = _num_groups(x.shape[-1])
    x = _padded(x, GROUP_SIZE * num_groups, pad).reshape(*x.shape[:-1], GROUP_SIZE, num_groups)
    return _padded(x, max(num_groups, CHUNK), pad)


def _padded(x: Array, size: int, pad: float) -> Array:
    widths = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    return jnp.pad(x, widths, constant_values=pad) if size > x.shape[-1] else x


class _Softmax(NamedTuple):
    """What it takes to make probabilities of logits."""

    scale: Array
    """`[B]`."""
    peak: Array
    """`[B, T]`: the largest logits."""
    total: Array
    """`[B, T]`: sums of exp((logits - peak) * scale)."""


def _largest(peak: Array) -> Array:
    """The largest logits of places whose chunks have these peaks."""
    return jnp.where(peak > _LOWEST, peak, -jnp.inf)


class _Target(NamedTuple):
    """The laws of T places."""

    values: Array
    """`[B, T, V]`: logits if there is a softmax, else probabilities."""
    softmax: _Softmax | None

    def probs(self, place: Array, tokens: Array) -> Array:
        """`[B, M]`: of `tokens` `[B, M]` at places `[B, M]` or `[B, 1]`; none beyond V."""
        rows, last = jnp.arange(tokens.shape[0])[:, None], self.values.shape[-1] - 1
        x = self.values[rows, place, jnp.clip(tokens, 0, last)].astype(jnp.float32)
        if self.softmax is not None:
            scale, peak, total = self.softmax
            x = jnp.exp((x - peak[rows, place]) * scale[:, None]) / total[rows, place]
        return jnp.where(tokens <= last, x, 0.0)


class _Drafts(NamedTuple):
    """Up to S of each row's K drafts, which are subtracted from the target one after another."""

    tokens: Array
    """`[B, K]` int32."""
    laws: Array | None
    """`[B, K, V]`; None: each is certain."""
    first: Array
    """`[B]` int32: which of the K is the first of the S."""
    factors: Array
    """`[B, S]`: how often each is subtracted."""

    def probs(self, nth: int, tokens: Array) -> Array:
        """`[B, M]`: of `tokens` `[B, M]`, under the law of the nth of the S."""
        rows, at = jnp.arange(tokens.shape[0])[:, None], (self.first + nth)[:, None]
        if self.laws is None:
            return (self.tokens[rows, at] == tokens).astype(jnp.float32)
        return self.laws[rows, at, jnp.clip(tokens, 0, self.laws.shape[-1] - 1)]

    def leave(self, target: Array, tokens: Array, count: Array) -> Array:
        """`[B, M]`: what `count` `[B]` subtractions leave of the target's probabilities of
        `tokens`."""
        for nth in range(self.factors.shape[1]):
            less = jnp.maximum(target - self.factors[:, nth, None] * self.probs(nth, tokens), 0.0)
            target = jnp.where((nth < count)[:, None], less, target)
        return target


def _softmax_of(logits: Array, scale: Array) -> _Softmax:
    """Reads `[B, T, V]` logits once."""
    values, places = _grouped(logits, -jnp.inf), logits.shape[1]
    dtypes = (jnp.float32, jnp.float32)
    peaks, totals = _launch(sum_kernel, dtypes, places, {"place": places}, values, scale)
    peak = jnp.max(peaks, axis=-1)
    totals *= jnp.exp((peaks - peak[..., None]) * scale[:, None, None])
    return _Softmax(scale, peak, jnp.sum(totals, axis=-1))


def _stages(
    target: _Target, place: Array, drafts: _Drafts, count: Array, key: Key
) -> tuple[Array, Array]:
    """Sums `[B, S+1]` of what 0..`count` subtractions leave of the target at `place` `[B]`, and
    the groups `[B, S+1]` that win the races there. Zeros behind `count`."""
    rows = jnp.arange(place.size)
    scale = peak = total = jnp.ones(place.shape, jnp.float32)
    if target.softmax is not None:
        scale, peak, total = target.softmax
        peak, total = peak[rows, place], total[rows, place]
    num_groups = _num_groups(target.values.shape[-1])
    from_logits = target.softmax is not None

    def residual(*refs):
        residual_kernel(*refs, from_logits=from_logits, num_groups=num_groups)

    sums, bests, groups = _launch(
        residual,
        (jnp.float32, jnp.float32, jnp.int32),
        drafts.factors.shape[1] + 1,
        {},
        _grouped(target.values, -jnp.inf if from_logits else 0.0),
        place,
        scale,
        peak,
        total,
        drafts.tokens if drafts.laws is None else _grouped(drafts.laws, 0.0),
        drafts.first,
        count,
        drafts.factors,
        *key,
    )
    return jnp.sum(sums, axis=-1), _best_group(bests, groups, num_groups)


def _best_group(bests: Array, groups: Array, num_groups: int) -> Array:
    """Of the winners `[..., chunks]` of each chunk; inside the vocabulary whatever they are."""
    nth = draws.argmax(bests)[..., None]
    return jnp.minimum(jnp.take_along_axis(groups, nth, axis=-1)[..., 0], num_groups - 1)


def _members(group: Array, vocab_size: int) -> Array:
    """The tokens `[..., 16]` of groups `[...]`; some may lie beyond V."""
    return group[..., None] + _num_groups(vocab_size) * jnp.arange(GROUP_SIZE, dtype=jnp.int32)


def _race_inside(weights: Array, tokens: Array, key: Key) -> Array:
    """The token `[...]` that wins among the members `[..., 16]` of a group."""
    noise = draws.exponential((key[0][..., None], key[1][..., None]), 0, tokens)
    winner = draws.argmax(weights / noise)[..., None]
    return jnp.take_along_axis(tokens, winner, axis=-1)[..., 0]


# The rules, with the arguments of those of the same names in `reference` -----------------------


def rejection(draft_tokens, draft_probs, num_drafted, target_probs, coins, keys) -> Decision:
    target = _Target(target_probs, None)
    return _reject(draft_tokens, draft_probs, num_drafted, target, coins, keys)


def rejection_from_logits(
    draft_tokens, draft_probs, num_drafted, logits, scale, coins, keys
) -> Outcome:
    softmax = _softmax_of(logits, scale)
    target = _Target(logits, softmax)
    decision = _reject(draft_tokens, draft_probs, num_drafted, target, coins, keys)
    return Outcome(*decision, _largest(softmax.peak))


def _reject(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target: _Target,
    coins: Array,
    keys: Key,
) -> Decision:
    rows, tokens = jnp.arange(draft_tokens.shape[0]), reference.padded(draft_tokens)
    place = jnp.arange(draft_tokens.shape[1])[None]
    drafted = reference.are_drafted(draft_tokens, num_drafted)
    chosen = target.probs(place, draft_tokens)
    accepted = reference.count_accepted(draft_tokens, draft_probs, drafted, chosen, coins)
    rejected = accepted < jnp.sum(drafted, axis=1, dtype=jnp.int32)
    once = jnp.ones((rows.size, 1), jnp.float32)
    drafts = _Drafts(tokens, draft_probs, accepted, once)
    key = keys[0][rows, accepted], keys[1][rows, accepted]
    sums, groups = _stages(target, accepted, drafts, rejected.astype(jnp.int32), key)
    taken = (rejected & (sums[:, 1] > 0)).astype(jnp.int32)
    return accepted, _next_token(target, accepted, drafts, taken, groups[rows, taken], key)


def _next_token(
    target: _Target, place: Array, drafts: _Drafts, taken: Array, group: Array, key: Key
) -> Array:
    tokens = _members(group, target.values.shape[-1])
    left = drafts.leave(target.probs(place[:, None], tokens), tokens, taken)
    return jnp.minimum(_race_inside(left, tokens, key), target.values.shape[-1] - 1)


def coupled_from_logits(draft_tokens, num_drafted, logits, scale, keys) -> Outcome:
    rows, places, vocab_size = logits.shape
    peaks, bests, groups = _launch(
        coupled_kernel,
        (jnp.float32, jnp.float32, jnp.int32),
        places,
        {"place": places},
        _grouped(logits, -jnp.inf),
        scale,
        *keys,
    )
    peak = jnp.max(peaks, axis=-1, keepdims=True)
    bests *= jnp.exp((peaks - peak) * scale[:, None, None])
    tokens = _members(_best_group(bests, groups, _num_groups(vocab_size)), vocab_size)
    place = jnp.arange(places)[None, :, None]
    nearby = logits[jnp.arange(rows)[:, None, None], place, jnp.minimum(tokens, vocab_size - 1)]
    weights = jnp.exp((nearby.astype(jnp.float32) - peak) * scale[:, None, None])
    winners = _race_inside(jnp.where(tokens < vocab_size, weights, 0.0), tokens, keys)
    decision = reference.verify_exact_match(
        jnp.minimum(winners, vocab_size - 1),
        draft_tokens,
        reference.are_drafted(draft_tokens, num_drafted),
    )
    return Outcome(*decision, _largest(peak[..., 0]))


def chain_from_logits(
    draft_tokens, draft_probs, num_drafted, logits, scale, coins, keys, coupled
) -> Outcome:
    drafts = draft_tokens, draft_probs, num_drafted

    def match() -> Outcome:
        return coupled_from_logits(draft_tokens, num_drafted, logits, scale, keys)

    def reject() -> Outcome:
        return rejection_from_logits(*drafts, logits, scale, coins, keys)

    return reference.by_rule(coupled, match, reject)


def siblings(draft_tokens, draft_probs, num_drafted, target_probs, coins, key) -> Decision:
    target = _Target(target_probs[:, None], None)
    return _judge(draft_tokens, draft_probs, num_drafted, target, coins, key)


def siblings_from_logits(
    draft_tokens, draft_probs, num_drafted, logits, scale, coins, key
) -> Decision:
    logits = logits[:, None]
    target = _Target(logits, _softmax_of(logits, scale))
    return _judge(draft_tokens, draft_probs, num_drafted, target, coins, key)


def _judge(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target: _Target,
    coins: Array,
    key: Key,
) -> Decision:
    """Certain drafts need no sums to be subtracted: one reading gives all stages. Laws need the
    sum before them: stage s + 1 is read, with all before it, by rows that reject child s."""
    B, S = draft_tokens.shape
    rows, nowhere = jnp.arange(B), jnp.zeros((B,), jnp.int32)
    drafts = _Drafts(draft_tokens, draft_probs, nowhere, jnp.ones((B, S), jnp.float32))
    chosen = target.probs(nowhere[:, None], draft_tokens)
    accepted, judged = jnp.full((B,), S, jnp.int32), jnp.full((B,), True)
    sums, groups = jnp.zeros((B, S + 1)), jnp.zeros((B, S + 1), jnp.int32)  # nothing read yet
    taken = group = nowhere
    for s in range(S):
        token = draft_tokens[:, s, None]
        left = drafts.leave(chosen[:, s, None], token, taken)[:, 0]
        judged &= s < num_drafted
        threshold = coins[:, s] * drafts.probs(s, token)[:, 0] * drafts.factors[:, s]
        stands = judged & (threshold < left)
        rejected = judged & ~stands
        if s == 0:
            first = jnp.minimum(num_drafted, S if draft_probs is None else 1)
            count = jnp.where(stands, -1, first)
        else:
            count = jnp.where(rejected, s + 1, -1)
        if s == 0 or draft_probs is not None:
            sums, groups = _stages(target, nowhere, drafts, count, key)
        accepted = jnp.where(stands, s, accepted)
        judged = rejected & (sums[:, s + 1] > 0)
        taken = jnp.where(judged, s + 1, taken)
        group = jnp.where(rejected | (s == 0), groups[rows, taken], group)
        factors = drafts.factors.at[:, s + 1].set(sums[:, s + 1], mode="drop")  # S + 1 sums
        drafts = drafts._replace(factors=factors)
    return accepted, _next_token(target, nowhere, drafts, taken, group, key)
