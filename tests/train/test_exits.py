"""Exits behind layers of a frozen target, trained all at once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import CONFIG, QUICK, assert_nearly_equal, make_states, metrics_of

import checkpoints
import jspec
from jspec import cache as cache_lib
from jspec.drafters.early_exit import EarlyExit
from jspec.errors import JspecError
from jspec.exits import exit_logits, exit_of, exit_output
from jspec.head_params import ExitsConfig
from jspec.model import llama
from jspec.params import init_params
from jspec.train import evaluate as evaluation
from jspec.train import tensors
from jspec.train.losses import step_weights
from jspec.train.new_head import new_head, whole_head
from jspec.train.settings import Settings, Watching
from jspec.train.setup import begin
from jspec.train.states import TargetOfText, write_states
from jspec.train.step import Batch, Objective, loss
from jspec.train.trainer import train

DEEP = dataclasses.replace(CONFIG, num_hidden_layers=3)
LAYERS = (1, 2)
EXITS = dataclasses.replace(
    QUICK, family="exits", layers=LAYERS, steps=30, learning_rate=1e-2, draft_vocab_size=60
)
OFTEN = Watching(log_every=5, eval_every=10, checkpoint_every=10)


def deep_target(silent_from: int = 3) -> TargetOfText:
    """Three layers, each of which changes the law; those from `silent_from` on add nothing."""
    params = init_params(DEEP, jax.random.key(0))
    layers = tuple(
        layer.replace(
            **{
                name: getattr(layer, name) * (60 if i < silent_from else 0)
                for name in ("o", "gate", "down")
            }
        )
        for i, layer in enumerate(params.layers)
    )
    params = params.replace(embed=50 * params.embed, lm_head=50 * params.lm_head, layers=layers)
    return TargetOfText("deep", DEEP, params)


DEEP_TARGET = deep_target()


@pytest.fixture(scope="module")
def deep_states(tmp_path_factory):
    root = tmp_path_factory.mktemp("exits")
    make_states(root)
    write_states(DEEP_TARGET, root / "text", root / "deep", taps=(0, 1, 2, 3), progress=print)
    return root / "deep"


def run(states, folder, watching=OFTEN, *, stop_after=None, **changes):
    settings = dataclasses.replace(EXITS, **changes)
    train(DEEP_TARGET, [states], folder, settings, watching, stop_after=stop_after)
    return folder


@pytest.fixture(scope="module")
def unbroken(deep_states, tmp_path_factory):
    return run(deep_states, tmp_path_factory.mktemp("unbroken") / "run")


def best_of(folder):
    """The state that did best on what is held out: what `head/` is made of."""
    measured = [line for line in metrics_of(folder) if "held_out" in line]
    step = max(measured, key=lambda line: line["held_out"]["length"])["step"]
    return tensors.open_file(folder / "checkpoints" / f"{step:05}.safetensors")


def begun(target=DEEP_TARGET, ids=range(61), layers=LAYERS):
    config = ExitsConfig(layers, 32, 61, len(ids))
    return config, new_head(config, target.params, np.array(ids), seed=0)


def hidden_of(target, tokens):
    """Every hidden state `[1, T, D]` and the logits of a text."""
    model = llama(target.config)

    @jax.jit
    def forward(params, tokens):
        cache = cache_lib.init_cache(model.cache_spec, 1, 32, page_size=4, dtype=jnp.float32)
        return model.forward(params, tokens, cache_lib.open_block(cache, tokens.shape[1]))

    return forward(target.params, tokens)


def batch_of(target, tokens, segments):
    out = hidden_of(target, tokens)
    return out, Batch(
        tokens=tokens,
        segments=segments,
        positions=jnp.arange(tokens.shape[1])[None],
        wanted=(segments > 0) & (jnp.arange(tokens.shape[1]) < 7),
        best=jnp.argmax(out.logits, axis=-1).astype(jnp.int32),
        hidden=dict(enumerate(out.hidden)),
    )


def objective(config):
    n = len(config.layers)
    eps, weights = DEEP.rms_norm_eps, step_weights(n, decay=1.0)
    return Objective(config, eps, anchors=(0,) * n, weights=weights, dtype="float32")


def test_an_exit_that_has_learned_nothing_says_what_the_target_says():
    """Behind the last layer that adds something it has the target's logits, a quarter as loud."""
    target = deep_target(silent_from=2)
    out = hidden_of(target, jnp.array([[3, 1, 4, 1, 5]]))
    ids = np.arange(0, 61, 2)
    config, head = begun(target, ids)
    params = exit_of(config, whole_head(config, head.trained, head.frozen), 2)
    logits = exit_logits(params, out.hidden[2], eps=DEEP.rms_norm_eps, vocab_size=61)
    np.testing.assert_allclose(logits[..., ids], out.logits[..., ids] / 4, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(logits)[..., 1::2] == -np.inf)


