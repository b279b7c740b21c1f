"""The heads that come with the package."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import jspec
from checkpoints.heads_source import PRETRAINED, head_path
from jspec import benchmark
from jspec.config import DEFAULT_MODEL
from jspec.model import llama

HEADS = sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))


def test_there_is_an_mtp_head_and_an_eagle3_head():
    assert [name.removeprefix(DEFAULT_MODEL) for name in HEADS] == ["-eagle3", "-mtp"]
    card = (PRETRAINED / "README.md").read_text()
    assert all(f"`{name}`" in card for name in HEADS)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_small_and_named(name):
    files = list((PRETRAINED / name).iterdir())
    assert sorted(file.name for file in files) == ["config.json", "model.safetensors"]
    assert sum(file.stat().st_size for file in files) <= 16e6
    assert checkpoints.is_head(name)
    assert head_path(name) == PRETRAINED / name


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    name = HEADS[0]
    shutil.copytree(PRETRAINED / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert head_path(name).absolute() == tmp_path / name
    assert not checkpoints.is_head(f"{name}-2")
    assert not checkpoints.is_head(f"./no/{name}")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_for_the_default_model(name, default_model):
    """What it says is accepted as often as its model card has it, within what eight prompts can
    tell; a head that is wired wrong says nothing that is."""
    engine = jspec.LLM(
        llama(default_model.config),
        params=default_model.params,
        tokenizer=default_model.tokenizer,
        drafter=name,
        num_speculative_tokens=2,
        dtype="float32",
        batch_sizes=(4,),
        max_num_seqs=4,
    )
    asked = [
        [{"role": "user", "content": text}]
        for text in (
            "What is the capital of France?",
            "Write a short poem about the sea.",
            "Explain what photosynthesis is.",
            "Give three tips for sleeping well.",
        )
    ]
    outputs = engine.chat(asked, jspec.SamplingParams(max_tokens=48, temperature=0.0))
    drafted = sum(output.metrics.num_drafted for output in outputs)
    accepted = sum(output.metrics.num_accepted for output in outputs)
    assert accepted / drafted > 0.2
    embed = engine.params[1].embed
    assert embed is engine.params[0].embed


@pytest.mark.parametrize("name", HEADS)
def test_weights_are_bfloat16_numbers(name, default_model):
    _, head = checkpoints.load_head(
        name,
        target_config=default_model.config,
        target_params=default_model.params,
        dtype="bfloat16",
    )
    assert head.fc.dtype == jnp.bfloat16
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in (head.fc, head.lm_head))
    settings = json.loads((PRETRAINED / name / "config.json").read_text())
    assert settings["jspec"]["draft_vocab_size"] == len(head.token_ids)


def test_the_default_model_drafts_with_a_head_and_others_with_ngrams(default_model):
    target = llama(default_model.config), default_model.params
    assert jspec.LLM(target[0], params=target[1], dtype="float32").drafter.name == "ngram"
    drafter = jspec.LLM(DEFAULT_MODEL, dtype="float32").drafter
    assert drafter.name == f"ngram,{DEFAULT_MODEL}-mtp"
    assert drafter.num_draft_nodes > drafter.drafters[1].num_speculative_tokens  # a tree
    assert drafter.drafters[0].num_speculative_tokens == drafter.num_draft_nodes  # room is used
    chain = jspec.LLM(DEFAULT_MODEL, dtype="float32", num_speculative_tokens=2).drafter
    assert chain.num_draft_nodes == 2


def test_the_bench_means_the_same_by_auto():
    settings = benchmark.Settings("prompts.jsonl", DEFAULT_MODEL, ("auto",), dtype="float32")
    engines = benchmark.load_engines(settings, lambda label, done, total: None)
    assert engines["auto"].drafter == jspec.LLM(DEFAULT_MODEL, dtype="float32").drafter
