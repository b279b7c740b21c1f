"""Whole trainings of tiny heads: they learn, repeat, resume, and share a batch over devices."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from tiny_training import (
    CONFIG,
    QUICK,
    TARGET,
    assert_nearly_equal,
    make_states,
    metrics_of,
    silent,
    write_text_shards,
)

import checkpoints
import jspec
from jspec.errors import JspecError
from jspec.model import llama
from jspec.train.evaluate import evaluate
from jspec.train.new_head import head_config
from jspec.train.saved import Checkpoints
from jspec.train.settings import Settings, Watching
from jspec.train.states import write_states
from jspec.train.trainer import train

OFTEN = Watching(log_every=4, eval_every=6, checkpoint_every=5)


def run(states, folder, watching=OFTEN, **changes):
    stop_after = changes.pop("stop_after", None)
    settings = dataclasses.replace(QUICK, **changes)
    train(TARGET, [states], folder, settings, watching, stop_after=stop_after)
    return folder


def saved(folder):
    """Every checkpoint's bytes, by name."""
    return {p.name: p.read_bytes() for p in (folder / "checkpoints").glob("*.safetensors")}


@pytest.fixture(scope="module")
def unbroken(states, tmp_path_factory):
    return run(states, tmp_path_factory.mktemp("unbroken") / "run")


def test_the_same_settings_give_the_same_bytes(states, unbroken, tmp_path):
    again = run(states, tmp_path / "again")
    assert saved(again) == saved(unbroken)
    assert saved(run(states, tmp_path / "other", seed=1)) != saved(unbroken)
    assert saved(run(states, tmp_path / "more", prompts_too=True)) != saved(unbroken)


