"""Log probabilities of emitted tokens and of the most probable ones beside them.

By default they are the model's own, log-softmax of its raw logits, as in vLLM; a row may ask for
those after all its settings. They come from the logits that the verdict was made from, so
accepted, recovered and bonus tokens are all alike. Knows nothing of drafts or text.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from jspec.sampling import Prefix, Sampling, inverse_temperature, process_logits


class TokenLogprobs(flax.struct.PyTreeNode):
    """Scores of T tokens of B rows, with the N most probable tokens in the place of each."""

    logprob: Array
    """`[B, T]` float32."""
    rank: Array
    """`[B, T]` int32: 1 for the most probable token."""
    top_ids: Array
    """`[B, T, N]` int32, the most probable first; N 0: none are kept."""
    top_logprobs: Array
    """`[B, T, N]` float32."""


def no_logprobs(rows: int, width: int, num_top: int) -> TokenLogprobs:
    """Zeros."""
    shape, top = (rows, width), (rows, width, num_top)
    return TokenLogprobs(
        logprob=jnp.zeros(shape, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        top_ids=jnp.zeros(top, jnp.int32),
        top_logprobs=jnp.zeros(top, jnp.float32),
    )


def score(
    logits: Array, tokens: Array, sampling: Sampling, prefix: Prefix, num_top: int
) -> TokenLogprobs:
    """The scores of `tokens` `[B, T]` under `[B, T, V]` logits; zeros where no row asks."""

    def processed() -> Array:
        warm = sampling.replace(
            temperature=jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
        )
        after = process_logits(logits, warm, prefix) * inverse_temperature(warm)[:, None, None]
        return jnp.where(sampling.processed_logprobs[:, None, None], after, logits)

    def wanted() -> TokenLogprobs:
        asked = sampling.processed_logprobs & (sampling.num_logprobs >= 0)
        return score_raw(jax.lax.cond(jnp.any(asked), processed, lambda: logits), tokens, num_top)

    nobody = no_logprobs(tokens.shape[0], tokens.shape[1], num_top)
    return jax.lax.cond(jnp.any(sampling.num_logprobs >= 0), wanted, lambda: nobody)


def score_raw(logits: Array, tokens: Array, num_top: int) -> TokenLogprobs:
    """The scores of `tokens` `[B, T]` by log-softmax of `[B, T, V]` logits."""
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    found = min(num_top, logits.shape[-1])
    top, ids = jax.lax.top_k(logits, found)
    missing = [(0, 0), (0, 0), (0, num_top - found)]
    return TokenLogprobs(
        logprob=(chosen - norm)[..., 0],
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(ids.astype(jnp.int32), missing),
        top_logprobs=jnp.pad(top - norm, missing, constant_values=-jnp.inf),
    )
