"""Weights in few bits: how near they are, their product, and the draft model that they make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import CONFIG, TARGET, llama_params, markov, uncached

import jspec
from jspec.drafters.draft_model import DraftModel
from jspec.errors import JspecError
from jspec.layers import linear
from jspec.model import llama
from jspec.params import is_spec, param_specs
from jspec.quantised import QuantisedWeight, dequantise, quantise, quantise_weight
from jspec.sharding import on_mesh, tree_shardings

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(2, 40)), [11, 12]]
SHAPES = (((6, 4, 40), 1), ((10, 3, 8), 2), ((5, 64), 1))


def uneven(shape, inputs, seed=0):
    """A weight whose outputs, and groups of whose inputs, are of very different sizes."""
    rng = np.random.default_rng(seed)
    outer = shape[: len(shape) - inputs]
    flat = rng.normal(size=(*outer, int(np.prod(shape[len(outer) :]))))
    flat *= 10.0 ** rng.uniform(-3, 3, (*outer, 1))
    flat *= np.repeat(rng.uniform(0, 1, flat.shape), 8, axis=-1)[..., : flat.shape[-1]]
    return jnp.asarray(flat.reshape(shape), jnp.float32)


def test_eight_bits_are_half_a_step_of_their_output_away():
    for shape, inputs in SHAPES:
        wanted = uneven(shape, inputs)
        got = quantise_weight(wanted, bits=8, inputs=inputs)
        assert (got.values.dtype, got.steps) == (jnp.int8, None)
        flat = np.asarray(wanted, np.float64).reshape(*got.scales.shape, -1)
        step = np.abs(flat).max(-1, keepdims=True) / 127
        away = np.abs(np.asarray(dequantise(got)).reshape(flat.shape) - flat)
        assert np.all(away <= 0.5001 * step)


@pytest.mark.parametrize("group", [8, 16, 7])  # 7 divides none of the widths
def test_four_bits_are_half_a_step_of_their_group_away(group):
    """A group's step is the smallest multiple of its output's scale that holds its largest."""
    for shape, inputs in SHAPES:
        wanted = uneven(shape, inputs)
        got = quantise_weight(wanted, bits=4, inputs=inputs, group=group)
        assert got.values.dtype == jnp.int4
        flat = np.asarray(wanted, np.float64).reshape(*got.scales.shape, -1)
        away = np.abs(np.asarray(dequantise(got)).reshape(flat.shape) - flat)
        unit = np.abs(flat).max(-1) / (7 * 18)
        for start in range(0, flat.shape[-1], group):
            ours = slice(start, start + group)
            peak = np.abs(flat[..., ours]).max(-1)
            step = np.maximum(np.ceil(peak / (7 * unit) - 1e-4), 1) * unit
            assert np.all(away[..., ours] <= 0.5001 * step[..., None])


def test_steps_of_groups_by_hand():
    got = quantise_weight(jnp.array([[0.9, -0.5, 0.09, 0.04, 0.0]]), bits=4, group=2)
    assert got.values.astype(jnp.int8).tolist() == [[7, -4, 6, 3, 0]]
    assert got.steps is not None
    assert got.steps.tolist() == [[18, 2, 1]]
    np.testing.assert_allclose(got.scales, [1 / 140], rtol=1e-6)
    np.testing.assert_allclose(dequantise(got), np.array([[126, -72, 12, 6, 0]]) / 140, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_of_zeros_stays_one(bits):
    weight = quantise_weight(jnp.zeros((3, 8)), bits=bits)
    assert not np.any(dequantise(weight))
    assert not np.any(linear(jnp.ones((2, 8)), weight, None))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
def test_the_product_is_that_of_the_weights_it_stands_for(bits, shape, inputs):
    """Exact for tokens that are eight bits times a scale, each its own."""
    weight = quantise_weight(uneven(shape, inputs), bits=bits, inputs=inputs, group=16)
    outer, width = shape[: len(shape) - inputs], int(np.prod(shape[len(shape) - inputs :]))
    tokens = np.random.default_rng(1).integers(-127, 128, (2, 3, width)).astype(np.float64)
    tokens[..., 0] = 127
    tokens *= np.array([1, 2.0**-9, 2.0**7])[:, None]
    wanted = tokens @ np.asarray(dequantise(weight), np.float64).reshape(-1, width).T
    x = jnp.asarray(tokens.reshape(2, 3, *shape[len(outer) :]), jnp.float32)
    got = np.asarray(linear(x, weight, None, inputs=inputs))
    size = np.abs(wanted).max(axis=1, keepdims=True)
    assert got.shape == (2, 3, *outer)
    assert np.all(np.abs(got.reshape(wanted.shape) - wanted) <= 1e-5 * size)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_product_has_the_type_of_its_tokens_or_the_one_asked_for(dtype):
    weight = quantise_weight(uneven((5, 64), 1).astype(dtype), bits=8)
    x = jnp.ones((2, 64), dtype)
    assert linear(x, weight, jnp.ones((5,), dtype)).dtype == dtype
    assert linear(x, weight, None, dtype=jnp.float32).dtype == jnp.float32


def test_four_bits_take_half_a_byte():
    weight = quantise_weight(uneven((16, 64), 1), bits=4)
    compiled = jax.jit(lambda values: values).lower(weight.values).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 16 * 64 // 2


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_no_weight_of_a_product_is_shared(tied):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    params = llama_params(0, config=config)
    got = quantise(params, 8)
    assert got.embed is params.embed
    assert got.final_norm is params.final_norm
    weights = {"q", "k", "v", "o", "gate", "up", "down"}
    for mine, theirs in zip(got.layers, params.layers, strict=True):
        for field in dataclasses.fields(mine):
            leaf, old = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name in weights:
                assert isinstance(leaf, QuantisedWeight)
            else:
                assert leaf is old
    head = params.embed if tied else params.lm_head
    np.testing.assert_array_equal(
        dequantise(got.lm_head), dequantise(quantise_weight(head, bits=8))
    )


def distance(got, wanted):
    """Root of the mean square error, relative."""
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("bits", "near"), [(8, 0.06), (4, 0.6)])
def test_logits_are_near_those_of_the_model(bits, near):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (4, 20)))
    for config in (CONFIG, dataclasses.replace(CONFIG, tie_word_embeddings=True, qkv_bias=True)):
        params, model = llama_params(0, config=config), llama(config)
        wanted, _ = uncached(model, params, tokens)
        got, _ = uncached(model, quantise(params, bits, 16), tokens)
        assert 0 < distance(got, wanted) < near


def generate(drafter, drafter_params=(), **settings):
    llm = jspec.LLM(
        TARGET,
        params=llama_params(0),
        drafter=drafter,
        drafter_params=drafter_params,
        num_speculative_tokens=3 if drafter in ("int8", "int4") else None,
        dtype="float32",
        batch_sizes=(4,),
        block_widths=(8,),
    )
    outputs = llm.generate(PROMPTS, jspec.SamplingParams(max_tokens=32, seed=3, **settings))
    total = sum((out.metrics for out in outputs), jspec.Metrics())
    return [out.token_ids for out in outputs], total.acceptance_rate


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 1.0, "verification": "coupled"}]
)
def test_the_target_in_fewer_bits_drafts_for_itself(settings):
    """The text is plain decoding's; the more bits, the more is accepted."""
    plain, _ = generate("none", **settings)
    stranger = DraftModel(TARGET, CONFIG.vocab_size, 3), llama_params(1)
    rates = []
    for drafter in (stranger, ("int4",), ("int8",)):
        text, rate = generate(*drafter, **settings)
        assert text == plain
        rates.append(rate)
    assert rates[0] + 0.2 < rates[1] < rates[2]
    assert rates[2] > 0.8


def test_a_model_of_unknown_layers_cannot_be_quantised():
    with pytest.raises(JspecError, match="'int8' is for models of the Llama family"):
        jspec.LLM(markov(61), params=llama_params(0).embed, drafter="int8")


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_weights_are_split_as_the_weights_were(bits):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"))
    sharded = jax.device_put(llama_params(0), tree_shardings(mesh, param_specs(CONFIG), is_spec))
    got, wanted = quantise(sharded, bits, 16), quantise(llama_params(0), bits, 16)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    for name in ("q", "o", "gate", "down"):
        old, new = (getattr(p.layers[0], name) for p in (sharded, got))
        assert new.values.sharding.is_equivalent_to(old.sharding, old.ndim), name
    tokens = jnp.asarray(PROMPTS[2])[None]
    with on_mesh(mesh):
        logits, _ = uncached(TARGET, got, tokens)
    assert distance(logits, uncached(TARGET, wanted, tokens)[0]) < 0.02
