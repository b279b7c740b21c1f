"""What verification and sampling cost beside a forward pass of the target.

    python bench/sampling_cost.py --json bench/results/cpu-sampling.json

A round at a vocabulary of 152,064 (Qwen's), 8 rows and 7 drafts, for every rule, against a pass
of the default model over the same 64 tokens behind 100 others. Everything is timed in turn in one
run; medians.
"""

from __future__ import annotations

import argparse
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

ROWS, DRAFTS, VOCAB, CONTEXT = 8, 7, 152_064, 100


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


def rounds() -> dict[str, Callable[[], Any]]:
    """For each setting, and for drafts that are drawn from a law or certain, a verification.

    Its logits are made anew for every call, outside the timing, and given away, as those of a
    pass are: the compiler may overwrite them."""
    keys = jax.random.split(jax.random.key(0), 2)
    logits = 3 * jax.random.normal(keys[0], (ROWS, DRAFTS + 1, VOCAB), jnp.float32)
    near = logits[:, :-1] + 0.3 * jax.random.normal(keys[1], (ROWS, DRAFTS, VOCAB), jnp.float32)
    laws = jax.nn.softmax(near, axis=-1)
    drafts = jnp.argmax(laws, axis=-1).astype(jnp.int32)
    lengths = jnp.full((ROWS,), CONTEXT, jnp.int32)
    prefix = chain_prefix(jnp.zeros((ROWS, 512), jnp.int32), lengths, drafts)
    drafted = jnp.full((ROWS,), DRAFTS, jnp.int32)

    def check(target_logits: Any, laws: Any, sampling: Sampling) -> Any:
        arguments = {"target_logits": target_logits, "sampling": sampling, "prefix": prefix}
        return verify(drafts, laws, drafted, **arguments)

    program = jax.jit(check, donate_argnums=0)

    def call(laws: Any, sampling: Sampling) -> Callable[[], Any]:
        def prepared() -> Callable[[], Any]:
            mine = jax.block_until_ready(logits + 0.0)
            return lambda: program(mine, laws, sampling)

        return prepared

    found = {}
    for name, sampling in settings().items():
        found[name] = call(laws, sampling)
        if name == "rejection":
            found["rejection, certain drafts"] = call(None, sampling)
    return found


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

    return lambda: lambda: program(loaded.params, tokens, cache)


def medians(prepare: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in prepare}
    for repeat in range(repeats + 1):
        for name, make in prepare.items():
            call = make()
            start = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of verification and sampling.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jspec.enable_compilation_cache()
    passes = {dtype: forward(dtype) for dtype in ("bfloat16", "float32")}
    times = medians(passes | rounds(), options.repeats)
    print(f"{'':28} {'ms':>6} {'of bfloat16':>12} {'of float32':>11}")
    for name, seconds in times.items():
        shares = [seconds / times[dtype] for dtype in passes]
        print(f"{name:28} {1e3 * seconds:6.1f} {shares[0]:12.1%} {shares[1]:11.1%}")
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
