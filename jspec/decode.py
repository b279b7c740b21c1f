"""The round, and the loop of rounds: propose, verify, commit (DESIGN, "one pure round").

    step     : DecodeState -> DecodeState
    generate = read_prompts, then run_rounds: lax.while_loop(step)

Plain decoding is the same loop with a drafter that proposes nothing. Knows nothing of text,
requests or how a drafter works.

Invariant: `tokens[b, :lengths[b]]` is committed, and the target's pages hold all of it but the
last token, which is the first token of the next round's block.

    lengths 3: a b c | drafts x y | the target reads (c x y) at slots 2, 3, 4
    x accepted, y rejected, z recovered: emitted x z -> a b c x z, lengths 5, pages hold a b c x
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import PAGE_AXES, Cache
from jspec.check import Checked, check, reading_of
from jspec.drafters.base import Context, Draft, Drafter, Passage
from jspec.errors import JspecError
from jspec.logprobs import TokenLogprobs, no_logprobs, score_raw
from jspec.model import Model, Output
from jspec.params import LeafSpec
from jspec.prefill import prefill
from jspec.sampling import Sampling
from jspec.tree import ancestors, depths_of
from jspec.verify import Rule, Verdict, verify


class Finish(enum.IntEnum):
    """Why a row has stopped."""

    RUNNING = 0
    STOP = 1
    """An end-of-sequence or stop token, which is the row's last token."""
    LENGTH = 2
    """The most tokens asked for."""
    INVALID = 3
    """The target's logits for the next place were not finite."""
    FORBIDDEN = 4
    """The row's settings allow no token in the next place."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Static choices of the loop: together with the array shapes they name a compiled program."""

    model: Model
    drafter: Drafter
    widths: tuple[int, ...]
    """Block widths to compile, ascending, the last at least P + 1. A round runs at the narrowest
    that holds its longest draft; results are bit-for-bit comparable at one width only."""
    prefill_chunk: int = 128
    """Tokens a row of a pass over prompts, less where many rows share it (see `prefill`)."""
    max_logprobs: int = 0
    """Most probable tokens to keep the log probabilities of, at each token."""
    rule: Rule = verify
    """What judges drafts. Any other than `verify` is lossy."""

    @property
    def is_lossy(self) -> bool:
        """What is emitted need not have the target's law."""
        return self.rule is not verify

    def __post_init__(self) -> None:
        if self.is_lossy and not self.drafter.name.startswith("lossy"):
            raise JspecError(
                f"the drafter {self.drafter.name} is lossless: a lossy rule is for drafters whose "
                'names begin with "lossy"'
            )
        drafted = self.drafter.num_draft_nodes
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise JspecError(f"block widths {self.widths} must ascend")
        if self.widths[-1] < drafted + 1:
            raise JspecError(
                f"block widths {self.widths}: the last must be at least {drafted + 1}, for the "
                f"{drafted} tokens that the drafter {self.drafter.name} may draft and one more"
            )


class RoundLog(flax.struct.PyTreeNode):
    """What the rows have cost, round by round (round r of a row yields at least its token r)."""

    rounds: Array
    """`[B]` int32: rounds that the row took part in."""
    drafted: Array
    """`[B, S]` int32: positions drafted for in each of them: in a tree, its depth."""
    accepted: Array
    """`[B, S]` int32: drafts accepted; the next token is not counted."""


class DecodeState(flax.struct.PyTreeNode):
    """Everything that a round reads and changes, for B rows with room for S tokens each."""

    tokens: Array
    """`[B, S]` int32."""
    lengths: Array
    """`[B]` int32: committed tokens, at least 1."""
    max_lengths: Array
    """`[B]` int32: a row is finished when `lengths` gets there."""
    finish: Array
    """`[B]` int32, a `Finish`."""
    sampling: Sampling
    cache: Cache
    drafter: Any
    """Of the drafter: arrays whose first axis is rows, and caches."""
    logprobs: TokenLogprobs
    """`[B, S]`: the scores of `tokens`, where a row asks for them."""
    log: RoundLog


