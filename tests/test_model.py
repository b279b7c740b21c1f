"""The model against transformers' own numbers, and the properties that the engine rests on."""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from golden.load import family_cases, smollm2_cases
from golden.weights import golden_weights
from safetensors.numpy import save_file
from tiny import CONFIG, TARGET, llama_params

import checkpoints
from jspec import cache as cache_lib
from jspec.model import embed, forward_layers, llama
from jspec.params import leaf_paths, param_specs

FAMILIES = {case.name: case for case in family_cases()}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens):
    """Logits `[T, V]` of one sequence, read in one block."""
    cache = cache_lib.init_cache(
        model.cache_spec, 1, tokens.shape[0], page_size=16, dtype=jnp.float32
    )
    cache = cache_lib.open_block(cache, tokens.shape[0])
    return model.forward(params, tokens[None], cache).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family_equal_transformers(name, tmp_path):
    """Through a folder as on the hub: config, names, shapes, rope kinds, biases, norms."""
    case = FAMILIES[name]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(case.config))
    save_file(golden_weights(case.names_and_shapes), tmp_path / "hf" / "model.safetensors")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "hf" / "tokenizer.json"))
    loaded = checkpoints.load(tmp_path / "hf", dtype="float32", cache_dir=tmp_path / "cache")
    got = logits_of(llama(loaded.config), loaded.params, jnp.asarray(case.token_ids))
    np.testing.assert_allclose(got, case.logits, atol=2e-4)


@pytest.mark.parametrize("case", smollm2_cases(), ids=lambda case: case.name)
def test_default_model_equals_transformers_at_every_position(case, default_model):
    model = llama(default_model.config)
    ids = jnp.zeros((384,), jnp.int32).at[: len(case.token_ids)].set(case.token_ids)
    got = np.asarray(logits_of(model, default_model.params, ids))[: len(case.token_ids)]
    top = np.take_along_axis(got, case.top_ids, axis=1)
    np.testing.assert_allclose(top, case.top_logits, atol=1e-3)
    np.testing.assert_allclose(got[:, case.column_ids], case.column_logits, atol=1e-3)
    logsumexp = jax.nn.logsumexp(jnp.asarray(got), axis=1)
    np.testing.assert_allclose(logsumexp, case.logsumexp, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [2, 8])
def test_logits_of_a_token_depend_on_its_prefix_only(dtype, width):
    """Bit for bit at one width: however the prefix was cut into rounds, whatever stands behind
    the token in its block, whatever the other row holds (DESIGN, invariant 5)."""
    params, rng = llama_params(0, dtype), np.random.default_rng(0)
    text = rng.integers(0, CONFIG.vocab_size, 60)

    @jax.jit
    def one_round(cache, block, count):
        out = TARGET.forward(params, block, cache_lib.open_block(cache, width))
        return out.logits[0], cache_lib.commit(out.cache, count)

    def read(counts):
        """Logits `[60, V]` of the text read in rounds that accept `counts` tokens in turn."""
        cache = cache_lib.init_cache(TARGET.cache_spec, 2, 80, page_size=16, dtype=dtype)
        rows, done = [], 0
        while done < len(text):
            count = min(next(counts), len(text) - done)
            block = rng.integers(0, CONFIG.vocab_size, (2, width))  # what is rejected is noise
            block[0, :count] = text[done : done + count]
            logits, cache = one_round(cache, block, np.array([count, rng.integers(0, 2)], np.int32))
            rows += list(np.asarray(logits)[:count])
            done += count
        return np.stack(rows)

    one_by_one = read(itertools.repeat(1))
    np.testing.assert_array_equal(one_by_one, read(itertools.repeat(width)))
    np.testing.assert_array_equal(one_by_one, read(iter(lambda: rng.integers(1, width + 1), 0)))


def test_ranges_of_layers_add_up_to_the_whole():
    params, tokens = llama_params(0), jnp.array([[1, 2, 3]])
    cache = cache_lib.init_cache(TARGET.cache_spec, 1, 16, page_size=16, dtype=jnp.float32)
    cache = cache_lib.open_block(cache, 3)
    whole = TARGET.forward(params, tokens, cache)
    start = embed(params, tokens)
    half, cache = forward_layers(params, CONFIG, (start,), cache, layers=range(1))
    rest, cache = forward_layers(params, CONFIG, half, cache, layers=range(1, 2))
    assert len(whole.hidden) == CONFIG.num_hidden_layers + 1
    for got, tap in zip(rest[:-1], whole.hidden[:-1], strict=True):
        np.testing.assert_array_equal(got, tap)
    for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(whole.cache), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_specs_describe_the_params():
    for (name, spec), (other, leaf) in zip(
        leaf_paths(param_specs(CONFIG)), leaf_paths(llama_params(0)), strict=True
    ):
        assert name == other
        assert spec.shape == leaf.shape
        assert len(spec.axes) == leaf.ndim


def rows_of_products(jaxpr):
    """Rows of each product with a matrix, those in nested programs included."""
    for eqn in jaxpr.eqns:
        if "jaxpr" in eqn.params:  # of a jitted function
            yield from rows_of_products(eqn.params["jaxpr"].jaxpr)
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1] == ((), ()):
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval
            yield left.size // math.prod(left.shape[axis] for axis in contracted)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("bfloat16", 2)])
def test_a_single_token_is_no_single_row_in_16_bits(dtype, rows):
    """XLA's product of one such row takes several times as long on a CPU."""
    params = llama_params(0, dtype)
    cache = cache_lib.init_cache(TARGET.cache_spec, 1, 32, page_size=16, dtype=dtype)
    one = cache_lib.open_block(cache, 1)
    token = jnp.ones((1, 1), jnp.int32)
    program = jax.make_jaxpr(lambda *args: TARGET.forward(*args).logits)(params, token, one)
    found = list(rows_of_products(program.jaxpr))
    assert len(found) == 7 * CONFIG.num_hidden_layers + 1
    assert set(found) == {rows}
    two = cache_lib.open_block(cache, 2)
    logits = TARGET.forward(params, token, one).logits
    pair = TARGET.forward(params, jnp.ones((1, 2), jnp.int32), two).logits
    assert logits.shape == (1, 1, CONFIG.vocab_size)
    np.testing.assert_allclose(logits, pair[:, :1], atol=1e-5 if dtype == "float32" else 0)
