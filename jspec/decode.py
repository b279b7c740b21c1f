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
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import PAGE_AXES, Cache, KeysValues
from jspec.drafters.base import Context, Draft, Drafter, Passage
from jspec.errors import JspecError
from jspec.logprobs import TokenLogprobs, no_logprobs, score, score_raw
from jspec.model import Model, Output
from jspec.params import LeafSpec
from jspec.prefill import prefill
from jspec.sampling import Prefix, Sampling, chain_prefix
from jspec.tree import Tree, along, ancestors, depths_of, paths_to
from jspec.verify import Verdict, verify


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

    def __post_init__(self) -> None:
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
        passage = Passage(tokens, tuple(out.hidden[i] for i in config.drafter.taps), count)
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
    return Context(tokens=state.tokens, lengths=state.lengths, sampling=state.sampling)


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
    passage = Passage(checked.run, checked.features, num_emitted)
    drafter = config.drafter.commit(drafter_params, drafter, _context(state), passage)
    return state.replace(drafter=drafter)


class Checked(NamedTuple):
    """What the target's pass over a block yields, whatever width it ran at."""

    verdict: Verdict
    run: Array
    """`[B, K+1]`: the accepted drafts, then the next token, then what means nothing."""
    logprobs: TokenLogprobs
    """Of the run."""
    block: tuple[KeysValues, ...]
    """Per layer `[B, K+1, Nkv, H]`: what the run's places hold, if their tokens are kept."""
    features: tuple[Array, ...]
    """`[B, K+1, D]` each: the target's hidden states that the run came of."""


def _check(config: DecodeConfig, params: Any, state: DecodeState, draft: Draft) -> Checked:
    """Runs the target over last token and drafts, at the narrowest width that holds them."""
    widths = jnp.array(config.widths)
    index = jnp.searchsorted(widths, 1 + jnp.max(draft.num_drafted))
    branches = [functools.partial(_check_at, config, w) for w in config.widths]
    return jax.lax.switch(index, branches, params, state, draft)


def _check_at(
    config: DecodeConfig, width: int, params: Any, state: DecodeState, draft: Draft
) -> Checked:
    """`_check` with a block of `width` tokens, drafts beyond it cut off, padding behind them."""
    num_drafts = min(draft.tokens.shape[1], width - 1)
    tokens, probs, num_drafted, tree = draft
    tokens = tokens[:, :num_drafts]
    probs = None if probs is None else probs[:, :num_drafts]
    tree = None if tree is None else tree.cut(num_drafts)
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    block = _fit(jnp.concatenate([last, tokens], axis=1), width)
    prefix, depths, mask = _places(state, tokens, tree, width)
    cache = cache_lib.open_block(state.cache, width, depths=depths, mask=mask)
    out = config.model.forward(params, block, cache)
    logits = out.logits[:, : num_drafts + 1]
    verdict = verify(
        tokens,
        probs,
        num_drafted,
        target_logits=logits,
        sampling=state.sampling,
        prefix=prefix,
        tree=tree,
    )
    on_path = functools.partial(along, verdict.path)
    accepted = on_path(block)[:, 1 : num_drafts + 1]
    run = emitted_run(accepted, verdict)
    prefix = chain_prefix(state.tokens, state.lengths, accepted)
    logprobs = score(on_path(logits), run, state.sampling, prefix, config.max_logprobs)
    features = tuple(out.hidden[i] for i in config.drafter.taps)
    kept = jax.tree.map(on_path, (out.cache.block, features))
    fit = functools.partial(_fit, width=config.drafter.num_speculative_tokens + 1)
    return Checked(verdict._replace(path=None), *jax.tree.map(fit, (run, logprobs, *kept)))


def _places(
    state: DecodeState, drafts: Array, tree: Tree | None, width: int
) -> tuple[Prefix, Array | None, Array | None]:
    """What stands before the places behind last token and drafts; depths and mask of the block,
    None for a chain. Padding behind a tree sees itself alone."""
    if tree is None:
        return chain_prefix(state.tokens, state.lengths, drafts), None, None
    is_ancestor = ancestors(tree)
    depths = depths_of(is_ancestor)
    paths = paths_to(tree, is_ancestor, drafts)
    prefix = Prefix(tokens=state.tokens, lengths=state.lengths, drafts=paths, depths=depths)
    missing = width - depths.shape[1]
    mask = jnp.pad(is_ancestor, [(0, 0), (0, missing), (0, missing)])
    mask |= jnp.eye(width, dtype=jnp.bool_)
    return prefix, jnp.pad(depths, [(0, 0), (0, missing)]), mask


def _num_positions(draft: Draft) -> Array:
    """`[B]` int32: how many positions a draft has tokens for."""
    if draft.tree is None:
        return draft.num_drafted
    there = jnp.arange(draft.tokens.shape[1]) < draft.num_drafted[:, None]
    depths = depths_of(ancestors(draft.tree))[:, 1:]
    return jnp.max(jnp.where(there, depths, 0), axis=1)


def _fit(x: Array, width: int) -> Array:
    """`x` with axis 1 cut or zero-padded to `width`."""
    missing = max(width - x.shape[1], 0)
    return jnp.pad(x[:, :width], [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def emitted_run(draft_tokens: Array, verdict: Verdict) -> Array:
    """`[B, K+1]`: the accepted drafts, then the next token, then what means nothing."""
    index = jnp.arange(draft_tokens.shape[1] + 1)
    padded = _fit(draft_tokens, index.size)
    return jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], padded)


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
