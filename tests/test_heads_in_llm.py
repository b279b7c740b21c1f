"""Heads from files as drafters of `LLM`: what a user names, and what is refused."""

import dataclasses

import pytest
from tiny import CONFIG, TARGET, llama_params, markov, medusa_params, trained_head

import checkpoints
import jspec
from jspec import DynamicTree, JspecError, SamplingParams, StaticTree
from jspec.head_params import MedusaConfig
from jspec.model import llama

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Heads in the public layouts, by family."""
    root = tmp_path_factory.mktemp("heads")
    for family, size in (("mtp", 48), ("eagle3", 48)):
        config, params = trained_head(family, size)
        checkpoints.save_head(root / family, config, params, shares_lm_head=False)
    medusa = MedusaConfig(3, CONFIG.hidden_size, CONFIG.vocab_size, CONFIG.vocab_size)
    checkpoints.save_head(root / "medusa", medusa, medusa_params(medusa, 1))
    return root


def llm(drafter, **settings):
    settings = {"dtype": "float32", "max_num_seqs": 2, "batch_sizes": (2,)} | settings
    return jspec.LLM(TARGET, params=llama_params(0), drafter=drafter, **settings)


def texts(engine):
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0))
    return [output.token_ids for output in outputs], [output.metrics for output in outputs]


@pytest.fixture(scope="module")
def plain():
    return texts(llm("none"))[0]


CASES = {  # family, settings, and how deep they draft
    "mtp": ("mtp", {"num_speculative_tokens": 3}, 3),
    "eagle3 by default": ("eagle3", {}, 4),
    "mtp, dynamic tree": ("mtp", {"tree": DynamicTree(3, 2, 7)}, 3),
    "eagle3, static tree": ("eagle3", {"tree": StaticTree(((0,), (1,), (0, 0)))}, 2),
    "medusa by default": ("medusa", {}, 3),
    "medusa, two levels": ("medusa", {"num_speculative_tokens": 2}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_of_plain_decoding(case, folders, plain):
    family, settings, depth = CASES[case]
    engine = llm(folders / family, **settings)
    found, metrics = texts(engine)
    assert found == plain
    assert engine.drafter.name == family
    accepted = sum(m.num_accepted for m in metrics)
    assert accepted > 0 or family == "medusa"  # whose heads are random
    assert engine.drafter.num_speculative_tokens == depth


def test_several_in_order_of_preference(folders, plain):
    engine = llm(f"ngram:2,{folders / 'mtp'}", num_speculative_tokens=4)
    assert engine.drafter.drafters[0].min_match == 2
    found, metrics = texts(engine)
    assert found == plain
    assert engine.drafter.name == "ngram,mtp"
    assert all(m.num_accepted > 0 for m in metrics)


def test_a_head_shares_the_targets_embedding(folders):
    engine = llm(folders / "eagle3")
    assert engine.params[1].embed is engine.params[0].embed


def test_a_tree_needs_a_head():
    with pytest.raises(JspecError, match="'ngram' drafts chains: a tree needs a trained head"):
        llm("ngram", tree=DynamicTree(2, 2, 4))


def test_a_tree_of_another_depth(folders):
    with pytest.raises(JspecError, match="a tree of depth 2 with num_speculative_tokens=3"):
        llm(folders / "mtp", tree=DynamicTree(2, 2, 4), num_speculative_tokens=3)


def test_a_tree_larger_than_the_compiled_width(folders):
    with pytest.raises(JspecError, match=r"block widths \(2, 5\): .* at least 8, for the 7 tokens"):
        llm(folders / "mtp", tree=DynamicTree(3, 2, 7), block_widths=(2, 5))


def test_a_tree_deeper_than_medusa_has_heads(folders):
    with pytest.raises(JspecError, match=r"a tree of depth 4: .* has 3 heads"):
        llm(folders / "medusa", tree=DynamicTree(4, 2, 6))


def test_a_head_for_another_width(folders):
    other = dataclasses.replace(CONFIG, hidden_size=48, num_attention_heads=6)
    target = llama(other)
    with pytest.raises(JspecError, match=r"head is for a target of width 32, .* is 48"):
        jspec.LLM(
            target,
            params=llama_params(0, config=other),
            drafter=folders / "mtp",
            dtype="float32",
        )


def test_a_target_without_hidden_states_that_a_head_could_read(folders):
    with pytest.raises(JspecError, match="is for models of the Llama family"):
        jspec.LLM(markov(61), params=llama_params(0).embed, drafter=folders / "mtp")


def test_a_damaged_head(folders, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders / "mtp" / name).read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(JspecError, match=r"model\.safetensors"):
        llm(tmp_path)
