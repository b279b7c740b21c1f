"""What verification and sampling cost beside a forward pass of the target.

    python bench/sampling_cost.py --json bench/results/cpu-sampling.json

A round at a vocabulary of 152,064 (Qwen's), 8 rows and 7 drafts, for every rule, against a pass
of the default model over the same 64 tokens behind 100 others. Everything is timed in turn in one
run; medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
import jspec
from jspec import cache as cache_lib
from jspec.model import llama
from jspec.sampling import Sampling, chain_prefix, neutral
from jspec.verify import verify

ROWS, DRAFTS, VOCAB, CONTEXT, WIDTH = 8, 7, 152_064, 100, 576


def settings() -> dict[str, Sampling]:
    """The ways through the sampler; the first five filter nothing."""
    ones, zeros = jnp.ones((ROWS,), jnp.float32), jnp.zeros((ROWS,), jnp.float32)
    greedy = neutral(ROWS, VOCAB)
    warm = greedy.replace(temperature=ones, seed=jnp.arange(ROWS, dtype=jnp.uint32))
    return {
        "greedy": greedy,
        "rejection": warm,
        "rejection, temperature 0.7": warm.replace(temperature=0.7 * ones),
        "coupled": warm.replace(coupled=ones > 0),
        "both rules in one batch": warm.replace(coupled=jnp.arange(ROWS) % 2 == 0),
        "min_p 0.1": warm.replace(min_p=zeros + 0.1),
        "top_k 40": warm.replace(top_k=jnp.full((ROWS,), 40, jnp.int32)),
        "top_p 0.9": warm.replace(top_p=zeros + 0.9),
        "repetition_penalty 1.1": warm.replace(repetition_penalty=1.1 * ones),
    }


def rounds() -> tuple[Callable[[], Any], dict[str, Callable[[], Any]]]:
    """The product of a head alone, which makes logits; and for each setting, and for drafts that
    are drawn from a law or certain, that product and the verification of them."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (ROWS, DRAFTS + 1, WIDTH), jnp.float32)
    head = 3 * jax.random.normal(keys[1], (VOCAB, WIDTH), jnp.float32) / WIDTH**0.5

    def logits_of(hidden: Any, head: Any) -> Any:
        return jnp.einsum("BTD,VD->BTV", hidden, head)

    noise = 0.3 * jax.random.normal(keys[2], (ROWS, DRAFTS, VOCAB), jnp.float32)
    laws = jax.nn.softmax(logits_of(hidden, head)[:, :-1] + noise, axis=-1)
    drafts = jnp.argmax(laws, axis=-1).astype(jnp.int32)
    lengths = jnp.full((ROWS,), CONTEXT, jnp.int32)
    prefix = chain_prefix(jnp.zeros((ROWS, 512), jnp.int32), lengths, drafts)
    drafted = jnp.full((ROWS,), DRAFTS, jnp.int32)

    @jax.jit
    def alone(hidden: Any, head: Any) -> Any:
        return jax.lax.optimization_barrier(logits_of(hidden, head))[..., 0]

    @jax.jit
    def checked(hidden: Any, head: Any, laws: Any, sampling: Sampling) -> Any:
        logits = jax.lax.optimization_barrier(logits_of(hidden, head))
        arguments = {"target_logits": logits, "sampling": sampling, "prefix": prefix}
        return verify(drafts, laws, drafted, **arguments)

    found = {}
    for name, sampling in settings().items():
        found[name] = functools.partial(checked, hidden, head, laws, sampling)
        if name == "rejection":
            certain = functools.partial(checked, hidden, head, None, sampling)
            found["rejection, certain drafts"] = certain
    return functools.partial(alone, hidden, head), found


def forward(dtype: str) -> Callable[[], Any]:
    """A pass of the default model over the tokens of a round."""
    loaded = checkpoints.load(checkpoints.DEFAULT_MODEL, dtype=dtype)
    model = llama(loaded.config)
    cache = cache_lib.init_cache(
        model.cache_spec, ROWS, 512, page_size=16, dtype=jnp.dtype(dtype)
    ).replace(lengths=jnp.full((ROWS,), CONTEXT, jnp.int32))
    tokens = jnp.ones((ROWS, DRAFTS + 1), jnp.int32)

    @jax.jit
    def program(params: Any, tokens: Any, cache: Any) -> Any:
        out = model.forward(params, tokens, cache_lib.open_block(cache, tokens.shape[1]))
        return jnp.max(out.logits, axis=-1)

    return functools.partial(program, loaded.params, tokens, cache)


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def medians(
    passes: dict[str, Callable[[], Any]],
    head: Callable[[], Any],
    checks: dict[str, Callable[[], Any]],
    repeats: int,
) -> dict[str, float]:
    """Seconds of each, timed in turn; a check's are those beyond the head's right before it."""
    times: dict[str, list[float]] = {name: [] for name in passes | checks}
    for repeat in range(repeats + 1):
        for name, call in passes.items():
            times[name].append(seconds(call))
        for name, call in checks.items():
            before = seconds(head)
            times[name].append(seconds(call) - before)
        if repeat == 0:  # compiles
            times = {name: [] for name in times}
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of verification and sampling.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jspec.enable_compilation_cache()
    passes = {dtype: forward(dtype) for dtype in ("bfloat16", "float32")}
    head, checks = rounds()
    times = medians(passes, head, checks, options.repeats)
    print(f"{'':28} {'ms':>6} {'of bfloat16':>12} {'of float32':>11}")
    for name, taken in times.items():
        shares = [taken / times[dtype] for dtype in passes]
        print(f"{name:28} {1e3 * taken:6.1f} {shares[0]:12.1%} {shares[1]:11.1%}")
    if options.json is not None:
        report = {
            "rows": ROWS,
            "num_speculative_tokens": DRAFTS,
            "vocab_size": VOCAB,
            "context": CONTEXT,
            "backend": jax.default_backend(),
            "jax": jax.__version__,
            "repeats": options.repeats,
            "seconds": times,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
