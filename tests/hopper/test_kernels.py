"""Every kernel compiles for sm_90a at the shapes of real models, without spilling a register, and
comes to what kernels.json says.

A kernel is compiled once a process, so this file comes before those that compile programs
(test_programs.py): what they compile first would be missing here."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import table
import target
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.plan import make_plan
from pallas_kernels.rejection_sampling import (
    coupled_from_logits,
    rejection,
    rejection_from_logits,
    siblings_from_logits,
)


class Attention(NamedTuple):
    """One device's share of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    capacity: int
    page_size: int = 64
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"


MODELS = {
    "Llama-3.1-8B": Attention(32, 8, 128, 8, 8192),
    "Llama-3.3-70B TP8": Attention(8, 1, 128, 32, 8192),
    "Qwen3-8B": Attention(32, 8, 128, 16, 32768, page_size=16),
    "SmolLM2": Attention(9, 3, 64, 8, 2048, page_size=32),
}
STEPS = {"decode": (1, 1), "verify K=7": (8, 8), "tree P=64": (64, 64), "prefill 64": (64, 64)}
"""Tokens, and tokens of the block."""
OTHERS = {
    "heads of 80, float16": (Attention(8, 8, 80, 8, 8192, 16, "float16", "float16"), {}),
    "heads of 96": (Attention(32, 8, 96, 8, 8192, 32), {}),
    "heads of 256, window and soft cap": (
        Attention(8, 4, 256, 8, 8192, 16),
        {"window": 4096, "softcap": 50.0},
    ),
    "heads of 256, in one split": (Attention(8, 4, 256, 8, 256), {}),
    "fp8 pages": (Attention(32, 8, 128, 8, 8192, page_dtype="float8_e4m3fn"), {}),
    "fp8 pages, heads of 256": (
        Attention(8, 4, 256, 8, 256, 16, page_dtype="float8_e4m3fn"),
        {"window": 4096},
    ),
    "fp8 pages, heads of 256, splits": (
        Attention(8, 4, 256, 8, 8192, page_dtype="float8_e4m3fn"),
        {},
    ),
    "fp8 pages, heads of 80": (Attention(8, 8, 80, 8, 8192, 16, page_dtype="float8_e4m3fn"), {}),
}


def placed(arguments: Any, mesh: Any) -> Any:
    """The same arrays, described, on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )


def attention_arguments(shape: Attention, tokens: int, width: int, mask: bool) -> dict[str, Any]:
    B, N, Nkv, H = shape.batch, shape.heads, shape.kv_heads, shape.head_dim
    columns = shape.capacity // shape.page_size
    pages = jax.ShapeDtypeStruct((B * columns, shape.page_size, Nkv, H), shape.page_dtype)
    block = jax.ShapeDtypeStruct((B, width, Nkv, H), shape.page_dtype)
    arguments = {
        "queries": jax.ShapeDtypeStruct((B, tokens, N, H), shape.dtype),
        "k_pages": pages,
        "v_pages": pages,
        "block_table": jax.ShapeDtypeStruct((B, columns), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        "k_block": block,
        "v_block": block,
    }
    return arguments | ({"mask": jax.ShapeDtypeStruct((B, tokens, width), bool)} if mask else {})


def planned_smem(arguments: dict[str, Any], options: dict[str, Any]) -> int:
    """Bytes of shared memory that the plan counts on."""
    q, pages, block = (arguments[name] for name in ("queries", "k_pages", "k_block"))
    plan = make_plan(
        queries=q.shape,
        pages=pages.shape,
        table=arguments["block_table"].shape,
        block_width=block.shape[1],
        itemsize=q.dtype.itemsize,
        scale=1.0,
        softcap=options.get("softcap"),
        windowed="window" in options,
        converts=pages.dtype != q.dtype,
    )
    return plan.smem_bytes(q.dtype.itemsize)


def compile_attention(case: str, shape: Attention, tokens: int, width: int, **options: Any) -> Any:
    """The kernels that this case is the first to need, by (name, case)."""
    mesh = target.mesh(1)
    arguments = attention_arguments(shape, tokens, width, "tree" in case)

    def attend(arguments: dict[str, Any]) -> Any:
        return paged_attention(**arguments, **options, implementation="mosaic")

    described = placed(arguments, mesh)
    program = target.compile_for(mesh, attend, [described])
    assert program.mosaic_calls >= 1
    planned = planned_smem(described, options)
    for kernel in program.kernels:  # the rest is barriers and what reductions need
        is_main = kernel.name == "paged_attention"
        assert not is_main or planned < kernel.shared_memory < planned + 4096, case
    return {(kernel.name, case): kernel for kernel in program.kernels}


def test_paged_attention(write_kernels):
    """All cases; a kernel is listed with the first that needs it, so models of one shape and
    steps of one width share theirs. (A tree's mask is data, like a chain's.)"""
    found = {}
    for model, shape in MODELS.items():
        for step, (tokens, width) in STEPS.items():
            found |= compile_attention(f"{model}, {step}", shape, tokens, width)
    for case, (shape, options) in OTHERS.items():
        found |= compile_attention(case, shape, 8, 8, **options)
    attention = [k for (name, _), k in found.items() if name == "paged_attention"]
    assert len(attention) >= len(MODELS) * 3 + len(OTHERS)
    assert all(kernel.wgmma > 0 and kernel.tma > 0 for kernel in attention)
    table.settle(found, write=write_kernels)


SAMPLING = {  # rows, drafts, vocabulary
    "Llama-3 batch 1": (1, 7, 128_256),
    "Qwen3 batch 64": (64, 7, 151_936),
    "262144": (8, 7, 262_144),
    "50257": (2, 3, 50_257),
    "49152": (8, 7, 49_152),
}


def sampling_calls(rows: int, drafts: int, vocab: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def described(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens = described(rows, drafts, dtype=jnp.int32)
    probs = described(rows, drafts, vocab)
    count = described(rows, dtype=jnp.int32)
    logits = described(rows, drafts + 1, vocab)
    scale, coins = described(rows), described(rows, drafts)
    keys = (described(rows, drafts + 1, dtype=jnp.uint32),) * 2
    key = (described(rows, dtype=jnp.uint32),) * 2
    node = described(rows, vocab)
    return {
        "soft": (rejection_from_logits, (tokens, probs, count, logits, scale, coins, keys)),
        "certain": (rejection_from_logits, (tokens, None, count, logits, scale, coins, keys)),
        "coupled": (coupled_from_logits, (tokens, count, logits, scale, keys)),
        "probabilities": (rejection, (tokens, probs, count, logits, coins, keys)),
        "siblings": (siblings_from_logits, (tokens, None, count, node, scale, coins, key)),
        "soft siblings": (siblings_from_logits, (tokens, probs, count, node, scale, coins, key)),
    }


def test_rejection_sampling(write_kernels):
    """All rules; a kernel is listed with the first case that needs it."""
    found, mesh = {}, target.mesh(1)
    for case, shape in SAMPLING.items():
        for rule, (function, arguments) in sampling_calls(*shape).items():
            run = functools.partial(function, implementation="mosaic")
            program = target.compile_for(mesh, run, placed(arguments, mesh))
            assert program.mosaic_calls >= 1, (case, rule)
            found |= {(k.name, f"{case}, {rule}"): k for k in program.kernels}
            if shape[2] % 16 == 0:  # nothing of the size of the vocabulary is written
                temp = program.memory.temp_size_in_bytes
                assert temp < 4 * shape[0] * shape[2] / 8, (case, rule, temp)
    table.settle(found, write=write_kernels)


@pytest.fixture(autouse=True)
def _time_out(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.timeout(600))
