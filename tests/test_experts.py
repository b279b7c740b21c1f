"""Who is chosen, by hand; what the chosen make of a token, against a plain loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec.config import ExpertsConfig, ModelConfig
from jspec.experts import mixture, route
from jspec.params import ExpertsParams, SharedExpertParams, is_spec, param_specs
from jspec.sharding import named_sharding, on_mesh, tree_shardings

D, F, SHARED = 4, 6, 5
PLAIN = ExpertsConfig(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=F,
    shared_expert_intermediate_size=SHARED,
    shared_expert_gate=True,
)
SIGMOID = dataclasses.replace(PLAIN, scoring_func="sigmoid")


def drawn(config: ExpertsConfig, seed: int = 0) -> ExpertsParams:
    """Random, with all that `config` asks for."""
    rng, E = np.random.default_rng(seed), config.num_experts

    def of(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return ExpertsParams(
        router=of(E, D),
        gate=of(E, F, D),
        up=of(E, F, D),
        down=of(E, D, F),
        correction_bias=of(E) if config.scoring_func == "sigmoid" else None,
        shared=SharedExpertParams(of(SHARED, D), of(SHARED, D), of(D, SHARED), of(1, D)),
    )


def routed(config: ExpertsConfig, logits: list[float], bias: Any = None) -> dict[int, float]:
    """Weights by expert, of one token whose router says `logits`."""
    params = ExpertsParams(
        router=jnp.asarray(logits, jnp.float32)[:, None],
        gate=jnp.zeros(0),
        up=jnp.zeros(0),
        down=jnp.zeros(0),
        correction_bias=None if bias is None else jnp.asarray(bias, jnp.float32),
    )
    weights, chosen = jax.jit(route, static_argnums=1)(params, config, jnp.ones((1, 1)))
    assert weights.dtype == jnp.float32
    return dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))


LOG = np.log([1.0, 2.0, 3.0, 4.0]).tolist()


def test_softmax() -> None:
    """Over all experts, of which two are chosen: 3 / 10 and 4 / 10, or with a sum of one."""
    whole = dataclasses.replace(PLAIN, norm_topk_prob=False)
    assert routed(whole, LOG) == pytest.approx({3: 0.4, 2: 0.3})
    assert routed(PLAIN, LOG) == pytest.approx({3: 4 / 7, 2: 3 / 7})


def test_sigmoid_whose_bias_chooses_but_does_not_weigh() -> None:
    """sigmoid(log x) is x / (1 + x): 1/2, 2/3, 3/4, 4/5; with the bias 0 and 2 are the best."""
    bias = [0.9, 0.0, 0.5, 0.0]
    once = dataclasses.replace(SIGMOID, norm_topk_prob=False)
    assert routed(once, LOG, bias) == pytest.approx({0: 1 / 2, 2: 3 / 4})
    scaled = dataclasses.replace(SIGMOID, routed_scaling_factor=2.5)
    assert routed(scaled, LOG, bias) == pytest.approx({0: 2.5 * 0.4, 2: 2.5 * 0.6})
    assert routed(scaled, LOG, [0.0] * 4) == pytest.approx({3: 2.5 * 16 / 31, 2: 2.5 * 15 / 31})


def test_groups_are_as_good_as_their_best_two() -> None:
    """Six experts in three groups, one of which may be sent to: (1.6, 0.1), (0.9, 0.9), (1, 0.6)
    with the bias. The second is the best, though the first has the best expert."""
    config = ExpertsConfig(6, 2, F, scoring_func="sigmoid", n_group=3, norm_topk_prob=False)
    bias = np.array([1.6, 0.1, 0.9, 0.9, 1.0, 0.6]) - 0.5
    assert routed(config, [0.0] * 6, bias) == pytest.approx({2: 0.5, 3: 0.5})
    two = dataclasses.replace(config, topk_group=2)
    assert routed(two, [0.0] * 6, bias).keys() == {0, 2}
    three = dataclasses.replace(config, topk_group=3)
    assert routed(three, [0.0] * 6, bias).keys() == {0, 4}


def test_groups_of_one() -> None:
    config = ExpertsConfig(3, 2, F, n_group=3, topk_group=2)
    assert routed(config, LOG[:3]) == pytest.approx({2: 3 / 5, 1: 2 / 5})


def by_a_loop(params: ExpertsParams, config: ExpertsConfig, x: np.ndarray) -> np.ndarray:
    """Float64, a token and an expert at a time."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def mlp(matrices: Any, token: np.ndarray) -> np.ndarray:
        gate = matrices.gate @ token
        return matrices.down @ (gate / (1 + np.exp(-gate)) * (matrices.up @ token))

    out = []
    weights, chosen = route(params, config, jnp.asarray(x))
    for token, shares, numbers in zip(x, np.asarray(weights), np.asarray(chosen), strict=True):
        each = (w.replace(gate=w.gate[e], up=w.up[e], down=w.down[e]) for e in numbers)
        total = sum(share * mlp(one, token) for share, one in zip(shares, each, strict=True))
        switch = 1 / (1 + np.exp(-w.shared.switch @ token))
        out.append(total + switch * mlp(w.shared, token))
    return np.stack(out)