def test_states_of_several_folders(states, unbroken, tmp_path):
    """As one folder with all of their shards; a run keeps to the folders it began with."""
    settings = json.loads((states / "settings.json").read_text())
    halves = [tmp_path / "a", tmp_path / "b"]
    for folder in halves:
        folder.mkdir()
        (folder / "settings.json").write_text(json.dumps(settings))
    files = sorted(states.glob("*.safetensors"))
    for i, file in enumerate(files):
        shutil.copy(file, halves[int(i >= len(files) // 2)])
    train(TARGET, halves, tmp_path / "run", QUICK, OFTEN)
    assert saved(tmp_path / "run") == saved(unbroken)
    with pytest.raises(JspecError, match="run: was begun with 2 folders of states, not 1; give"):
        train(TARGET, [states], tmp_path / "run", QUICK, OFTEN)


@pytest.mark.parametrize("stop", [7, 11])
def test_a_training_that_was_stopped_ends_with_the_same_bytes(states, unbroken, tmp_path, stop):
    """What is in the folder after a kill: whole files up to the last checkpoint, metrics beyond
    it, a partial file."""
    folder = run(states, tmp_path / "run", stop_after=stop)
    (folder / "checkpoints" / ".00012.safetensors.partial").write_bytes(b"half")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9999, "to')
    jax.clear_caches()
    run(states, folder)
    assert saved(folder) == saved(unbroken)
    assert _timeless(metrics_of(folder)) == _timeless(metrics_of(unbroken))
    weights = "head/model.safetensors"
    assert (folder / weights).read_bytes() == (unbroken / weights).read_bytes()


def _timeless(lines):
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def test_a_damaged_checkpoint_is_passed_over(states, unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    path = folder / "checkpoints" / "00012.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    said = []
    run(states, folder, dataclasses.replace(OFTEN, report=said.append))
    assert len(said) == 1
    assert "00012.safetensors: truncated or damaged" in said[0]
    assert saved(folder) == saved(unbroken)


def test_what_a_folder_holds(unbroken):
    lines = metrics_of(unbroken)
    assert [(x["step"], "held_out" in x) for x in lines] == [
        *((4, False), (5, False), (6, False), (6, True), (8, False)),
        *((10, False), (12, False), (12, True)),
    ]
    assert (unbroken / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines[0]["agreement"]) == QUICK.unroll
    assert json.loads((unbroken / "settings.json").read_text())["shards"] == [[0, 1, 2]]
    assert {"00010.safetensors", "00012.safetensors"} <= saved(unbroken).keys()


def test_the_last_two_and_the_best_are_kept(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    state = {"a": np.arange(3, dtype=np.float32), "b": np.int32(4)}
    for step in (1, 2, 3, 4):
        kept.save(step, state, best=1)
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == ["00001.safetensors", "00003.safetensors", "00004.safetensors"]
    loaded = kept.load(4, state)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["b"].shape == ()
    with pytest.raises(JspecError, match="not of the training's shape"):
        kept.load(4, {**state, "a": np.zeros(4, np.float32)})
    with pytest.raises(JspecError, match="'b' is in only one"):
        kept.load(4, {"a": state["a"]})


def test_new_states_are_left_to_new_trainings(tmp_path):
    folder = make_states(tmp_path)
    text = write_text_shards(tmp_path / "text", 1, first=3)
    run(folder, tmp_path / "run", stop_after=5)
    write_states(TARGET, text, folder, taps=(0, 1, 2), progress=silent)
    run(folder, tmp_path / "run", stop_after=7)
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["shards"] == [[0, 1, 2]]


def learn(states, root, family, norms):
    folder = run(
        states,
        root / "run",
        Watching(log_every=30, eval_every=150, checkpoint_every=150),
        family=family,
        norms=norms,
        steps=150,
        learning_rate=1e-2,
        warmup=10,
        draft_vocab_size=61,
    )
    head = checkpoints.load_head(
        folder / "head", target_config=CONFIG, target_params=TARGET.params, dtype="float32"
    )
    assert head.config == head_config(
        family, CONFIG, draft_vocab_size=61, norms=norms, num_heads=QUICK.unroll
    )
    return folder


@pytest.fixture(scope="module")
def learned(states, tmp_path_factory):
    """A head of each family, made when it is first asked for."""
    return functools.cache(lambda *kind: learn(states, tmp_path_factory.mktemp("head"), *kind))


@pytest.mark.parametrize(
    ("family", "norms", "agreement"),
    [("mtp", True, 0.8), ("mtp", False, 0.8), ("eagle3", True, 0.8), ("medusa", True, 0.5)],
)
def test_heads_learn_what_is_certain(learned, family, norms, agreement):
    """On what is held out as well, and what is exported can be loaded. Medusa's first head does
    not see the token that was drawn, so it learns less."""
    lines = metrics_of(learned(family, norms))
    first, *_, last = [x for x in lines if "agreement" in x]
    assert last["logit_loss"][0] < 0.8 * first["logit_loss"][0]
    assert last["agreement"][0] > agreement
    assert lines[-1]["held_out"]["agreement"][0] > agreement - 0.3


def test_the_engine_accepts_what_a_head_learned(learned):
    llm = jspec.LLM(
        llama(CONFIG),
        params=TARGET.params,
        drafter=learned("mtp", True) / "head",
        num_speculative_tokens=2,
        dtype="float32",
        batch_sizes=(4,),
        block_widths=(3,),
    )
    found = evaluate(llm, [[i, i + 7, i + 14] for i in range(4)], 16)
    assert found.num_prompts == 4
    assert len(found.per_position) == 2
    assert min(found.per_position) > 0.5


def test_evaluation_counts_what_the_engine_accepts():
    llm = jspec.LLM(
        llama(CONFIG), params=TARGET.params, drafter="ngram", dtype="float32", batch_sizes=(2,)
    )
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5]]
    found = evaluate(llm, prompts, 40)
    outputs = llm.generate(prompts, jspec.SamplingParams(temperature=0.0, max_tokens=40))
    metrics = outputs[0].metrics + outputs[1].metrics
    assert found.num_tokens == metrics.num_tokens
    assert found.per_position == metrics.acceptance_per_position
    assert found.mean_length == metrics.mean_acceptance_length
    with pytest.raises(JspecError, match="no prompts"):
        evaluate(llm, [], 4)


def test_the_engine_evaluates_on_the_way(states, tmp_path):
    seen = []

    def evaluator(folder):
        seen.append(checkpoints.is_head(folder))
        return {"acceptance": [0.5, 0.25], "length": 1.75}

    folder = run(states, tmp_path / "run", dataclasses.replace(OFTEN, evaluator=evaluator))
    assert seen == [True, True]
    assert metrics_of(folder)[-1]["engine"] == {"acceptance": [0.5, 0.25], "length": 1.75}


def test_devices_share_a_batch(states, unbroken, tmp_path):
    """Equal to one device up to the rounding of sums."""
    watching = dataclasses.replace(OFTEN, data_parallel=2)
    folder = run(states, tmp_path / "run", watching, stop_after=5)
    alone = run(states, tmp_path / "alone", stop_after=5)
    assert_nearly_equal(folder, alone, "00005.safetensors")


OTHER = TARGET._replace(name="other", params=tiny.llama_params(1))
WIDER = TARGET._replace(config=dataclasses.replace(CONFIG, hidden_size=64))


@pytest.mark.parametrize(
    ("target", "changes", "devices", "message"),
    [
        (OTHER, {}, 1, r"states of another model \(tiny\), not of other"),
        (WIDER, {}, 1, "states of a model of width 32, not of tiny, whose width is 64"),
        (TARGET, {"draft_vocab_size": 62}, 1, "a draft vocabulary of 62"),
        (TARGET, {"family": "eagle3"}, 1, "no states of tap 0"),
        (TARGET, {}, 3, "a mesh of 3 devices does not divide 2 rows"),
        (TARGET, {}, 9, "a mesh of 9 devices: there are 4"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, target, changes, devices, message):
    folder = make_states(tmp_path, num_shards=1, taps=(2,))
    settings = dataclasses.replace(QUICK, **changes)
    with pytest.raises(JspecError, match=message):
        train(target, [folder], tmp_path / "run", settings, Watching(data_parallel=devices))
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_used(states, unbroken, tmp_path):
    with pytest.raises(JspecError, match=r"begun with learning_rate=0\.003, not 0\.1"):
        run(states, unbroken, learning_rate=0.1)
    with pytest.raises(JspecError, match=r"no settings\.json in it"):
        run(tmp_path / "nowhere", tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(states / "settings.json", empty)
    with pytest.raises(JspecError, match="no states in it yet"):
        run(empty, tmp_path / "run")
    shutil.copy(states / "00000.safetensors", empty)
    (empty / "00000.safetensors").write_bytes(b"\x08")
    with pytest.raises(JspecError, match=r"00000\.safetensors: truncated or damaged"):
        run(empty, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 100, "sequence_length": 200}, "a batch of 100 tokens is smaller"),
        ({"steps": 0}, "steps is 0: it must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"hidden_loss": -1.0}, "hidden_loss is -1.0"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(JspecError, match=message):
        Settings(**changes)
    with pytest.raises(JspecError, match="eval_every is 0"):
        Watching(eval_every=0)
