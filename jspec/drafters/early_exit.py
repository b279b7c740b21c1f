"""Drafting with the target's own first layers (LayerSkip, arXiv 2404.16710): no second model, no
second cache, nothing computed twice.

Drafted tokens go through the layers below the exit once. What they left there, residual streams,
keys and values, is handed out with the draft (`base.Start`), and the target goes on from it.

    four layers, exit behind two, K = 2; committed a b c (c unread)
    propose  layers 0 1 read c -> x, x -> y, and y for the target's sake
    verify   layers 2 3 read c x y

A row may stop before it has K drafts, where the exit is not sure of the next one: a draft that
would be rejected is not made. That depends on the exit's law, not on what is drawn from it, so
the drafts that are made keep their laws.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.cache import Cache, KeysValues
from jspec.config import ModelConfig
from jspec.drafters.base import Context, Draft, Passage, Start, draft_token
from jspec.errors import JspecError
from jspec.exits import ExitParams, exit_logits
from jspec.model import embed, forward_layers
from jspec.params import Params


class Choice(NamedTuple):
    """What an exit makes of each row's next token."""

    token: Array  # [B] int32
    law: Array  # [B, V]
    sure: Array  # [B] bool


class Drafting(NamedTuple):
    """A draft in the making."""

    num_read: Array
    """Scalar int32: tokens, of the last one and the drafts, that went through the layers."""
    going: Array
    """`[B]` bool: rows that draft on."""
    newest: Array
    """`[B]` int32: the next token to read."""
    drafts: Array
    """`[B, K]` int32."""
    laws: Array
    """`[B, K, V]`."""
    num_drafted: Array
    """`[B]` int32."""
    streams: tuple[Array, ...]
    """`[B, K+1, D]` each: what was read, at the inputs of layers 0 to the exit."""
    block: tuple[KeysValues, ...]
    """Keys and values in flight, of the layers below the exit."""


