"""Draft models distilled from the tiny target: what they begin as, learn, save and accept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny_training import CONFIG, TARGET, assert_nearly_equal, metrics_of

import checkpoints
import jspec
from jspec.drafters.cascade import Cascade
from jspec.drafters.verifiers import ModelVerifier
from jspec.errors import JspecError
from jspec.layers import rms_norm
from jspec.model import llama
from jspec.train import data
from jspec.train.draft import DraftLoss, begin, train_draft
from jspec.train.evaluate import evaluate
from jspec.train.new_draft import draft_config, draft_frozen, new_draft, principal
from jspec.train.saved import Checkpoints
from jspec.train.settings import DraftSettings, Watching
from jspec.train.setup import state_shards
from jspec.train.step import Batch, init_state, make_optimiser
from jspec.train.whole import streams

SETTINGS = DraftSettings(
    hidden_size=16,
    layers=2,
    heads=2,
    kv_heads=1,
    mlp_size=24,
    draft_vocab_size=40,
    others=7,
    steps=12,
    batch_tokens=128,
    sequence_length=64,
    learning_rate=1e-2,
    warmup=2,
    dtype="float32",
)
STUDENT = draft_config(SETTINGS, CONFIG)
OFTEN = Watching(log_every=4, eval_every=6, checkpoint_every=5)
V = CONFIG.vocab_size


def run(states, folder, *, stop_after=None, watching=OFTEN, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    train_draft(TARGET, [states], folder, settings, watching, stop_after=stop_after)
    return folder


def saved(folder):
    """Every checkpoint's bytes, by name, and the model's."""
    files = [*(folder / "checkpoints").glob("*"), folder / "model" / "model.safetensors"]
    return {path.name: path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def batch(states) -> Batch:
    files = [state_shards(states).path(0)]
    corpus = data.open_corpus(files, (2,), 64, ahead=1)
    (rows, *_) = data.training_batches(corpus, sequence_length=64, rows=2, seed=0)[:1]
    return jax.tree.map(jnp.asarray, Batch(**rows))


@pytest.fixture(scope="module")
def learned(states, tmp_path_factory):
    watching = Watching(log_every=40, eval_every=120, checkpoint_every=120)
    folder = tmp_path_factory.mktemp("draft") / "run"
    return run(states, folder, watching=watching, steps=120, warmup=10)


def test_every_step_looks_at_the_frequent_tokens_and_some_others_in_turn():
    loss = DraftLoss(dataclasses.replace(STUDENT, vocab_size=10), frequent=4, others=2)
    rows = [loss.looked_at(jnp.int32(step))[0].tolist() for step in range(4)]
    assert rows == [[0, 1, 2, 3, *pair] for pair in ([4, 5], [6, 7], [8, 9], [4, 5])]
    assert loss.looked_at(jnp.int32(1))[1].tolist() == [1, 1, 1, 1, 3, 3]
    rows, copies = loss.measured().looked_at(jnp.int32(1))
    assert (rows.tolist(), copies) == (list(range(10)), None)


def test_the_first_and_the_last_token_of_an_answer_are_learned(states, tmp_path):
    run, _ = begin(TARGET, [states], tmp_path / "run", SETTINGS, OFTEN, None)
    assert run.corpus.ahead == 1
    piece = data.Piece(0, 0, 5, 0, prompt=2)
    assert data.wanted(piece, ahead=1).tolist() == [False, True, True, True, False]


def test_rows_of_the_frozen_head_stand_in_the_order_of_their_tokens():
    frozen = draft_frozen(TARGET.params, np.array([3, 60, 7]))
    assert frozen.tokens[:5].tolist() == [3, 60, 7, 0, 1]
    assert frozen.tokens[frozen.rank].tolist() == list(range(V))
    np.testing.assert_array_equal(frozen.lm_head[1], TARGET.params.lm_head[60])


def test_principal_directions_keep_what_few_numbers_can():
    """All directions keep every product; one is enough where rows are multiples of another."""
    embed = TARGET.params.embed
    whole = principal(embed, CONFIG.hidden_size)
    np.testing.assert_allclose(whole @ whole.T, embed @ embed.T, rtol=1e-3, atol=1e-3)
    line = jnp.arange(1.0, 6)[:, None] * jnp.array([3.0, 0, 4, 0])
    narrow = principal(line, 1)
    np.testing.assert_allclose(jnp.abs(narrow[:, 0]), 2.5 * jnp.arange(1.0, 6), rtol=1e-6)


def test_a_student_that_is_the_target_has_nothing_to_learn(batch):
    """Its cross entropy is the entropy of the target's law, its gradient nothing."""
    loss = DraftLoss(CONFIG, V, 0, dtype="float32").measured()
    frozen = draft_frozen(TARGET.params, np.arange(V))
    hidden = {2: streams(TARGET.params, CONFIG, batch)[-1]}
    final = rms_norm(hidden[2], TARGET.params.final_norm, CONFIG.rms_norm_eps)
    logs = jax.nn.log_softmax(final @ TARGET.params.lm_head.T)
    same = batch._replace(hidden={2: final}, best=logs.argmax(-1).astype(jnp.int32))
    (total, sums), gradient = jax.value_and_grad(loss.loss, has_aux=True)(
        TARGET.params, frozen, same, jnp.int32(0)
    )
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)[batch.wanted].mean()
    assert float(total) == pytest.approx(float(entropy), rel=1e-4)
    assert sums.means()["agreement"] == [1.0]
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) < 1e-3