def test_the_loss_by_hand():
    """Each exit at each entry against the target's law at the same entry, all exits alike."""
    tokens, segments = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5]]), jnp.array([[1] * 8 + [0]])
    config, head = begun()
    noise = jax.random.normal(jax.random.key(1), (32, 32))
    trained = head.trained.replace(blocks=tuple(0.1 * (i + 1) * noise for i in range(2)))
    out, batch = batch_of(DEEP_TARGET, tokens, segments)
    total, sums = jax.jit(lambda t: loss(t, objective(config), head.frozen, batch))(trained)
    law, best = jax.nn.softmax(out.logits[0, 1:8]), jnp.argmax(out.logits[0, 1:8], axis=-1)
    expected, agreed = [], []
    for i, layer in enumerate(LAYERS):
        params = exit_of(config, whole_head(config, trained, head.frozen), layer)
        logits = exit_logits(
            params, out.hidden[layer][:, 1:8], eps=DEEP.rms_norm_eps, vocab_size=61
        )[0]
        expected.append(-jnp.sum(law * jax.nn.log_softmax(logits), axis=-1).mean())
        agreed.append(int(jnp.sum(jnp.argmax(logits, axis=-1) == best)))
        np.testing.assert_allclose(sums.logit_loss[i] / sums.learned[i], expected[i], rtol=1e-5)
    np.testing.assert_allclose(total, sum(expected), rtol=1e-5)
    assert sums.places.tolist() == [7, 7]
    assert sums.agreed.tolist() == sums.chained.tolist() == agreed


def test_gradients_reach_the_exits_alone():
    """Those of each exit, and of nothing that is the target's."""
    tokens, segments = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5]]), jnp.array([[1] * 9])
    config, head = begun()
    _, batch = batch_of(DEEP_TARGET, tokens, segments)

    def value(trained, lm_head, hidden):
        frozen = head.frozen.replace(lm_head=lm_head)
        return loss(trained, objective(config), frozen, batch._replace(hidden=hidden))[0]

    gradients = jax.jit(jax.grad(value, argnums=(0, 1)))
    trained, lm_head = gradients(head.trained, head.frozen.lm_head, batch.hidden)
    assert len(jax.tree.leaves(trained)) == 3 * len(LAYERS)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(trained))
    assert np.all(np.asarray(lm_head) == 0)


def test_exits_are_equals(deep_states, tmp_path):
    """No weight is less, no anchor further away; of draft steps they are."""
    given = DEEP_TARGET, [deep_states], tmp_path / "exits", EXITS, OFTEN
    found = begin(*given)[0].objective
    assert (found.anchors, found.weights, found.num_drafts) == ((0, 0), (1.0, 1.0), 2)
    head = dataclasses.replace(EXITS, family="mtp", layers=None)
    found = begin(*given[:2], tmp_path / "head", head, OFTEN)[0].objective
    assert (found.anchors, found.weights, found.num_drafts) == ((0, 1), (1.0, 0.8), 1)


def test_exits_learn(unbroken):
    lines = metrics_of(unbroken)
    first, *_, last = [line for line in lines if "agreement" in line]
    for i in range(len(LAYERS)):
        assert last["logit_loss"][i] < 0.8 * first["logit_loss"][i]
        assert last["agreement"][i] > first["agreement"][i] + 0.1
    held = [line["held_out"] for line in lines if "held_out" in line]
    assert all(np.less(held[-1]["logit_loss"], held[0]["logit_loss"]))
    assert held[-1]["length"] == pytest.approx(1 + np.mean(held[-1]["agreement"]), abs=1e-4)


