"""The kernels' part of `bench/hopper.py`: inputs, float64 references, and times of one call.

A call is timed inside a compiled loop of many, where each call's small inputs depend on the
result of the one before, so that none can be left out or shared. Attention walks through a pool
of pages that is larger than the second-level cache, as the layers of a model do.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import draws
from pallas_kernels import costs
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rejection_sampling import coupled_from_logits, rejection_from_logits

PAGE_SIZE = 16
POOL_BYTES = 256 << 20
"""Keys and values that a timed loop walks through: five times an H100's second-level cache."""
LOOP_SECONDS = 4e-3
"""What a timed loop takes at full bandwidth, about."""


class Heads(NamedTuple):
    """What attention sees of a model, or of one device's share of it."""

    queries: int
    keys: int
    size: int


class Attention(NamedTuple):
    """One shape of attention."""

    model: str
    heads: Heads
    kind: str
    """"decode", "verify", "tree" or "prefill"."""
    width: int
    """Tokens in flight."""
    context: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.kind} T={self.width}, context {self.context}, B={self.batch}"

    @property
    def page_bytes(self) -> int:
        """Of keys and values of one page."""
        return 2 * PAGE_SIZE * self.heads.keys * self.heads.size * 2

    @property
    def cost(self) -> costs.Cost:
        """That no kernel can do without."""
        return costs.attention(
            batch=self.batch,
            tokens=self.width,
            heads=self.heads.queries,
            kv_heads=self.heads.keys,
            head_dim=self.heads.size,
            context=self.context,
        )


class Features(NamedTuple):
    """What a correctness check asks of attention."""

    name: str
    heads: Heads = Heads(32, 8, 128)
    width: int = 8
    queries: int | None = None
    """Tokens that ask, the last of those in flight; None: all."""
    tree: bool = False
    window: int | None = None
    softcap: float | None = None
    fp8: bool = False


CHECKS = (
    Features("decode", width=1),
    Features("verify"),
    Features("verify, one device of eight of 70B", Heads(8, 1, 128)),
    Features("verify, SmolLM2", Heads(9, 3, 64)),
    Features("prefill", width=64),
    Features("part of a block", width=16, queries=5),
    Features("tree", width=64, tree=True),
    Features("window", window=100),
    Features("softcap", softcap=20.0),
    Features("fp8", fp8=True),
)
TINY_CHECKS = (Features("tree", Heads(4, 2, 64), 4, tree=True),)


