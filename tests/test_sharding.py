"""Four virtual devices give the tokens of one, for every drafter and mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import CONFIG, TARGET, llama_params

import jspec
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.params import is_spec, param_specs
from jspec.sharding import named_sharding, tree_shardings

DRAFTERS = {
    "none": (NoDrafter(), ()),
    "ngram": (NgramDrafter(6), ()),
    "draft model": (DraftModel(TARGET, CONFIG.vocab_size, 6), llama_params(1)),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(2, 40)), [11, 12]]


def mesh_of(shape, names=("data", "model")):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)


def texts(drafter, mesh, **settings):
    params, draft_params = llama_params(0), DRAFTERS[drafter][1]
    if mesh is not None:
        shardings = tree_shardings(mesh, param_specs(CONFIG), is_spec)
        params = jax.device_put(params, shardings)
        draft_params = jax.device_put(draft_params, shardings) if draft_params else ()
    llm = jspec.LLM(
        TARGET,
        params=params,
        drafter=DRAFTERS[drafter][0],
        drafter_params=draft_params,
        dtype="float32",
        batch_sizes=(4,),
        mesh=mesh,
    )
    params = jspec.SamplingParams(max_tokens=24, seed=3, **settings)
    return [out.token_ids for out in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_do_not_depend_on_the_mesh(drafter, shape):
    mesh = mesh_of(shape)
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "verification": "coupled"}):
        assert texts(drafter, mesh, **settings) == texts(drafter, None, **settings)


def test_axes_go_where_the_rules_say():
    mesh = mesh_of((2, 2))

    def spec(shape, axes):
        return named_sharding(mesh, shape, axes).spec

    assert spec((8, 4, 6), ("heads", None, None)) == jax.P("model", None, None)
    assert spec((8, 3), ("batch", "vocab")) == jax.P("data", None)  # 3 is not a multiple of 2
    only_data = mesh_of((4,), ("data",))
    assert named_sharding(only_data, (8,), ("heads",)).spec == jax.P(None)


def test_weights_are_split_and_not_copied():
    mesh = mesh_of((1, 4))
    params = jax.device_put(llama_params(0), tree_shardings(mesh, param_specs(CONFIG), is_spec))
    assert params.layers[0].q.addressable_shards[0].data.shape == (1, 8, 32)
    assert params.layers[0].down.addressable_shards[0].data.shape == (32, 12)
