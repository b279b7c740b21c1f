"""Contradictory or out-of-range sampling parameters are refused at the call, by name and value."""

import pytest
from test_parameters import PROMPTS, engine_of
from tiny import TARGET, llama_params

import jspec
from jspec import JspecError, SamplingParams


@pytest.fixture(scope="module")
def engine():
    return engine_of()


BAD = [
    ({"n": 0}, "n=0: must be at least 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
    ({"logit_bias": {3: float("inf")}}, r"logit_bias=\{3: inf\}: must map"),
    ({"logit_bias": [3]}, r"logit_bias=\[3\]"),
    ({"allowed_token_ids": []}, r"allowed_token_ids=\[\]: must hold at least one"),
    ({"bad_words": [""]}, r"bad_words=\[''\]"),
    ({"bad_words": "abc"}, "bad_words='abc': must be a list of texts"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: is above max_tokens=8"),
    ({"stop": ""}, r"stop=\('',\)"),
    ({"stop": ["a", ""]}, r"stop=\('a', ''\)"),
    ({"stop": [3]}, r"stop=\(3,\)"),
    ({"logprobs": -1}, "logprobs=-1"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5"),
    ({"logprobs_mode": "raw"}, "logprobs_mode='raw'"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"top_p": None}, "top_p=None"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=str)
def test_bad_values_are_refused_by_name(settings, message):
    with pytest.raises(JspecError, match=message):
        SamplingParams(**settings)


BAD_CALLS = [
    ({"logit_bias": {61: 1.0}}, r"logit_bias=\{61: 1.0\}: token id 61 is outside .* 61"),
    ({"allowed_token_ids": [60, 99]}, r"allowed_token_ids=\[60, 99\]: token id 99"),
    ({"stop_token_ids": [61]}, r"stop_token_ids=\[61\]: token id 61"),
    ({"logprobs": 6}, "logprobs=6: is above the engine's max_logprobs=5"),
    ({"prompt_logprobs": 6}, "prompt_logprobs=6"),
    ({"bad_words": ["a", "\u00e9t"]}, "bad_words: 'ét' cannot be written"),
    (
        {"allowed_token_ids": [0], "bad_words": ["a"]},
        r"allowed_token_ids=\[0\]: no token is left",
    ),
    (
        {"allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 1},
        r"allowed_token_ids=\[4\]: no token is left",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_CALLS, ids=str)
def test_values_that_do_not_suit_the_engine_are_refused_at_the_call(engine, settings, message):
    for call in (engine.generate, lambda prompt, p: engine.stream(prompt[0], p)):
        with pytest.raises(JspecError, match=message):
            call([PROMPTS[0]], SamplingParams(**settings))


def test_texts_need_a_tokenizer():
    bare = jspec.LLM(TARGET, params=llama_params(0), dtype="float32", drafter="none")
    for settings in ({"stop": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(JspecError, match="this model has no tokenizer"):
            bare.generate([[1]], SamplingParams(**settings))