@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """Drafts K tokens with the first `layer` layers of the target. Parameters are the target's
    own and those of the exit."""

    config: ModelConfig
    """The target's."""
    layer: int
    num_speculative_tokens: int = 4
    stop: float = 0.0
    """A row drafts on while its exit is that sure (`confidence`); 0: always."""
    name: str = "early exit"
    taps: tuple[int, ...] = ()
    num_best: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.layer < self.config.num_hidden_layers:
            raise JspecError(
                f"early_exit:{self.layer}: the model has {self.config.num_hidden_layers} layers, "
                f"so an exit is behind 1 to {self.config.num_hidden_layers - 1} of them"
            )

        if not 0 <= self.stop <= 1:
            raise JspecError(f"drafter {self.name}: {self.stop} is no probability, from 0 to 1")

    @property
    def num_draft_nodes(self) -> int:
        return self.num_speculative_tokens

    @property
    def num_shared(self) -> int:
        """Layers of the target that it may run."""
        return self.layer

    def init(self, batch: int, capacity: int, dtype: Any) -> tuple[()]:
        return ()

    def read(self, params: Any, state: tuple[()], context: Context, passage: Passage) -> tuple[()]:
        return state

    def commit(
        self, params: Any, state: tuple[()], context: Context, passage: Passage
    ) -> tuple[()]:
        return state

    def propose(
        self, params: tuple[Params, Any], state: tuple[()], context: Context
    ) -> tuple[Draft, tuple[()]]:
        with jax.named_scope("draft"):
            return self._propose(params, context), state

    def _propose(self, params: tuple[Params, Any], context: Context) -> Draft:
        def going_on(made: Drafting) -> Array:
            return jnp.any(made.going) & (made.num_read <= self.num_speculative_tokens)

        def step(made: Drafting) -> Drafting:
            made = self._read(params[0], context, made)
            full = made.num_read > self.num_speculative_tokens
            return jax.lax.cond(full, lambda: made, lambda: self._draft(params, context, made))

        made = jax.lax.while_loop(going_on, step, self._nothing(params[0], context))
        start = Start(made.streams, self._begun(context, made))
        return Draft(made.drafts, made.laws, made.num_drafted, start=start)

    def _nothing(self, target: Params, context: Context) -> Drafting:
        """Before the last token has been read."""
        B, K, config = context.lengths.size, self.num_speculative_tokens, self.config
        stream = jnp.zeros((B, K + 1, config.hidden_size), target.embed.dtype)
        return Drafting(
            num_read=jnp.int32(0),
            going=jnp.ones((B,), jnp.bool_),
            newest=jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0],
            drafts=jnp.zeros((B, K), jnp.int32),
            laws=jnp.zeros((B, K, config.vocab_size), jnp.float32),
            num_drafted=jnp.zeros((B,), jnp.int32),
            streams=(stream,) * (self.layer + 1),
            block=self._opened(context).block[: self.layer],
        )

    def _opened(self, context: Context) -> Cache:
        """The target's cache with room for last token and drafts."""
        assert context.cache is not None
        return cache_lib.open_block(context.cache, self.num_speculative_tokens + 1)

    def _read(self, target: Params, context: Context, made: Drafting) -> Drafting:
        """Takes the newest token through the layers below the exit."""
        opened = self._opened(context)
        cache = opened.replace(
            block=(*made.block, *opened.block[self.layer :]),
            in_flight=opened.in_flight + made.num_read,
        )
        layers = range(self.layer)
        hidden, cache = forward_layers(
            target, self.config, (embed(target, made.newest[:, None]),), cache, layers=layers
        )
        streams = tuple(
            x.at[:, made.num_read].set(new[:, 0])
            for x, new in zip(made.streams, hidden, strict=True)
        )
        return made._replace(
            num_read=made.num_read + 1, streams=streams, block=cache.block[: self.layer]
        )

    def _draft(self, params: tuple[Params, Any], context: Context, made: Drafting) -> Drafting:
        """Rows that are sure of the token behind the newest draft it."""
        token, law, sure = self._choose(params, context, made)
        index, going = made.num_read - 1, made.going & sure
        return made._replace(
            going=going,
            newest=token,
            drafts=made.drafts.at[:, index].set(token),
            laws=made.laws.at[:, index].set(law),
            num_drafted=made.num_drafted + going.astype(jnp.int32),
        )

    def _choose(self, params: tuple[Params, Any], context: Context, made: Drafting) -> Choice:
        """The token behind the newest. Which exit it leaves at, and whether the row is sure, may
        depend on laws, never on the token that was drawn: its law would be another."""
        return self._at_exit(params[1], made.streams[-1], context, made)

    def _at_exit(self, exit: ExitParams, stream: Array, context: Context, made: Drafting) -> Choice:
        """What an exit says behind the newest token, of streams `[B, K+1, D]`."""
        index, config = made.num_read - 1, self.config
        newest = jax.lax.dynamic_index_in_dim(stream, index, axis=1)
        logits = exit_logits(exit, newest, eps=config.rms_norm_eps, vocab_size=config.vocab_size)
        token, law = draft_token(logits[:, 0], context, made.drafts, index)
        sure = jnp.any(law > 0, axis=-1)
        if self.stop > 0:
            sure &= confidence(logits[:, 0], law, context) >= self.stop
        return Choice(token, law, sure)

    def _begun(self, context: Context, made: Drafting) -> tuple[KeysValues, ...]:
        """Keys and values `[B, K+1, Nkv, H]` of last token and drafts, below the exit."""
        return cache_lib.own_block(self._opened(context).replace(block=made.block))


def confidence(logits: Array, law: Array, context: Context) -> Array:
    """`[B]`: the probability of the likeliest token by the row's law `[B, V]`; of greedy rows,
    whose law is certain of any, by softmax of the logits `[B, V]`."""
    own = jnp.max(jax.nn.softmax(logits), axis=-1)
    return jnp.where(context.sampling.temperature == 0, own, jnp.max(law, axis=-1))
