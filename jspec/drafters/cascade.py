"""Speculation as a drafter: what an inner verifier accepts is a draft for the target.

The inner drafter proposes, the inner verifier (an earlier exit of the target, or a model of its
own) accepts by the row's own rule, round after round, until `window` tokens are there; then the
target checks them. Whatever the inner drafter does, the tokens have the inner verifier's law, and
that is the law that the draft is handed out with: lossless by the same theorem applied twice.
With two exits it is HiSpec; a cascade can be the drafter of another, to any depth.

    window 4; the inner verifier accepts two of three drafts and adds one, then one and adds one
    c | x y u | v w            five tentative tokens, each with the inner verifier's law
    the target accepts x y u, recovers z: emitted x y u z

With a *lenience* below 1 the inner verifier leans to what it is shown: its logits of drafted tokens
are raised by -log(lenience), so that greedily a draft stands whose probability is at least that
share of the best one's (Leviathan et al., arXiv 2211.17192, A.5). It then has another law, one that
depends on the drafts; given them, that is what the tokens are drawn from, so the target's check is
as lossless as before. What drafts is better than the verifier at times: n-grams below an exit.

Rows fill their windows at different speeds: a row that has is idle until all have. Tentative
tokens are in flight all the while (`cache.hold`): no page has seen them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec import draws
from jspec.cache import KeysValues
from jspec.check import Checked, check
from jspec.drafters.base import Context, Draft, Drafter, Passage, Start
from jspec.drafters.verifiers import Verifier
from jspec.draws import Purpose
from jspec.errors import JspecError
from jspec.sampling import Sampling


class _Kept(NamedTuple):
    """What the verifier's passes left of last token and tentative tokens, R of them at most."""

    block: tuple[KeysValues, ...]
    """`[B, R, Nkv, H]` each, of its layers."""
    hidden: tuple[Array, ...]
    """`[B, R, D]` each: `Verifier.says`."""