def tree_mask(rng: Any, batch: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Random trees: which tokens are ancestors or oneself `[B, W, W]`, and depths `[B, W]`."""
    mask, depths = np.zeros((batch, width, width), bool), np.zeros((batch, width), np.int32)
    mask[:, 0, 0] = True
    for b in range(batch):
        for node in range(1, width):
            parent = rng.integers(max(0, node - 8), node)
            mask[b, node] = mask[b, parent]
            mask[b, node, node] = True
            depths[b, node] = depths[b, parent] + 1
    return mask, depths


def check_attention(check: Features, seed: int, implementations: tuple[str, ...]) -> dict[str, Any]:
    """The largest difference of each implementation from float64, in units of the tolerance, which
    is 0.02 + 0.02 * |expected|: bfloat16 keeps 8 bits of weights and results."""
    rng = np.random.default_rng(seed)
    lengths = np.array([0, 37, 515 if check.width > 4 else 130], np.int32)
    columns = -(-int(lengths.max()) // PAGE_SIZE)
    heads, batch = check.heads, lengths.size
    pages = (batch * columns + 3, PAGE_SIZE, heads.keys, heads.size)
    queries = check.width if check.queries is None else check.queries

    def normal(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    dtype = jnp.float8_e4m3fn if check.fp8 else jnp.bfloat16
    block = (batch, check.width, heads.keys, heads.size)
    table = rng.permutation(pages[0])[: batch * columns].reshape(batch, columns).astype(np.int32)
    arrays = (
        normal((batch, queries, heads.queries, heads.size)),
        *(normal(pages, dtype) for _ in range(2)),
        jnp.asarray(table),
        jnp.asarray(lengths),
        *(normal(block, dtype) for _ in range(2)),
        jnp.int32(check.width - queries),
    )
    settings: dict[str, Any] = {"window": check.window, "softcap": check.softcap}
    if check.tree:
        mask, depths = tree_mask(rng, batch, check.width)
        settings |= {"mask": jnp.asarray(mask), "depths": jnp.asarray(depths)}
    if check.fp8:
        settings |= {"k_scale": jnp.float32(0.5), "v_scale": jnp.float32(2.0)}
    expected = attention_reference(arrays, settings)
    report = {}
    for implementation in implementations:
        program = jax.jit(
            functools.partial(paged_attention, **settings, implementation=implementation)
        )
        got = np.asarray(program(*arrays), np.float64)
        worst = np.max(np.abs(got - expected) / (0.02 + 0.02 * np.abs(expected)))
        report[implementation] = {"worst": float(worst), "correct": bool(worst < 1)}
    return report


def attention_reference(arrays: tuple[Any, ...], settings: dict[str, Any]) -> np.ndarray:
    """Paged attention in float64, row by row."""
    wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in arrays[:3] + arrays[5:7]]
    queries, k_pages, v_pages, k_block, v_block = wide
    table, lengths, start = (np.asarray(arrays[i]) for i in (3, 4, 7))
    out = np.zeros_like(queries)
    for b, length in enumerate(lengths):
        in_pages = (table[b][np.arange(length) // PAGE_SIZE], np.arange(length) % PAGE_SIZE)
        keys = np.concatenate([k_pages[in_pages], k_block[b]]) * settings.get("k_scale", 1.0)
        values = np.concatenate([v_pages[in_pages], v_block[b]]) * settings.get("v_scale", 1.0)
        group = queries.shape[2] // keys.shape[1]
        keys, values = (np.repeat(np.asarray(x, np.float64), group, axis=1) for x in (keys, values))
        scores = np.einsum("tnh,snh->nts", queries[b], keys) / np.sqrt(queries.shape[-1])
        if settings["softcap"] is not None:
            scores = settings["softcap"] * np.tanh(scores / settings["softcap"])
        seen = _visible(b, int(length), int(start), queries.shape[1], k_block.shape[1], settings)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[b] = np.einsum("nts,snh->tnh", weights, values)
    return out


def _visible(
    row: int, length: int, start: int, queries: int, width: int, settings: dict[str, Any]
) -> np.ndarray:
    """`[queries, length + width]`: which slots each query sees."""
    asking = start + np.arange(queries)
    if "mask" in settings:
        block = np.asarray(settings["mask"])[row][asking]
        depths = np.asarray(settings["depths"])[row]
    else:
        block, depths = np.arange(width) <= asking[:, None], np.arange(width)
    seen = np.concatenate([np.ones((queries, length), bool), block], axis=1)
    if settings["window"] is not None:
        at = np.concatenate([np.arange(length), length + depths])
        seen &= (length + depths[asking])[:, None] - at < settings["window"]
    return seen


def time_attention(case: Attention, implementations: tuple[str, ...], repeats: int) -> dict:
    """Seconds a call, medians of `repeats` loops, the implementations in turn."""
    calls = max(4, min(200, int(LOOP_SECONDS / (case.cost.bytes / 4e12 + 5e-6))))
    columns = -(-case.context // PAGE_SIZE)
    num_pages = max(case.batch * columns, -(-POOL_BYTES // case.page_bytes))
    if implementations[0] != "mosaic":  # a trial
        calls, num_pages = 2, case.batch * columns
    heads = case.heads
    keys = jax.random.split(jax.random.key(0), 5)
    pages = (num_pages, PAGE_SIZE, heads.keys, heads.size)
    block = (case.batch, case.width, heads.keys, heads.size)
    shapes = ((*block[:2], heads.queries, heads.size), pages, pages, block, block)
    normal = jax.jit(functools.partial(jax.random.normal, dtype=jnp.bfloat16), static_argnums=1)
    queries, k_pages, v_pages, k_block, v_block = map(normal, keys, shapes)
    table = jnp.arange(case.batch * columns, dtype=jnp.int32).reshape(case.batch, columns)
    lengths = jnp.full((case.batch,), case.context, jnp.int32)
    settings: dict[str, Any] = {}
    if case.kind == "tree":
        mask, depths = tree_mask(np.random.default_rng(0), case.batch, case.width)
        settings = {"mask": jnp.asarray(mask), "depths": jnp.asarray(depths)}

    def loop(implementation: str, queries: Any, k_pages: Any, v_pages: Any, *rest: Any) -> Any:
        def call(i: Any, carry: Any) -> Any:
            queries, small = jax.lax.optimization_barrier(carry)
            table, lengths, k_block, v_block = small
            moved = (table + i * table.size) % num_pages
            out = paged_attention(
                queries,
                k_pages,
                v_pages,
                moved,
                lengths,
                k_block,
                v_block,
                **settings,
                implementation=implementation,
            )
            return out, small

        return jax.lax.fori_loop(0, calls, call, (queries, rest))[0]

    arguments = (queries, k_pages, v_pages, table, lengths, k_block, v_block)
    report = time_in_turn(loop, arguments, implementations, calls, repeats)
    return report | {"least_bytes": case.cost.bytes, "flops": case.cost.flops}


def time_in_turn(
    loop: Callable[..., Any],
    arguments: tuple[Any, ...],
    implementations: tuple[str, ...],
    calls: int,
    repeats: int,
) -> dict[str, Any]:
    """Compiles `loop(implementation, *arguments)` for each and times them alternately. One that
    does not compile or run is reported and the others go on."""
    programs: dict[str, Any] = {}
    report: dict[str, Any] = {"calls": calls}
    for name in implementations:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                start = time.perf_counter()
                lowered = jax.jit(functools.partial(loop, name)).lower(*arguments)
                program = lowered.compile()
                compiled = time.perf_counter() - start
            jax.block_until_ready(program(*arguments))
            report[name] = {
                "compile_seconds": compiled,
                "is_kernel": "mosaic_gpu" in str(program.as_text()),
                "warnings": [str(w.message) for w in caught],
            }
            programs[name] = program
        except jax.errors.JaxRuntimeError:
            raise  # the device may be unusable now: this process must end
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            times[name].append((time.perf_counter() - start) / calls)
    for name, taken in times.items():
        report[name] |= {"seconds": statistics.median(taken), "fastest": min(taken)}
    return report


class Sampling(NamedTuple):
    """One shape of verification."""

    rule: str
    """"rejection", "rejection, certain drafts" or "coupled"."""
    batch: int
    drafts: int
    vocab: int

    @property
    def name(self) -> str:
        return f"{self.rule}, B={self.batch}, K={self.drafts}, V={self.vocab}"

    @property
    def cost(self) -> costs.Cost:
        """That no kernel can do without."""
        rule = "certain" if self.rule == "rejection, certain drafts" else self.rule
        return costs.verification(rule=rule, batch=self.batch, drafts=self.drafts, vocab=self.vocab)


def sampling_inputs(case: Sampling, seed: int) -> dict[str, Any]:
    """Drafts from laws near the target's, some rows with fewer drafts and another temperature."""
    rng = np.random.default_rng(seed)
    B, K, V = case.batch, case.drafts, case.vocab
    logits = 3 * rng.standard_normal((B, K + 1, V), np.float32)
    near = logits[:, :-1] + 0.3 * rng.standard_normal((B, K, V), np.float32)
    probs = np.exp(near - near.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    noise = -np.log(rng.random((B, K, V), np.float32) + np.float32(1e-9))
    inputs = {
        "draft_tokens": np.argmax(probs / noise, axis=-1).astype(np.int32),
        "draft_probs": probs if case.rule == "rejection" else None,
        "num_drafted": np.where(np.arange(B) % 3 == 2, K // 2, K).astype(np.int32),
        "logits": logits,
        "scale": np.where(np.arange(B) % 2, 1.0, 1.4).astype(np.float32),
        "coins": rng.random((B, K), np.float32),
        "keys": tuple(rng.integers(0, 2**32, (B, K + 1), np.uint32) for _ in range(2)),
    }
    if case.rule == "rejection, certain drafts":
        inputs["draft_tokens"] = np.argmax(logits[:, :-1], axis=-1).astype(np.int32)
    return jax.tree.map(jnp.asarray, inputs)


def decide(rule: str, inputs: dict[str, Any], implementation: str) -> Any:
    """`(num_accepted, next_token)` by a rule."""
    if rule == "coupled":
        taken = {k: inputs[k] for k in ("draft_tokens", "num_drafted", "logits", "scale", "keys")}
        return coupled_from_logits(**taken, implementation=implementation)[:2]
    return rejection_from_logits(**inputs, implementation=implementation)[:2]


def check_sampling(case: Sampling, seed: int, implementations: tuple[str, ...]) -> dict[str, Any]:
    """Rows whose decision float64 does not allow; a choice is allowed when what it prefers to
    the best choice is within float32's rounding."""
    inputs = sampling_inputs(case, seed)
    host = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x, inputs)
    noise = [race_noise(inputs["keys"], case.vocab, lane) for lane in (0, 1)]
    report = {}
    for name in implementations:
        program = jax.jit(functools.partial(decide, case.rule, implementation=name))
        accepted, tokens = (np.asarray(x) for x in program(inputs))
        wrong = [
            f"row {b}: accepted {accepted[b]}, next token {tokens[b]}"
            for b in range(case.batch)
            if not allowed(case.rule, host, noise, b, int(accepted[b]), int(tokens[b]))
        ]
        report[name] = {"wrong": wrong, "correct": not wrong}
    return report


def race_noise(keys: Any, vocab: int, lane: int) -> np.ndarray:
    """The noise of the race between groups (lane 1) or of all tokens (lane 0), `[B, K+1, n]`."""
    groups = -(-vocab // draws.GROUP_SIZE)
    count = groups if lane else groups * draws.GROUP_SIZE
    key = tuple(jnp.asarray(k)[..., None] for k in keys)
    noise = jax.jit(draws.exponential, static_argnums=1)(key, lane, jnp.arange(count))
    return np.asarray(noise, np.float64)


def allowed(
    rule: str, inputs: dict[str, Any], noise: list[np.ndarray], b: int, accepted: int, token: int
) -> bool:
    """Whether a row's decision is what float64 says, up to rounding."""
    scaled = inputs["logits"][b] * inputs["scale"][b]
    laws = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    laws /= laws.sum(axis=-1, keepdims=True)
    drafts, count = np.asarray(inputs["draft_tokens"][b]), int(inputs["num_drafted"][b])

    def wins(weights: np.ndarray, place: int, chosen: int) -> bool:
        return wins_race(weights, noise[0][b, place], noise[1][b, place], chosen)

    if rule == "coupled":
        kept = all(wins(laws[j], j, int(drafts[j])) for j in range(accepted))
        departs = accepted == count or token != drafts[accepted]
        return accepted <= count and kept and departs and wins(laws[accepted], accepted, token)
    probs = inputs["draft_probs"]
    for j in range(min(accepted + 1, count)):
        draft_prob = 1.0 if probs is None else probs[b, j, drafts[j]]
        margin = laws[j, drafts[j]] - inputs["coins"][b, j] * draft_prob
        if abs(margin) > 1e-5 * laws[j, drafts[j]] and (margin > 0) != (j < accepted):
            return False
    if accepted > count:
        return False
    left = laws[accepted]
    if accepted < count:
        certain = np.eye(1, left.size, drafts[accepted])[0]
        left = np.maximum(left - (certain if probs is None else probs[b, accepted]), 0.0)
    return wins(left, accepted, token)


def wins_race(weights: np.ndarray, inner: np.ndarray, outer: np.ndarray, token: int) -> bool:
    """Whether `token` wins the race between groups and the one inside its own (`jspec.draws`)."""
    padded = np.pad(weights, (0, inner.size - weights.size)).reshape(draws.GROUP_SIZE, -1)
    group, member = token % padded.shape[1], token // padded.shape[1]
    groups = padded.sum(axis=0) / outer
    members = padded[:, group] / inner.reshape(padded.shape)[:, group]
    near = 1 - 1e-3
    return bool(groups[group] >= near * groups.max() and members[member] >= near * members.max())


def time_sampling(case: Sampling, implementations: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """As `time_attention`. The logits of few rows fit into the second-level cache, where the
    model's last product leaves them in a real round, too."""
    inputs = sampling_inputs(case, seed=0)
    calls = 20 if implementations[0] == "mosaic" else 2

    def loop(implementation: str, inputs: dict[str, Any]) -> Any:
        def call(_: Any, carry: Any) -> Any:
            inputs, _ = jax.lax.optimization_barrier(carry)
            return inputs, decide(case.rule, inputs, implementation)

        nothing = jnp.zeros((case.batch,), jnp.int32)
        return jax.lax.fori_loop(0, calls, call, (inputs, (nothing, nothing)))[1]

    report = time_in_turn(loop, (inputs,), implementations, calls, repeats)
    return report | {"least_bytes": case.cost.bytes}
