"""The default model from end to end, against transformers' own text."""

import pytest
from golden.load import smollm2_cases

import jspec
from checkpoints import DEFAULT_MODEL

FORCED = jspec.SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module", params=["ngram", "none"])
def llm(request, default_model):
    """In float32; `default_model` has fetched and converted it."""
    return jspec.LLM(DEFAULT_MODEL, dtype="float32", drafter=request.param, batch_sizes=[5])


def test_greedy_tokens_equal_those_of_transformers(llm):
    cases = smollm2_cases()
    outs = llm.generate([case.token_ids.tolist() for case in cases], FORCED)
    for case, out in zip(cases, outs, strict=True):
        assert out.token_ids == case.greedy_ids.tolist(), case.name
    if llm.drafter.name == "ngram":
        assert sum(out.metrics.num_accepted for out in outs) > 20


def test_the_tokenizer_reads_the_prompts_as_transformers_does(default_model):
    for case in smollm2_cases():
        ids = default_model.tokenizer.encode(case.text, add_special_tokens=False)
        assert ids == case.token_ids.tolist(), case.name


def test_chat_ends_with_an_end_token(llm):
    (out,) = llm.chat(
        [{"role": "user", "content": "What is 2+2? Answer with one number."}],
        jspec.SamplingParams(temperature=0.0, max_tokens=60),
    )
    assert out.finish_reason == "stop"
    assert out.token_ids[-1] in llm.model.eos_token_ids
    assert "4" in out.text
    assert "<|im_end|>" not in out.text
