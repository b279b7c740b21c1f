"""Drafting with several exits, each token leaving at the first that is sure of it (AdaDecode,
arXiv 2506.03700).

Layers behind a token's exit are deferred: the target's pass runs them for all drafts at once. A
later token that goes deeper has to see keys of those before it there, so it takes them along: the
layers up to the next exit run over last token and drafts together, as one block. Which rows need
it, laws decide; where none does, it does not run.

    exits behind layers 2 and 4 of 6; committed a b c (c unread)
    c  at exit 2: sure of x                layers 0 1 read c
    x  at exit 2: not sure; 4: sure of y   layers 0 1 read x, layers 2 3 read c x
    y  at exit 2, then 4: not sure         layers 0 1 read y, layers 2 3 read c x y: the draft ends
    verify                                 layers 2 3 4 5 read c x y

The target goes on from the first exit, where all tokens have been. What few of them went through
beyond it, it runs once more, in the pass that the deferred ones need anyhow.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec import cache as cache_lib
from jspec.drafters.base import Context, rows_where
from jspec.drafters.early_exit import Choice, Drafting, EarlyExit
from jspec.errors import JspecError
from jspec.exits import ExitParams
from jspec.model import forward_layers
from jspec.params import Params


@dataclasses.dataclass(frozen=True)
class Adaptive(EarlyExit):
    """Drafts K tokens, each at the first exit that is sure of it; one that no exit is sure of ends
    the row's draft. Parameters are the target's own and those of the exits."""

    deeper: tuple[int, ...] = ()
    """Layers below the exits that come after the first, ascending."""
    stop: float = 0.6
    name: str = "adaptive"

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = (self.layer, *self.deeper, self.config.num_hidden_layers)
        if list(layers) != sorted(set(layers)):
            raise JspecError(
                f"drafter {self.name}: its exits must ascend and stay below the model's "
                f"{self.config.num_hidden_layers} layers"
            )

    @property
    def num_shared(self) -> int:
        return (self.layer, *self.deeper)[-1]

    def _choose(
        self, params: tuple[Params, tuple[ExitParams, ...]], context: Context, made: Drafting
    ) -> Choice:
        target, exits = params
        stream, choice = made.streams[-1], self._at_exit(exits[0], made.streams[-1], context, made)
        places = zip(exits[1:], (self.layer, *self.deeper), self.deeper, strict=False)
        for exit, first, last in places:
            further = functools.partial(
                self._further, target, exit, range(first, last), context, made
            )
            stream, choice = jax.lax.cond(
                jnp.any(made.going & ~choice.sure), further, lambda *same: same, stream, choice
            )
        return choice

    def _further(
        self,
        target: Params,
        exit: ExitParams,
        layers: range,
        context: Context,
        made: Drafting,
        stream: Array,
        choice: Choice,
    ) -> tuple[Array, Choice]:
        """Streams `[B, K+1, D]` at the next exit, and the choice of rows that were not sure
        before. Places that have not been read hold nothing, and nothing before them sees it."""
        assert context.cache is not None
        cache = cache_lib.open_block(context.cache, stream.shape[1])
        hidden, _ = forward_layers(target, self.config, (stream,), cache, layers=layers)
        new = self._at_exit(exit, hidden[-1], context, made)
        kept = jax.tree.map(functools.partial(rows_where, choice.sure), choice, new)
        return hidden[-1], kept