def test_the_forward_pass_is_the_engines(batch):
    """On packed rows as on each text by itself."""
    final = streams(TARGET.params, CONFIG, batch)[-1]
    final = rms_norm(final, TARGET.params.final_norm, CONFIG.rms_norm_eps)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        place = np.flatnonzero(np.asarray(batch.segments[row]) == segment)
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(place)] = batch.tokens[row, place]
        _, hidden = tiny.uncached(llama(CONFIG), TARGET.params, tokens)
        ours, theirs = final[row, place], hidden[-1][0, : len(place)]
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def test_gradient_reaches_every_leaf(batch):
    params = new_draft(STUDENT, TARGET.params, 0)
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    loss = DraftLoss(STUDENT, 40, 7, dtype="float32")
    frozen = draft_frozen(TARGET.params, np.arange(40))
    gradient, _ = jax.grad(loss.loss, has_aux=True)(params, frozen, batch, jnp.int32(0))
    dead = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(gradient)
        if not np.abs(leaf).max() > 1e-7
    ]
    assert dead == []
    assert jax.tree.structure(gradient) == jax.tree.structure(params)


def test_a_training_that_was_stopped_ends_with_the_same_bytes(states, tmp_path):
    unbroken = run(states, tmp_path / "unbroken")
    folder = run(states, tmp_path / "run", stop_after=7)
    (folder / "checkpoints" / ".00012.safetensors.partial").write_bytes(b"half")
    jax.clear_caches()
    run(states, folder)
    assert {"00010.safetensors", "00012.safetensors"} <= saved(unbroken).keys()
    (folder / "checkpoints" / ".00012.safetensors.partial").unlink(missing_ok=True)
    assert saved(folder) == saved(unbroken)


def test_devices_share_a_batch(states, tmp_path):
    """Equal to one device up to the rounding of sums."""
    watching = dataclasses.replace(OFTEN, data_parallel=2)
    folder = run(states, tmp_path / "run", stop_after=5, watching=watching)
    alone = run(states, tmp_path / "alone", stop_after=5)
    assert_nearly_equal(folder, alone, "00005.safetensors")


def test_a_draft_model_learns(learned):
    """Over the whole vocabulary, on what is held out: better than at the start of the log."""
    lines = metrics_of(learned)
    first, *_, last = [line for line in lines if "logit_loss" in line]
    assert last["logit_loss"][0] < 0.8 * first["logit_loss"][0]
    assert last["agreement"][0] > first["agreement"][0] + 0.2
    held_out = lines[-1]["held_out"]
    assert held_out["agreement"][0] > 0.5
    assert held_out["length"] == pytest.approx(1 + held_out["agreement"][0])


def test_what_is_saved_is_what_was_trained(learned, batch):
    """Read back by the loader, run by the engine's forward pass."""
    config, params = checkpoints.load_weights(
        learned / "model", dtype="float32", cache_dir=learned / "cache"
    )
    assert config == STUDENT
    like = init_state(new_draft(STUDENT, TARGET.params, 0), make_optimiser(1e-2, warmup=1, steps=9))
    expected = Checkpoints(learned / "checkpoints").load(120, like).trained
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    final = streams(expected, STUDENT, batch)[-1]
    final = rms_norm(final, expected.final_norm, STUDENT.rms_norm_eps)
    first = int((np.asarray(batch.segments[0]) == 1).sum())
    logits, _ = tiny.uncached(llama(config), params, np.asarray(batch.tokens[:1]))
    np.testing.assert_allclose(
        logits[0, :first], (final @ expected.embed.T)[0, :first], rtol=1e-3, atol=1e-3
    )


def test_the_engine_accepts_what_it_learned(learned):
    llm = jspec.LLM(
        llama(CONFIG),
        params=TARGET.params,
        drafter=learned / "model",
        num_speculative_tokens=2,
        dtype="float32",
        batch_sizes=(4,),
        block_widths=(3,),
    )
    found = evaluate(llm, [[i, i + 7, i + 14] for i in range(4)], 16)
    assert llm.drafter.name == "model"
    assert min(found.per_position) > 0.4


def test_it_can_verify_in_a_cascade(learned):
    """Without a tokenizer, as it can draft."""
    drafter = f"cascade(ngram, {learned / 'model'})"
    llm = jspec.LLM(llama(CONFIG), params=TARGET.params, drafter=drafter, dtype="float32")
    assert isinstance(llm.drafter, Cascade)
    assert isinstance(llm.drafter.verifier, ModelVerifier)
    assert llm.drafter.verifier.name == "model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 62}, "a draft vocabulary of 62: the target has 61 tokens"),
        ({"hidden_size": 64}, "hidden_size is 64: the target has 32"),
    ],
)
def test_what_does_not_fit_the_target_is_said(states, tmp_path, changes, message):
    with pytest.raises(JspecError, match=message):
        run(states, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "3 heads and 1 kv_heads at hidden_size 16"),
        ({"kv_heads": 3}, "2 heads and 3 kv_heads"),
        ({"others": 0}, "others is 0: it must be at least 1"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(JspecError, match=message):
        dataclasses.replace(SETTINGS, **changes)
