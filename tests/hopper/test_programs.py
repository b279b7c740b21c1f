"""Whole generations compile for H100s: they fit, update their pages in place and communicate as
the architecture says. Llama 3.1 8B on one device, 70B on eight, in bfloat16 with n-gram drafts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import target
from hopper_generation import LLAMA_8B
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import ModelConfig
from jspec.decode import DecodeConfig, init_state, read_prompts, run_rounds, state_specs
from jspec.drafters.ngram import NgramDrafter
from jspec.draws import GROUP_SIZE
from jspec.engine.batch import BatchRunner
from jspec.model import llama
from jspec.params import is_spec, param_specs
from jspec.sampling import neutral
from jspec.sharding import tree_shardings
from pallas_kernels import dispatch

ROWS, CAPACITY, DRAFTS = 8, 8192, 7
WIDTH = DRAFTS + 1
VOCAB = LLAMA_8B.vocab_size
LLAMA_70B = dataclasses.replace(
    LLAMA_8B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
)
MODELS = {"8B": (LLAMA_8B, 1), "70B": (LLAMA_70B, 8)}
COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
}


class Case(NamedTuple):
    """A compiled program and what went in."""

    config: ModelConfig
    devices: int
    params: Any
    state: Any
    program: target.Program


def sharded(tree: Any, specs: Any, mesh: Mesh, dtype: Any = None) -> Any:
    """Descriptions of the arrays of a tree, sharded by our own rules."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=s),
        tree,
        tree_shardings(mesh, specs, is_spec),
        is_leaf=is_spec,
    )


def state_of(config: DecodeConfig, mesh: Mesh) -> Any:
    """The state that a `BatchRunner` would make, described."""
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    init = functools.partial(
        init_state, config, page_size=BatchRunner.page_size, dtype=jnp.bfloat16
    )
    state = jax.eval_shape(
        init,
        tokens=jax.ShapeDtypeStruct((ROWS, CAPACITY), jnp.int32),
        lengths=counts,
        max_lengths=counts,
        sampling=jax.eval_shape(functools.partial(neutral, ROWS, VOCAB)),
    )
    return sharded(state, state_specs(state), mesh)


@functools.cache
def compiled(model: str, program: str) -> Case:
    """A program as `BatchRunner` compiles it, with the Hopper kernels."""
    config, devices = MODELS[model]
    mesh = target.mesh(devices)
    decode = DecodeConfig(llama(config), NgramDrafter(DRAFTS), (WIDTH,))
    specs = param_specs(config)
    params = (sharded(specs, specs, mesh, jnp.bfloat16), ())
    state = state_of(decode, mesh)
    arguments = [params, state]
    if program == "rounds":
        everywhere = NamedSharding(mesh, PartitionSpec())
        arguments.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere))
    function = {"rounds": run_rounds, "prompts": read_prompts}[program]
    with dispatch.use("mosaic"):
        result = target.compile_for(
            mesh,
            functools.partial(function, decode),
            arguments,
            donate_argnums=1,
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
        )
    return Case(config, devices, params, state, result)


@pytest.fixture(params=[(model, program) for model in MODELS for program in ("prompts", "rounds")])
def case(request: pytest.FixtureRequest) -> Case:
    return compiled(*request.param)


def local_dims(x: Any) -> tuple[int, ...]:
    """Of one device's part of an array."""
    return x.sharding.shard_shape(x.shape)