class _Tentative(NamedTuple):
    """What has been accepted so far, P tokens at most."""

    num_tokens: Array  # [B] int32
    alive: Array  # [B] bool: there is a law for what comes next
    text: Array  # [B, S] int32: what is committed, then these tokens
    tokens: Array  # [B, P] int32
    laws: Array  # [B, P, V]
    kept: _Kept
    drafter: Any
    """The inner drafter's state, as if all of it were committed."""


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Drafts what `verifier` accepts of what `drafter` drafts. Parameters and states are pairs,
    the drafter's and the verifier's."""

    drafter: Drafter
    verifier: Verifier
    window: int = 4
    """Tokens (HiSpec's N_i) that every row has when the target checks; a row may have up to the
    inner drafter's K more."""
    lenience: float = 1.0
    """In (0, 1]; 1: the inner verifier's law is its own."""
    name: str = "cascade"
    num_best: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise JspecError(f"cascade: window={self.window} must be at least 1")
        if not 0 < self.lenience <= 1:
            raise JspecError(f"cascade: lenience={self.lenience} must be above 0 and at most 1")
        if self.drafter.num_draft_nodes != self.drafter.num_speculative_tokens:
            raise JspecError(f"cascade: its drafter {self.drafter.name} must draft chains")
        if self.drafter.num_best:
            raise JspecError(
                f"cascade: its drafter {self.drafter.name} learns from all that the target reads, "
                "which a cascade does not hand on"
            )
        unknown = [tap for tap in self.drafter.taps if tap not in self.verifier.says]
        if unknown:
            raise JspecError(
                f"cascade: its drafter {self.drafter.name} reads hidden states of the target that "
                "the inner verifier does not have"
            )

    @property
    def num_speculative_tokens(self) -> int:
        return self.window + self.drafter.num_speculative_tokens

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens

    @property
    def taps(self) -> tuple[int, ...]:
        return (*self.drafter.taps, *self.verifier.reads)

    @property
    def level(self) -> int:
        """How many cascades stand in one another, this one included."""
        return 1 + (self.drafter.level if isinstance(self.drafter, Cascade) else 0)

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[Any, Any]:
        return tuple(part.init(batch, capacity, dtype) for part in (self.drafter, self.verifier))

    def read(self, params: Any, state: Any, context: Context, passage: Passage) -> tuple[Any, Any]:
        below, above = self._divided(passage)
        return (
            self.drafter.read(params[0], state[0], context, below),
            self.verifier.read(params[1], state[1], context, above),
        )

    def commit(
        self, params: Any, state: Any, context: Context, passage: Passage
    ) -> tuple[Any, Any]:
        below, above = self._divided(passage)
        return (
            self.drafter.read(params[0], state[0], context, below),
            self.verifier.commit(params[1], state[1], context, above),
        )

    def _divided(self, passage: Passage) -> tuple[Passage, Passage]:
        """The passage as the drafter and as the verifier wants to see it."""
        features, split = passage.features, len(self.drafter.taps)
        return (
            passage._replace(features=features[:split]),
            passage._replace(features=features[split:]),
        )

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        with jax.named_scope("draft"):
            return self._propose(params, state, context)

    def _propose(self, params: Any, state: Any, context: Context) -> tuple[Draft, Any]:
        inner, own = state
        base = self.verifier.cache(own, context)
        context = context.replace(cache=base, sampling=_own_draws(context.sampling, self.level))
        body = functools.partial(self._round, params, context)

        def wanting(found: _Tentative) -> Array:
            return jnp.any(found.alive & (found.num_tokens < self.window))

        found = jax.lax.while_loop(wanting, body, self._nothing(params, context, inner))
        kept = self._read_last(params, context, found)
        draft = Draft(found.tokens, found.laws, found.num_tokens)
        if self.verifier.num_shared:
            return draft._replace(start=Start(kept.hidden, kept.block)), state
        return draft, (inner, base.replace(block=kept.block))

    def _nothing(self, params: Any, context: Context, drafter: Any) -> _Tentative:
        """Before the first inner round."""
        B, P = context.lengths.size, self.num_speculative_tokens
        shapes = jax.eval_shape(
            lambda: self._check(
                params, context, self.drafter.propose(params[0], drafter, context)[0]
            )
        )
        kept = _Kept(self._layers(shapes.block), shapes.features)
        return _Tentative(
            num_tokens=jnp.zeros((B,), jnp.int32),
            alive=jnp.ones((B,), jnp.bool_),
            text=context.tokens,
            tokens=jnp.zeros((B, P), jnp.int32),
            laws=jnp.zeros((B, P, shapes.laws.shape[2]), jnp.float32),
            kept=jax.tree.map(lambda x: jnp.zeros((B, P + 1, *x.shape[2:]), x.dtype), kept),
            drafter=drafter,
        )

    def _round(self, params: Any, context: Context, found: _Tentative) -> _Tentative:
        """One inner round: rows with a full window take part and get nothing."""
        inner = self._behind(context, found)
        draft, drafter = self.drafter.propose(params[0], found.drafter, inner)
        going = found.alive & (found.num_tokens < self.window)
        draft = draft._replace(num_drafted=jnp.where(going, draft.num_drafted, 0))
        checked = self._check(params, inner, draft)
        verdict = checked.verdict
        offered = jnp.minimum(verdict.num_accepted + 1, verdict.num_valid)
        new = jnp.where(going, offered, 0)
        index = jnp.arange(checked.run.shape[1], dtype=jnp.int32)

        def put(x: Array, values: Array, first: Array) -> Array:
            places = jnp.where(index < new[:, None], first[:, None] + index, x.shape[1])
            return x.at[jnp.arange(new.size)[:, None], places].set(values, mode="drop")

        after = functools.partial(put, first=found.num_tokens)
        text = put(found.text, checked.run, inner.lengths)
        assert checked.laws is not None
        kept = _Kept(self._layers(checked.block), checked.features)
        told = inner.replace(tokens=text, lengths=inner.lengths + new)
        own_taps = [checked.features[self.verifier.says.index(tap)] for tap in self.drafter.taps]
        passage = Passage(checked.run, tuple(own_taps), new)
        return _Tentative(
            num_tokens=found.num_tokens + new,
            alive=jnp.where(going, offered > verdict.num_accepted, found.alive),
            text=text,
            tokens=after(found.tokens, checked.run),
            laws=after(found.laws, checked.laws),
            kept=jax.tree.map(after, found.kept, kept),
            drafter=self.drafter.commit(params[0], drafter, told, passage),
        )

    def _check(self, params: Any, context: Context, draft: Draft) -> Checked:
        K = self.drafter.num_speculative_tokens
        taps = self.verifier.says
        if self.lenience < 1:
            draft = draft._replace(probs=None)  # the law is that given the drafts
        return check(
            self.verifier.model,
            params[1],
            context,
            draft,
            width=K + 1,
            most=K,
            taps=taps,
            with_laws=True,
            leaning=-math.log(self.lenience),
        )

    def _behind(self, context: Context, found: _Tentative) -> Context:
        """What the next inner round may look at: tentative tokens as if they were committed."""
        assert context.cache is not None
        return context.replace(
            tokens=found.text,
            lengths=context.lengths + found.num_tokens,
            cache=cache_lib.hold(context.cache, found.kept.block, found.num_tokens),
        )

    def _read_last(self, params: Any, context: Context, found: _Tentative) -> _Kept:
        """What was kept, with the last tentative token, which no round has read."""
        behind = self._behind(context, found)
        assert behind.cache is not None
        last = jnp.take_along_axis(found.text, behind.lengths[:, None] - 1, axis=1)
        out = self.verifier.model.forward(params[1], last, cache_lib.open_block(behind.cache, 1))
        hidden = tuple(out.hidden[tap] for tap in self.verifier.says)
        new = _Kept(self._layers(cache_lib.own_block(out.cache)), hidden)
        rows = jnp.arange(found.num_tokens.size)
        return jax.tree.map(lambda x, y: x.at[rows, found.num_tokens].set(y[:, 0]), found.kept, new)

    def _layers(self, block: tuple[KeysValues, ...]) -> tuple[KeysValues, ...]:
        """Of a block, the layers that the verifier runs."""
        return block[: self.verifier.num_shared] if self.verifier.num_shared else block


def _own_draws(sampling: Sampling, level: int) -> Sampling:
    """The rows' settings with draws that are independent of the target's; a coupled row keeps
    them, since there the same noise is what makes tokens agree."""
    words, _ = draws.draw_key(sampling.seed, jnp.int32(level), jnp.int32(Purpose.LEVEL))
    return sampling.replace(seed=jnp.where(sampling.coupled, sampling.seed, words))