def test_what_was_trained_is_what_is_loaded(unbroken):
    config, params = checkpoints.load_head(
        unbroken / "head", target_config=DEEP, target_params=DEEP_TARGET.params, dtype="float32"
    )
    assert config == ExitsConfig(LAYERS, 32, 61, EXITS.draft_vocab_size)
    state = best_of(unbroken)
    for i, layer in enumerate(LAYERS):
        np.testing.assert_array_equal(params.norms[i], state[f"trained.norms.{i}"])
        np.testing.assert_array_equal(params.blocks[i], state[f"trained.blocks.{i}"])
        assert exit_of(config, params, layer).lm_head is params.lm_head
    x = jax.random.normal(jax.random.key(0), (1, 3, 32))
    silent = exit_of(config, params, 1).replace(block=None, bias=None)
    assert not np.allclose(
        exit_output(exit_of(config, params, 1), x, eps=1e-5), exit_output(silent, x, eps=1e-5)
    )
    with pytest.raises(JspecError, match="is exits at layers 1, 2: say which is meant"):
        jspec.LLM(llama(DEEP), params=DEEP_TARGET.params, drafter=unbroken / "head")
    with pytest.raises(JspecError, match=r"no exit was trained behind 3 layers: give one of 1, 2"):
        exit_of(config, params, 3)


def saved(folder):
    return {p.name: p.read_bytes() for p in (folder / "checkpoints").glob("*.safetensors")}


def test_a_training_that_was_stopped_ends_with_the_same_bytes(deep_states, unbroken, tmp_path):
    folder = run(deep_states, tmp_path / "run", stop_after=17)
    jax.clear_caches()
    run(deep_states, folder)
    assert saved(folder) == saved(unbroken)
    weights = "head/model.safetensors"
    assert (folder / weights).read_bytes() == (unbroken / weights).read_bytes()
    assert saved(run(deep_states, tmp_path / "more", prompts_too=True)) != saved(unbroken)


def test_devices_share_a_batch(deep_states, tmp_path):
    """Equal to one device up to the rounding of sums."""
    watching = dataclasses.replace(OFTEN, data_parallel=2)
    folder = run(deep_states, tmp_path / "run", watching, stop_after=10)
    alone = run(deep_states, tmp_path / "alone", stop_after=10)
    assert_nearly_equal(folder, alone, "00010.safetensors")


def test_the_engine_evaluates_each_exit(unbroken, monkeypatch):
    """One token a draft, with the parameters of the exit behind the drafter's layers."""
    asked = []

    def evaluated(llm, texts, max_tokens):
        drafter, params = llm["drafter"], llm["drafter_params"]
        asked.append((drafter, params))
        return evaluation.Acceptance(1, 9, 4, (0.25 * drafter.layer,), 1 + 0.25 * drafter.layer)

    monkeypatch.setattr(evaluation, "LLM", dict)
    monkeypatch.setattr(evaluation, "_evaluated", evaluated)
    assert evaluation.evaluator_of(DEEP_TARGET, None, [], 8) is None
    evaluator = evaluation.evaluator_of(DEEP_TARGET, None, ["abc"], 8)
    assert evaluator is not None
    assert evaluator(unbroken / "head") == {"acceptance": [0.25, 0.5], "length": 1.375}
    state = best_of(unbroken)
    for i, (drafter, (target, params)) in enumerate(asked):
        assert drafter == EarlyExit(DEEP, LAYERS[i], 1)
        assert target is DEEP_TARGET.params
        np.testing.assert_array_equal(params.norm, state[f"trained.norms.{i}"])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((1, 3), r"exits behind layers 1, 3: give numbers of layers from 1 to 2, ascending"),
        ((0, 1), r"exits behind layers 0, 1"),
        ((2, 1), r"exits behind layers 2, 1"),
        ((2,), r"no states of tap 2, which this family reads; make them with --taps 2$"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, layers, message):
    make_states(tmp_path, num_shards=1)
    write_states(DEEP_TARGET, tmp_path / "text", tmp_path / "few", taps=(1, 3), progress=print)
    with pytest.raises(JspecError, match=message):
        run(tmp_path / "few", tmp_path / "run", layers=layers)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"family": "exits"}, {"layers": (1,)}])
def test_exits_and_only_they_have_layers(changes):
    with pytest.raises(JspecError, match="exits, and only they, need layers"):
        Settings(**changes)