def local_bytes(tree: Any) -> int:
    return sum(math.prod(local_dims(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_every_layer_attends_in_a_hopper_kernel(case):
    """Of the last layer nobody reads what a prompt's tokens find, only their keys and values."""
    assert case.program.mosaic_calls >= case.config.num_hidden_layers - 1


def test_one_device_verifies_in_hopper_kernels():
    """Besides two of attention a layer; on a mesh the vocabulary is split, and XLA verifies."""
    extra = {
        model: compiled(model, "rounds").program.mosaic_calls
        - 2 * MODELS[model][0].num_hidden_layers
        for model in MODELS
    }
    assert extra["8B"] > 0
    assert extra["70B"] == 0


def test_it_fits(case):
    """Weights, pages and less than a gigabyte of anything else. (What a program does not read is
    not among its arguments: of the head, prompts need nothing.)"""
    assert case.program.used_bytes < target.MEMORY
    assert case.program.used_bytes < local_bytes((case.params, case.state)) + 1e9


def test_the_state_is_updated_in_place(case):
    """Every array of the state that comes out lies where the one that went in was donated."""
    assert case.program.memory.alias_size_in_bytes == local_bytes(case.state)


def in_place(case: Case) -> list[target.Instruction]:
    """All instructions whose result has the dimensions of pages, in any order."""
    pages = sorted(n for n in local_dims(case.state.cache.pages[0].keys) if n > 1)
    return [
        x
        for x in target.instructions(case.program.text)
        if x.dtype == "bf16" and sorted(n for n in x.dims if n > 1) == pages
    ]


HANDED_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional"}
"""Instructions that name an array and do not write one."""


def test_pages_are_written_by_scatters_alone(case):
    """One for the keys and one for the values of each layer, and nothing copies, converts or
    transposes what has the size of pages. A scatter that could not be done in place would have a
    copy before it."""
    opcodes = Counter(x.opcode for x in in_place(case) if x.opcode not in HANDED_ON)
    layers = case.config.num_hidden_layers
    assert opcodes == {"scatter": 2 * layers, "fusion": 2 * layers}


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_read_where_they_lie(model):
    """In a round, whose activations are small, nothing but pages is written to memory that is as
    large as the smallest matrix of weights."""
    case = compiled(model, "rounds")
    smallest = min(math.prod(local_dims(x)) for x in jax.tree.leaves(case.params) if x.ndim > 1)
    pages = in_place(case)
    written = [
        x
        for x in target.instructions(case.program.text)
        if x.dtype == "bf16" and x.size >= smallest and x.opcode not in HANDED_ON and not x.fused
    ]
    assert [x for x in written if x not in pages] == []


def collectives(case: Case) -> list[target.Instruction]:
    return [x for x in target.instructions(case.program.text) if x.opcode in COLLECTIVES]


@pytest.mark.parametrize("program", ["prompts", "rounds"])
def test_one_device_talks_to_nobody(program):
    assert collectives(compiled("8B", program)) == []


def is_activation(x: target.Instruction, case: Case, width: int) -> bool:
    return x.dtype == "bf16" and x.size == ROWS * width * case.config.hidden_size


def test_reading_prompts_sums_two_activations_a_layer():
    """Each device has some heads, some MLP columns and some rows of the embedding, so a sum over
    devices stands behind the lookup, the attention's output and the MLP's; the last layer is left
    out, since nobody reads what comes behind its keys. Pages stay where their heads are."""
    case = compiled("70B", "prompts")
    chunk = DecodeConfig.prefill_chunk
    found = collectives(case)
    assert {x.opcode for x in found} == {"all-reduce"}
    assert all(is_activation(x, case, chunk) for x in found)
    assert len(found) == 1 + 2 * (case.config.num_hidden_layers - 1)


def test_a_round_sums_two_activations_a_layer_and_the_sampler_small_things():
    """The activations as in a prompt, the last layer included. The rest is the sampler's: logits
    are split by tokens and never gathered, but maxima, sums and single tokens of them are shared.

        B T, or 2 B T in one    a maximum, a sum, a token or its logit for each place
        B                       the same for the next token
        B T V / 128             the part of the logits that holds the largest (`draws.largest`)
        B T V / 16              weights of groups of tokens, of all places (`draws.law_of`) or,
        B V / 16                when they are written out, of the next token (`draw_weighted`);
                                the first may come with a draft's own logit: B T (V / 16 + 1)
    """
    case = compiled("70B", "rounds")
    found = collectives(case)
    assert {x.opcode for x in found} == {"all-reduce"}
    activations = [x for x in found if is_activation(x, case, WIDTH)]
    assert len(activations) == 1 + 2 * case.config.num_hidden_layers
    sampler = [x for x in found if x not in activations]
    places, groups = ROWS * WIDTH, VOCAB // GROUP_SIZE
    small = {ROWS, places, 2 * places, places * (VOCAB // 128), places * groups, ROWS * groups}
    small |= {places * (groups + 1)}
    assert {(x.dtype, x.size) for x in sampler} <= {(t, n) for t in ("f32", "s32") for n in small}
