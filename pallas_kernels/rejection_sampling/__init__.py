"""Which drafts stand and which token comes behind them: the rules of `reference`, by a Hopper
kernel where there is one.

    rejection, rejection_from_logits   a chain, by speculative sampling
    coupled_from_logits                a chain, by exact match with the target's own draws
    chain_from_logits                  each row by the one of these that it asks for
    siblings, siblings_from_logits     the children of one node of a tree

`implementation` is as in `pallas_kernels.dispatch`. Arguments out of contract raise ValueError
(shapes) or TypeError (dtypes) that name them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.draws import Key
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.rejection_sampling import reference
from pallas_kernels.rejection_sampling.reference import (
    Decision,
    Outcome,
    are_drafted,
    leading_true,
    verify_exact_match,
)

__all__ = [
    "Decision",
    "Outcome",
    "are_drafted",
    "chain_from_logits",
    "coupled_from_logits",
    "leading_true",
    "rejection",
    "rejection_from_logits",
    "siblings",
    "siblings_from_logits",
    "verify_exact_match",
]


def rejection(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target_probs: Array,
    coins: Array,
    keys: Key,
    *,
    implementation: Implementation | str | None = None,
) -> Decision:
    """Speculative sampling of a chain (arXiv 2211.17192, algorithm 1).

    Draft j stands while coin * draft_probs[j, draft_tokens[j]] < target_probs[j, draft_tokens[j]].
    The next token is drawn from max(target - draft, 0) at the first that does not, from the
    target where no draft counts.

    Args:
      draft_tokens: `[B, K]` int32; K may be 0.
      draft_probs: `[B, K, V]` float32, the law each was drawn from; None: each is certain.
      num_drafted: `[B]` int32 in 0..K, tokens of `draft_tokens` that count.
      target_probs: `[B, K+1, V]` float32; entry j is for the place of draft j.
      coins: `[B, K]` float32 in [0, 1).
      keys: two uint32 words, each `[B, K+1]`, for the race at each place.

    Returns:
      num_accepted: `[B]` int32 in 0..K.
      next_token: `[B]` int32.
    """
    _check_chain(draft_tokens, draft_probs, num_drafted, "target_probs", target_probs, keys)
    _check("coins", coins, draft_tokens.shape, jnp.float32)
    args = (draft_tokens, _soft(draft_probs), num_drafted, target_probs, coins, keys)
    with _chosen(implementation) as module:
        return module.rejection(*args)


def rejection_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    keys: Key,
    *,
    implementation: Implementation | str | None = None,
) -> Outcome:
    """`rejection` where target_probs = softmax(logits * scale), which is never written out.

    Args:
      logits: `[B, K+1, V]` float32 or bfloat16; -inf has no chance.
      scale: `[B]` float32, the inverse temperature.

    Returns:
      What `rejection` returns, and the largest logit of each place.
    """
    _check_chain(draft_tokens, draft_probs, num_drafted, "logits", logits, keys)
    _check("scale", scale, num_drafted.shape, jnp.float32)
    _check("coins", coins, draft_tokens.shape, jnp.float32)
    args = (draft_tokens, _soft(draft_probs), num_drafted, logits, scale, coins, keys)
    with _chosen(implementation) as module:
        return module.rejection_from_logits(*args)


def coupled_from_logits(
    draft_tokens: Array,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    keys: Key,
    *,
    implementation: Implementation | str | None = None,
) -> Outcome:
    """The target's tokens are `draws.draw(draws.law_of(logits, scale), keys)`; drafts stand while
    they equal them, and the next token is the target's at the first that does not. Arguments and
    results are as in `rejection_from_logits`."""
    _check_chain(draft_tokens, None, num_drafted, "logits", logits, keys)
    _check("scale", scale, num_drafted.shape, jnp.float32)
    with _chosen(implementation) as module:
        return module.coupled_from_logits(draft_tokens, num_drafted, logits, scale, keys)


def chain_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    keys: Key,
    coupled: Array,
    *,
    implementation: Implementation | str | None = None,
) -> Outcome:
    """`coupled_from_logits` for the rows where `coupled` `[B]` (bool) is true,
    `rejection_from_logits` for the others: one call for a batch that asks for both."""
    _check_chain(draft_tokens, draft_probs, num_drafted, "logits", logits, keys)
    _check("scale", scale, num_drafted.shape, jnp.float32)
    _check("coins", coins, draft_tokens.shape, jnp.float32)
    _check("coupled", coupled, num_drafted.shape, jnp.bool_)
    args = (draft_tokens, _soft(draft_probs), num_drafted, logits, scale, coins, keys, coupled)
    with _chosen(implementation) as module:
        return module.chain_from_logits(*args)


def siblings(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    target_probs: Array,
    coins: Array,
    key: Key,
    *,
    implementation: Implementation | str | None = None,
) -> Decision:
    """The children of one node, judged in turn (arXiv 2305.09781, algorithm 2); the law of what is
    emitted stays the target's. The rule itself stands in `reference.siblings`.

    Args:
      draft_tokens: `[B, S]` int32, S at least 1.
      draft_probs: `[B, S, V]` float32, the law each was drawn from; None: each is certain.
      num_drafted: `[B]` int32 in 0..S, children that count.
      target_probs: `[B, V]` float32, the law of their place.
      coins: `[B, S]` float32 in [0, 1).
      key: two uint32 words, each `[B]`.

    Returns:
      accepted: `[B]` int32, the child that stands, or S if none does.
      next_token: `[B]` int32: where none does, drawn from what is left; else some token.
    """
    _check_siblings(draft_tokens, draft_probs, num_drafted, "target_probs", target_probs, key)
    _check("coins", coins, draft_tokens.shape, jnp.float32)
    args = (draft_tokens, draft_probs, num_drafted, target_probs, coins, key)
    with _chosen(implementation) as module:
        return module.siblings(*args)


def siblings_from_logits(
    draft_tokens: Array,
    draft_probs: Array | None,
    num_drafted: Array,
    logits: Array,
    scale: Array,
    coins: Array,
    key: Key,
    *,
    implementation: Implementation | str | None = None,
) -> Decision:
    """`siblings` where target_probs = softmax(logits * scale); logits `[B, V]`, scale `[B]` are as
    in `rejection_from_logits`."""
    _check_siblings(draft_tokens, draft_probs, num_drafted, "logits", logits, key)
    _check("scale", scale, num_drafted.shape, jnp.float32)
    _check("coins", coins, draft_tokens.shape, jnp.float32)
    args = (draft_tokens, draft_probs, num_drafted, logits, scale, coins, key)
    with _chosen(implementation) as module:
        return module.siblings_from_logits(*args)


@contextlib.contextmanager
def _chosen(implementation: Implementation | str | None) -> Iterator[Any]:
    """The module that computes; inside, its kernels are interpreted if they are to be."""
    chosen = choose("rejection_sampling", implementation, None)
    if chosen is Implementation.XLA:
        yield reference
        return
    # Where no Hopper kernel runs, nobody waits for Pallas to be imported.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.rejection_sampling import kernel_sm90

    interpreted = chosen is Implementation.INTERPRET
    with plgpu.force_gpu_interpret_mode() if interpreted else contextlib.nullcontext():
        yield kernel_sm90


def _soft(draft_probs: Array | None) -> Array | None:
    """No drafts at all are certain ones, so that no array is empty."""
    return draft_probs if draft_probs is not None and draft_probs.shape[1] else None


def _check_chain(draft_tokens, draft_probs, num_drafted, name, target, keys) -> None:
    _check("draft_tokens", draft_tokens, (None, None), jnp.int32)
    rows, width = draft_tokens.shape
    _check_drafts(draft_tokens, draft_probs, num_drafted, name, target, (rows, width + 1, None))
    for i in range(2):
        _check(f"keys[{i}]", keys[i], (rows, width + 1), jnp.uint32)


def _check_siblings(draft_tokens, draft_probs, num_drafted, name, target, key) -> None:
    _check("draft_tokens", draft_tokens, (None, None), jnp.int32)
    rows, width = draft_tokens.shape
    if width == 0:
        raise ValueError("draft_tokens: no children: its shape is [B, 0]")
    _check_drafts(draft_tokens, draft_probs, num_drafted, name, target, (rows, None))
    for i in range(2):
        _check(f"key[{i}]", key[i], (rows,), jnp.uint32)


def _check_drafts(draft_tokens, draft_probs, num_drafted, name, target, shape) -> None:
    dtypes = (jnp.float32, jnp.bfloat16) if name == "logits" else (jnp.float32,)
    _check(name, target, shape, *dtypes)
    _check("num_drafted", num_drafted, draft_tokens.shape[:1], jnp.int32)
    if draft_probs is not None:
        shape = (*draft_tokens.shape, target.shape[-1])
        _check("draft_probs", draft_probs, shape, jnp.float32)


def _check(name: str, x: Array, shape: tuple[int | None, ...], *dtypes: Any) -> None:
    """Raises unless `x` has one of the dtypes and the shape, in which None is any size."""
    if x.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name}: {names} is needed, not {x.dtype}")
    fits = len(shape) == x.ndim and all(
        want in (None, size) for want, size in zip(shape, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape [{wanted}] is needed, not {list(x.shape)}")
