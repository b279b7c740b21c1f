"""LayerSkip on a tiny model: rates, weights, turns, and what its first layers learn."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_training import CONFIG, assert_nearly_equal, metrics_of, write_text_shards

import jspec
from jspec.errors import JspecError
from jspec.layers import rms_norm
from jspec.loading import Options, load_draft
from jspec.train import data
from jspec.train.evaluate import evaluate
from jspec.train.layerskip import (
    LayerSkipLoss,
    dropout_rates,
    exit_weights,
    exits_of,
    train_layerskip,
)
from jspec.train.settings import LayerSkipSettings, Watching
from jspec.train.states import TargetOfText
from jspec.train.step import Batch
from jspec.train.text import text_shards
from jspec.train.whole import streams

DEEP = dataclasses.replace(CONFIG, num_hidden_layers=4)
MODEL = TargetOfText("deep", DEEP, tiny.llama_params(0, config=DEEP))
SETTINGS = LayerSkipSettings(
    steps=9,
    batch_tokens=128,
    sequence_length=64,
    learning_rate=5e-3,
    warmup=2,
    dropout=0.2,
    exit_scale=1.0,
    rotation=2,
    dtype="float32",
)
OFTEN = Watching(log_every=4, eval_every=5, checkpoint_every=5)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text_shards(tmp_path_factory.mktemp("layerskip") / "text", 3)


@pytest.fixture(scope="module")
def batch(text) -> Batch:
    corpus = data.open_text([text_shards(text).path(i) for i in (0, 1)], 64)
    (rows, *_) = data.training_batches(corpus, sequence_length=64, rows=2, seed=0)[:1]
    return Batch(**jax.tree.map(jnp.asarray, rows))


def run(text, folder, *, stop_after=None, watching=OFTEN, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    train_layerskip(MODEL, [text], folder, settings, watching, stop_after=stop_after)
    return folder


def test_later_layers_are_left_out_more_often():
    """0.1 (2^(l/3) - 1)."""
    assert dropout_rates(4, 0.1) == pytest.approx((0.0, 0.0259921, 0.0587401, 0.1))
    assert dropout_rates(1, 0.1) == (0.0,)


def test_exits_weigh_more_the_later_they_are():
    """0.5 (0, 0 + 1, 0 + 1 + 2), and 3 + 0.5 (0 + 1 + 2)."""
    assert exit_weights(4, 0.5) == pytest.approx((0.0, 0.5, 1.5, 4.5))
    assert exit_weights(4, 0.0) == (0, 0, 0, 3)


def test_exits_take_turns_and_the_last_is_always_trained():
    turns = [exits_of(jnp.int32(step), 6, 2).tolist() for step in range(3)]
    assert turns == [[0, 2, 4, 5], [1, 3, -1, 5], [0, 2, 4, 5]]
    assert exits_of(jnp.int32(7), 4, 1).tolist() == [0, 1, 2, 3]
    assert exits_of(jnp.int32(1), 4, 3).tolist() == [1, 3]


def test_rows_are_left_out_as_often_as_the_rates_say():
    """Of 4000 draws: five standard deviations are 0.04 at most."""
    loss = LayerSkipLoss(DEEP, dropout=0.5, exit_scale=1.0, rotation=1)
    kept = jnp.concatenate([loss.kept(jnp.int32(step), 400) for step in range(10)], axis=1)
    np.testing.assert_allclose(1 - kept.mean(axis=1), dropout_rates(4, 0.5), atol=0.04)
    assert bool(kept[0].all())
    assert not np.array_equal(kept[3, :400], kept[3, 400:800])


def test_a_row_goes_past_a_layer_that_is_left_out(batch):
    kept = jnp.array([[True, True], [True, False], [True, True], [False, True]])
    found = streams(MODEL.params, DEEP, batch, kept)[-1]
    for row, layers in ((0, (0, 1, 2)), (1, (0, 2, 3))):
        fewer = MODEL.params.replace(layers=tuple(MODEL.params.layers[i] for i in layers))
        config = dataclasses.replace(DEEP, num_hidden_layers=3)
        np.testing.assert_allclose(
            found[row], streams(fewer, config, batch)[-1][row], rtol=1e-5, atol=1e-6
        )


def test_the_loss_is_the_weighted_mean_of_the_exits(batch):
    """Step 1 with one exit in two: behind layer 1 and the last, which weigh 1 and 6."""
    loss = LayerSkipLoss(DEEP, dropout=0.0, exit_scale=1.0, rotation=2, dtype="float32")
    total, sums = loss.loss(MODEL.params, (), batch, jnp.int32(1))
    hidden, params = streams(MODEL.params, DEEP, batch), MODEL.params
    expected = []
    for stream in (hidden[2], hidden[4]):
        final = rms_norm(stream, params.final_norm, DEEP.rms_norm_eps)
        logs = jax.nn.log_softmax(final @ params.lm_head.T)[:, :-1]
        said = jnp.take_along_axis(logs, batch.tokens[:, 1:, None], axis=2)[..., 0]
        expected.append(-float(said[batch.wanted[:, :-1]].mean()))
    assert float(total) == pytest.approx((expected[0] + 6 * expected[1]) / 7, rel=1e-5)
    found = sums.means()
    assert found["logit_loss"] == pytest.approx([0, expected[0], 0, expected[1]], abs=1e-4)
    assert found["agreement"][3] == 1.0


def test_gradient_reaches_every_leaf(batch):
    loss = LayerSkipLoss(DEEP, dropout=0.1, exit_scale=1.0, rotation=2, dtype="float32")
    gradient, _ = jax.grad(loss.loss, has_aux=True)(MODEL.params, (), batch, jnp.int32(0))
    assert all(np.abs(leaf).max() > 1e-7 for leaf in jax.tree.leaves(gradient))


def test_a_training_that_was_stopped_ends_with_the_same_bytes(text, tmp_path):
    unbroken = run(text, tmp_path / "unbroken")
    folder = run(text, tmp_path / "run", stop_after=7)
    jax.clear_caches()
    run(text, folder)
    for name in ("checkpoints/00009.safetensors", "model/model.safetensors"):
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes()
    assert len(metrics_of(folder)[-1]["held_out"]["agreement"]) == 4
    assert "length" not in metrics_of(folder)[-1]["held_out"]  # the last state is kept
    assert (folder / "curves.png").is_file()


def test_devices_share_a_batch(text, tmp_path):
    """Rows are left out as on one device."""
    watching = dataclasses.replace(OFTEN, data_parallel=2)
    folder = run(text, tmp_path / "run", stop_after=5, watching=watching)
    alone = run(text, tmp_path / "alone", stop_after=5)
    assert_nearly_equal(folder, alone, "00005.safetensors")


def accepted(folder) -> float:
    """Share of drafts accepted that the first layer of a saved model makes."""
    model, params = load_draft(folder / "model", Options("float32"))
    llm = jspec.LLM(
        model,
        params=params,
        drafter="early_exit:1",
        num_speculative_tokens=2,
        dtype="float32",
        batch_sizes=(8,),
        block_widths=(3,),
    )
    found = evaluate(llm, [[i, i + 7, i + 14] for i in range(8)], 24)
    return sum(found.per_position) / 2


def test_first_layers_draft_better_than_those_of_a_plain_training(text, tmp_path):
    watching = Watching(log_every=50, eval_every=50, checkpoint_every=50)
    shares = {}
    for name, changes in (("layerskip", {}), ("plain", {"dropout": 0.0, "exit_scale": 0.0})):
        folder = run(text, tmp_path / name, steps=50, watching=watching, **changes)
        shares[name] = accepted(folder)
    assert shares["layerskip"] > shares["plain"] + 0.1


def test_wrong_settings():
    with pytest.raises(JspecError, match=r"dropout is 1.0: it must be below 1"):
        LayerSkipSettings(dropout=1.0)
    with pytest.raises(JspecError, match="rotation is 0: it must be at least 1"):
        LayerSkipSettings(rotation=0)
