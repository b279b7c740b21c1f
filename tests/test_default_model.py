"""The default model from end to end, against transformers' own text."""

import dataclasses

import pytest
from golden.load import smollm2_cases

import checkpoints
import jspec
from checkpoints import DEFAULT_MODEL
from jspec.drafters.draft_model import DraftModel
from jspec.model import llama

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


def test_special_tokens_show_when_asked_for(llm):
    question = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
    shown = {
        (skip, include): llm.chat(
            question,
            jspec.SamplingParams(
                temperature=0.0,
                max_tokens=60,
                skip_special_tokens=skip,
                include_stop_str_in_output=include,
            ),
        )[0].text
        for skip in (True, False)
        for include in (True, False)
    }
    plain = shown[True, False]
    assert shown[True, True] == shown[False, False] == plain
    assert shown[False, True] == plain + "<|im_end|>"


def test_a_stop_string_of_several_tokens(llm):
    case = smollm2_cases()[0]
    whole = llm.generate([case.token_ids.tolist()], FORCED)[0].text
    stop = whole[60:72]
    settings = dataclasses.replace(FORCED, stop=stop)
    (out,) = llm.generate([case.token_ids.tolist()], settings)
    assert out.text == whole[: whole.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.token_ids == case.greedy_ids[: len(out.token_ids)].tolist()
    assert stop in llm.tokenizer.decode(out.token_ids)
    assert stop not in llm.tokenizer.decode(out.token_ids[:-1])


TOPICS = (
    "a lighthouse keeper",
    "the history of bread",
    "why the sky is blue",
    "how to repair a bicycle",
    "a quarrel between two neighbours",
    "prime numbers",
    "a city on the moon",
    "the rules of chess",
)


def test_ten_thousand_greedy_tokens_are_those_of_plain_decoding():
    """In bfloat16, 16 rows of 640 tokens, drafted by n-grams and by the model's own first ten
    layers: no token differs from plain decoding at the same shape."""
    loaded = checkpoints.load(DEFAULT_MODEL, dtype="bfloat16")
    shallow = llama(dataclasses.replace(loaded.config, num_hidden_layers=10))
    drafters = {
        "none": {"drafter": "none"},
        "ngram": {"drafter": "ngram"},
        "draft model": {
            "drafter": DraftModel(shallow, loaded.config.vocab_size, 3),
            "drafter_params": loaded.params.replace(layers=loaded.params.layers[:10]),
        },
    }
    prompts = [f"{start} {topic}" for topic in TOPICS for start in ("A story about", "Facts on")]
    settings = jspec.SamplingParams(temperature=0.0, max_tokens=640, ignore_eos=True)
    texts = {}
    for name, drafter in drafters.items():
        llm = jspec.LLM(
            llama(loaded.config),
            params=loaded.params,
            tokenizer=loaded.tokenizer,
            num_speculative_tokens=3,
            batch_sizes=(16,),
            block_widths=(4,),
            max_num_seqs=16,
            **drafter,
        )
        outs = llm.generate(prompts, settings)
        texts[name] = [out.token_ids for out in outs]
        accepted = sum(out.metrics.num_accepted for out in outs)
        assert accepted > 500 or name == "none"
    assert sum(map(len, texts["none"])) == 10_240
    assert texts["ngram"] == texts["none"]
    assert texts["draft model"] == texts["none"]
