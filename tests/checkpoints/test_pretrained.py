"""The heads, exits and the draft model that come with the package."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import jspec
from checkpoints.sources import PRETRAINED, shipped_path
from jspec import benchmark
from jspec.config import DEFAULT_MODEL
from jspec.model import llama

SHIPPED = sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))
DRAFT, EAGLE3, EXITS, MTP = (
    f"{DEFAULT_MODEL}-{kind}" for kind in ("draft", "eagle3", "exits", "mtp")
)
HEADS = (EAGLE3, MTP)
DRAFTERS = {  # and how many of their first two drafts they get right at least, of four prompts
    EAGLE3: 0.2,
    MTP: 0.2,
    DRAFT: 0.1,
    "early_exit:2": 0.1,
    "early_exit:24": 0.3,
    f"early_exit(24, exits={EXITS})": 0.3,
}


def test_what_comes_with_the_package_is_on_its_card():
    assert [DRAFT, EAGLE3, EXITS, MTP] == SHIPPED
    card = (PRETRAINED / "README.md").read_text()
    assert all(f"`{name}`" in card for name in SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_is_small_and_named(name):
    files = list((PRETRAINED / name).iterdir())
    assert sorted(file.name for file in files) == ["config.json", "model.safetensors"]
    assert sum(file.stat().st_size for file in files) <= 16e6
    assert checkpoints.is_head(name) == (name != DRAFT)
    assert shipped_path(name) == PRETRAINED / name


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    name = HEADS[0]
    shutil.copytree(PRETRAINED / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert shipped_path(name).absolute() == tmp_path / name
    assert not checkpoints.is_head(f"{name}-2")
    assert not checkpoints.is_head(f"./no/{name}")


@pytest.fixture(scope="module")
def plain():
    return jspec.LLM(DEFAULT_MODEL, drafter="none", dtype="float32")


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_drafts_for_the_default_model(name, plain):
    """What it says is accepted as often as its model card has it, within what four prompts can
    tell; what is wired wrong says nothing that is."""
    engine = jspec.LLM(
        plain,
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
    assert accepted / drafted > DRAFTERS[name]


def test_what_is_the_targets_is_not_copied(plain):
    """The embedding of a head, the weights below an exit."""
    head = jspec.LLM(plain, drafter=MTP, dtype="float32").params[1]
    assert head.embed is plain.params[0].embed
    single = jspec.LLM(plain, drafter="early_exit(2, k=1)", dtype="float32")
    assert single.params[1][0] is plain.params[0]
    cascade = jspec.LLM(plain, drafter="cascade(early_exit:2, early_exit:6)", dtype="float32")
    (_, below), (_, above) = cascade.params[1]
    assert below.lm_head is above.lm_head
    exits = sum(leaf.nbytes for leaf in (above.norm, above.block, above.bias))
    assert cascade.resident_bytes() - single.resident_bytes() == exits


def test_exits_by_a_wrong_name(plain):
    with pytest.raises(jspec.JspecError, match="there are exits at 2, 4, 6, 8, 10"):
        jspec.LLM(plain, drafter=f"early_exit(3, exits={EXITS})", dtype="float32")
    with pytest.raises(jspec.JspecError, match="it is a head, not exits"):
        jspec.LLM(plain, drafter=f"early_exit(3, exits={MTP})", dtype="float32")
    with pytest.raises(jspec.JspecError, match="say which is meant, as early_exit"):
        jspec.LLM(plain, drafter=EXITS, dtype="float32")


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