@functools.partial(jax.jit, static_argnums=0, static_argnames=("page_size", "dtype"))
def init_state(
    config: DecodeConfig,
    *,
    tokens: Array,
    lengths: Array,
    max_lengths: Array,
    sampling: Sampling,
    page_size: int,
    dtype: Any,
) -> DecodeState:
    """The state before the prompt has been read. `tokens` `[B, S]`; S is the capacity."""
    B, S = tokens.shape
    return DecodeState(
        tokens=tokens,
        lengths=lengths,
        max_lengths=max_lengths,
        finish=jnp.where(lengths < max_lengths, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
        sampling=sampling,
        cache=cache_lib.init_cache(config.model.cache_spec, B, S, page_size=page_size, dtype=dtype),
        drafter=config.drafter.init(B, S, dtype),
        logprobs=no_logprobs(B, S, config.max_logprobs),
        log=RoundLog(
            rounds=jnp.zeros((B,), jnp.int32),
            drafted=jnp.zeros((B, S), jnp.int32),
            accepted=jnp.zeros((B, S), jnp.int32),
        ),
    )


def read_prompts(
    config: DecodeConfig, params: Any, state: DecodeState, *, scored: bool = False
) -> DecodeState:
    """Fills the caches with the prompts, those of rows that are behind. `params` is `(target,
    drafter's)`. If `scored`, the prompts' own log probabilities go into `state.logprobs`, which
    takes logits that are otherwise not computed."""
    target_params, drafter_params = params
    nowhere, context = state.tokens.shape[1], _context(state)

    def observe(
        seen: tuple[Any, TokenLogprobs], out: Output, slots: Array, count: Array
    ) -> tuple[Any, TokenLogprobs]:
        drafter, logprobs = seen
        places = jnp.clip(slots + 1, 0, nowhere - 1)
        tokens = jnp.take_along_axis(state.tokens, places, axis=1)
        features = tuple(out.hidden[i] for i in config.drafter.taps)
        chunk = jnp.take_along_axis(state.tokens, slots, axis=1, mode="clip")
        reading = reading_of(chunk, out.logits, count, config.drafter.num_best)
        passage = Passage(tokens, features, count, reading)
        drafter = config.drafter.read(drafter_params, drafter, context, passage)
        if scored:
            counts = jnp.arange(slots.shape[1]) < count[:, None]
            scores = score_raw(out.logits, tokens, config.max_logprobs)
            logprobs = _put(logprobs, jnp.where(counts, slots + 1, nowhere), scores)
        return drafter, logprobs

    cache, (drafter, logprobs) = prefill(
        config.model,
        target_params,
        state.cache,
        state.tokens,
        state.lengths - 1,
        chunk=config.prefill_chunk,
        observe=observe,
        seen=(state.drafter, state.logprobs),
    )
    return state.replace(cache=cache, logprobs=logprobs, drafter=drafter)


def run_rounds(
    config: DecodeConfig, params: Any, state: DecodeState, max_rounds: Array
) -> DecodeState:
    """Runs rounds until all rows have finished, at most `max_rounds` of them: the same program
    serves bursts and whole generations."""

    def unfinished(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        return (done < max_rounds) & jnp.any(state.finish == Finish.RUNNING)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, step(config, params, state)

    return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


def fork(state: DecodeState, parent: Array, idle: Array, sampling: Sampling) -> DecodeState:
    """A batch whose row b goes on where row `parent[b]` is, with settings of its own; one that is
    `idle[b]` has finished. Rows of one parent share its full pages (see `cache.fork`)."""

    def take(x: Any) -> Any:
        return cache_lib.fork(x, parent) if isinstance(x, Cache) else x[parent]

    rows = jax.tree.map(take, state.replace(sampling=()), is_leaf=lambda x: isinstance(x, Cache))
    finish = jnp.where(idle, Finish.LENGTH, rows.finish)
    return rows.replace(sampling=sampling, finish=finish)


def cut(state: DecodeState, keep: Array, finish: Array) -> DecodeState:
    """Drops what rows hold beyond their first `keep[b]` tokens; `finish` is how they ended.

    For stop rules that only the host can apply. A row with `keep[b] > lengths[b]` is left alone.
    """
    dropped = jnp.maximum(state.lengths - keep, 0)
    is_cut = keep <= state.lengths
    return state.replace(
        lengths=state.lengths - dropped,
        finish=jnp.where(is_cut, finish, state.finish),
        cache=state.cache.replace(lengths=state.cache.lengths - dropped),
    )


def _context(state: DecodeState) -> Context:
    return Context(
        tokens=state.tokens, lengths=state.lengths, sampling=state.sampling, cache=state.cache
    )


def step(config: DecodeConfig, params: Any, state: DecodeState) -> DecodeState:
    """One round for all rows. Finished rows take part and emit nothing."""
    target_params, drafter_params = params
    draft, drafter = config.drafter.propose(drafter_params, state.drafter, _context(state))
    running = state.finish == Finish.RUNNING
    draft = draft._replace(num_drafted=jnp.where(running, draft.num_drafted, 0))
    checked = _check(config, target_params, state, draft)
    num_emitted, finish = apply_stops(state, checked)
    index = jnp.arange(checked.run.shape[1], dtype=jnp.int32)
    beyond = state.tokens.shape[1]
    places = jnp.where(index < num_emitted[:, None], state.lengths[:, None] + index, beyond)
    state = state.replace(
        tokens=_put(state.tokens, places, checked.run),
        lengths=state.lengths + num_emitted,
        finish=finish,
        cache=cache_lib.commit(state.cache.replace(block=checked.block), num_emitted),
        logprobs=_put(state.logprobs, places, checked.logprobs),
        log=_note(state.log, _num_positions(draft), checked.verdict, running),
    )
    passage = Passage(checked.run, checked.features, num_emitted, checked.reading)
    drafter = config.drafter.commit(drafter_params, drafter, _context(state), passage)
    return state.replace(drafter=drafter)


def _check(config: DecodeConfig, params: Any, state: DecodeState, draft: Draft) -> Checked:
    """Runs the target over last token and drafts, at the narrowest width that holds them."""
    widths = jnp.array(config.widths)
    index = jnp.searchsorted(widths, 1 + jnp.max(draft.num_drafted))
    settings = {
        "taps": config.drafter.taps,
        "most": config.drafter.num_speculative_tokens,
        "max_logprobs": config.max_logprobs,
        "num_best": config.drafter.num_best,
        "rule": config.rule,
    }
    branches = [
        functools.partial(check, config.model, width=width, **settings) for width in config.widths
    ]
    return jax.lax.switch(index, branches, params, _context(state), draft)


def _num_positions(draft: Draft) -> Array:
    """`[B]` int32: how many positions a draft has tokens for."""
    if draft.tree is None:
        return draft.num_drafted
    there = jnp.arange(draft.tokens.shape[1]) < draft.num_drafted[:, None]
    depths = depths_of(ancestors(draft.tree))[:, 1:]
    return jnp.max(jnp.where(there, depths, 0), axis=1)


def apply_stops(state: DecodeState, checked: Checked) -> tuple[Array, Array]:
    """How many tokens of the run each row emits, and its `Finish` afterwards.

    Every rule is applied at every offset inside the run; the first that fires ends the row
    there, and nothing behind it is emitted. (min_tokens needs no rule: until then no stop token
    is allowed, see `sampling`.)
    """
    run, verdict = checked.run, checked.verdict
    index = jnp.arange(run.shape[1], dtype=jnp.int32)
    is_stop = jnp.any(run[..., None] == state.sampling.stop_ids[:, None, :], axis=-1)
    is_last = state.lengths[:, None] + index + 1 >= state.max_lengths[:, None]
    offered = jnp.minimum(verdict.num_accepted + 1, verdict.num_valid)
    ends = (is_stop | is_last) & (index < offered[:, None])
    ended = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32)
    stopped = jnp.take_along_axis(is_stop, first[:, None], axis=1)[:, 0]
    no_law = jnp.where(verdict.finite, Finish.FORBIDDEN, Finish.INVALID)
    going_on = jnp.where(offered > verdict.num_accepted, Finish.RUNNING, no_law)
    reason = jnp.where(ended, jnp.where(stopped, Finish.STOP, Finish.LENGTH), going_on)
    running = state.finish == Finish.RUNNING
    num_emitted = jnp.where(running, jnp.where(ended, first + 1, offered), 0)
    return num_emitted, jnp.where(running, reason.astype(jnp.int32), state.finish)


def _put(buffers: Any, places: Array, values: Any) -> Any:
    """Arrays `[B, S, ...]` with `values` `[B, T, ...]` at `places` `[B, T]`; those from S on are
    nowhere."""
    rows = jnp.arange(places.shape[0])[:, None]
    return jax.tree.map(lambda x, new: x.at[rows, places].set(new, mode="drop"), buffers, values)


def _note(log: RoundLog, num_drafted: Array, verdict: Verdict, running: Array) -> RoundLog:
    place = jnp.where(running, log.rounds, log.drafted.shape[1])[:, None]
    return RoundLog(
        rounds=log.rounds + running.astype(jnp.int32),
        drafted=_put(log.drafted, place, num_drafted[:, None]),
        accepted=_put(log.accepted, place, verdict.num_accepted[:, None]),
    )


def state_specs(state: DecodeState) -> DecodeState:
    """A `LeafSpec` (shape, logical axes) for every leaf of a state: pages by key/value heads,
    everything else by rows."""

    def spec(path: Any, leaf: Any) -> LeafSpec:
        if any(getattr(entry, "name", None) == "pages" for entry in path):
            return LeafSpec(leaf.shape, PAGE_AXES)
        return LeafSpec(leaf.shape, ("batch",) + (None,) * (len(leaf.shape) - 1))

    return jax.tree.map_with_path(spec, state)
