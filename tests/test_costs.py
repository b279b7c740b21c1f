"""Counted costs of the kernels, and the tables in docs/kernels.md that are made of them."""

import jax
import jax.numpy as jnp
import kernel_floors
import pytest

from pallas_kernels import costs

SHAPE = {"batch": 2, "heads": 8, "kv_heads": 2, "head_dim": 64}


def plan_for(tokens, context):
    return kernel_floors.plan_for(kernel_floors.Model("", **SHAPE), tokens, context)


def test_products_are_those_that_xla_counts():
    B, T, N, H, S = 2, 16, 8, 64, 128

    def products(q, k, v):
        return jnp.einsum("BNTS,BNSH->BNTH", jnp.einsum("BNTH,BNSH->BNTS", q, k), v)

    q, kv = (jax.ShapeDtypeStruct((B, N, n, H), jnp.float32) for n in (T, S))
    counted = jax.jit(products).lower(q, kv, kv).compile().cost_analysis()["flops"]
    cost = costs.attention(tokens=T, context=S - T, **SHAPE)
    assert cost.flops == counted


def test_bytes_are_those_of_the_arrays():
    B, N, Nkv, H, T, S = 2, 8, 2, 64, 16, 128
    arrays = [(B, S, Nkv, H)] * 2 + [(B, T, N, H)] * 2
    total = sum(jnp.zeros(shape, jnp.bfloat16).nbytes for shape in arrays)
    assert costs.attention(tokens=T, context=S - T, **SHAPE).bytes == total


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("context", [0, 63, 1000, 8192])
def test_the_kernel_does_no_less_than_it_must(tokens, context):
    least = costs.attention(tokens=tokens, context=context, **SHAPE)
    does = costs.attention_of(plan_for(tokens, context), tokens=tokens, context=context)
    assert does.bytes >= least.bytes
    assert does.flops >= least.flops


def test_whole_tiles_in_one_split_waste_nothing():
    """16 tokens of 4 heads a group fill the 64 rows, 448 slots seven tiles."""
    least = costs.attention(tokens=16, context=432, **SHAPE)
    assert costs.attention_of(plan_for(16, 432), tokens=16, context=432) == least


def test_a_floor_is_the_slower_of_transfers_and_products():
    gpu = costs.Gpu("x", 100.0, 10.0)
    assert costs.Cost(200, 10).floor(gpu) == 2.0
    assert costs.Cost(100, 40).floor(gpu) == 4.0


def test_the_documented_tables_are_those_counted():
    assert kernel_floors.tables() in kernel_floors.DOCS.read_text()
