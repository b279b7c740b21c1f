"""The generation part of `bench/hopper.py`: tokens a second of a model with random weights.

What random weights say means nothing, and how often n-gram drafts are right in it neither: the
times of a round are what to read. A prompt is a short random text again and again, so that there
is always a draft.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import ModelConfig, RopeScaling
from jspec.decode import DecodeConfig, init_state, read_prompts, run_rounds
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.engine.batch import BatchRunner
from jspec.model import llama
from jspec.params import init_params
from jspec.sampling import neutral
from pallas_kernels import dispatch

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
)
TINY = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
)
DRAFTS = 7
DRAFTERS = {"ngram": NgramDrafter(DRAFTS), "none": NoDrafter()}


@functools.cache
def weights(config: ModelConfig) -> Any:
    """Once a process."""
    return init_params(config, jax.random.key(0), jnp.bfloat16), ()


def first_state(config: DecodeConfig, batch: int, context: int, new: int) -> Any:
    """Rows with prompts of `context` tokens and room for `new` more."""
    capacity = 1 << (context + new - 1).bit_length()
    vocab_size = config.model.vocab_size
    phrase = np.random.default_rng(0).integers(0, vocab_size, (batch, 32))
    tokens = np.zeros((batch, capacity), np.int32)
    tokens[:, :context] = np.tile(phrase, (1, -(-context // 32)))[:, :context]
    lengths = np.full((batch,), context, np.int32)
    return init_state(
        config,
        tokens=tokens,
        lengths=lengths,
        max_lengths=lengths + np.int32(new),
        sampling=neutral(batch, vocab_size),
        page_size=BatchRunner.page_size,
        dtype=jnp.bfloat16,
    )


def compiled(config: DecodeConfig, params: Any, state: Any) -> dict[str, Any]:
    """The two programs of a generation."""
    read = jax.jit(functools.partial(read_prompts, config), donate_argnums=1)
    rounds = jax.jit(functools.partial(run_rounds, config), donate_argnums=1)
    return {
        "read": read.lower(params, state).compile(),
        "rounds": rounds.lower(params, state, np.int32(0)).compile(),
    }


def measure(drafter: str, batch: int, context: int, *, trial: bool) -> dict[str, Any]:
    """Times of a round and tokens a second, the implementations in turn."""
    implementations = ("xla",) if trial else ("mosaic", "xla")
    new, repeats = (8, 1) if trial else (128, 3)
    model = TINY if trial else LLAMA_8B
    params, found = weights(model), DRAFTERS[drafter]
    widths = (found.num_speculative_tokens + 1,)
    config = DecodeConfig(llama(model), found, widths)
    make = functools.partial(first_state, config, batch, context, new)
    programs, report = {}, {}
    for name in implementations:
        jax.clear_caches()  # what was traced for one implementation would serve the other
        start = time.perf_counter()
        try:
            with dispatch.use(name):
                programs[name] = compiled(config, params, make())
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        report[name] = {
            "compile_seconds": time.perf_counter() - start,
            "is_kernel": {k: "mosaic_gpu" in str(p.as_text()) for k, p in programs[name].items()},
        }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, pair in programs.items():
            runs[name].append(run(pair, params, make()))
    for name, taken in runs.items():
        kept = taken[1:]  # the first run warms up
        report[name] |= {k: statistics.median(x[k] for x in kept) for k in kept[0]}
    return report


def run(pair: dict[str, Any], params: Any, state: Any) -> dict[str, float]:
    """One generation. `seconds` are those of a round."""
    context = int(state.lengths[0])
    start = time.perf_counter()
    state = jax.block_until_ready(pair["read"](params, state))
    read = time.perf_counter()
    state = jax.block_until_ready(pair["rounds"](params, state, np.int32(2**30)))
    seconds = time.perf_counter() - read
    tokens = int(np.sum(np.asarray(state.lengths) - context))
    rounds = int(np.max(np.asarray(state.log.rounds)))
    return {
        "seconds": seconds / rounds,
        "prompt_seconds": read - start,
        "tokens_per_second": tokens / seconds,
        "tokens_per_round": tokens / rounds / state.lengths.size,
        "rounds": rounds,
    }