@pytest.mark.parametrize("config", [PLAIN, dataclasses.replace(SIGMOID, n_group=2, topk_group=2)])
@pytest.mark.parametrize("rows", [1, 2, 37])
def test_a_mixture_is_the_sum_of_its_experts(config: ExpertsConfig, rows: int) -> None:
    """Of 37 rows that go to two each of four experts, some have more than two tiles."""
    params = drawn(config)
    x = np.random.default_rng(rows).normal(size=(rows, D)).astype(np.float32)
    got = jax.jit(mixture, static_argnums=1)(params, config, jnp.asarray(x)[:, None])
    assert got.shape == (rows, 1, D)
    np.testing.assert_allclose(got[:, 0], by_a_loop(params, config, x), rtol=1e-5, atol=1e-5)


def test_all_rows_to_one_expert() -> None:
    """The tiles that the others do not need hold nothing of anybody's."""
    params = drawn(PLAIN)
    params = params.replace(router=jnp.zeros((4, D)).at[2].set(9.0).at[3].set(8.0))
    x = np.abs(np.random.default_rng(0).normal(size=(20, D))).astype(np.float32)
    got = jax.jit(mixture, static_argnums=1)(params, PLAIN, jnp.asarray(x))
    np.testing.assert_allclose(got, by_a_loop(params, PLAIN, x), rtol=1e-5, atol=1e-5)


def test_a_token_does_not_depend_on_others() -> None:
    """Bit for bit, at one number of rows."""
    params, run = drawn(PLAIN), jax.jit(mixture, static_argnums=1)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(16, D)).astype(np.float32)
    y = np.concatenate([x[:1], rng.normal(size=(15, D)).astype(np.float32)])
    one, other = (run(params, PLAIN, jnp.asarray(rows)) for rows in (x, y))
    np.testing.assert_array_equal(one[0], other[0])


def test_experts_on_a_mesh() -> None:
    """Split within each expert, and tokens over rows, they give what they give whole."""
    layers = ModelConfig(8, D, F, 1, 2, 2, 2, 16, experts=PLAIN)
    specs = param_specs(layers).layers[0].experts
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    params, x = drawn(PLAIN), np.random.default_rng(0).normal(size=(10, D)).astype(np.float32)
    split = jax.device_put(params, tree_shardings(mesh, specs, is_spec))
    assert split.gate.addressable_shards[0].data.shape == (4, F // 2, D)
    with on_mesh(mesh):
        rows = jax.device_put(x, named_sharding(mesh, x.shape, ("batch", None)))
        got = jax.jit(mixture, static_argnums=1)(split, PLAIN, rows)
    np.testing.assert_allclose(got, by_a_loop(params, PLAIN, x), rtol=1e-5, atol=1e-5)


def test_16_bit_weights() -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn(SIGMOID))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(5, D)), jnp.bfloat16)
    got = jax.jit(mixture, static_argnums=1)(params, SIGMOID, x)
    assert got.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    wanted = by_a_loop(wide, SIGMOID, np.asarray(x, np.float32))
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0.1, atol=0.3)
