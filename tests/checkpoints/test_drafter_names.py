"""Drafters by name, as users write them: what is meant, and what is refused."""

import dataclasses

import jax
import pytest
from checkpoint_files import hf_config, hf_tensors, write_hf
from tiny import CONFIG, llama_params, markov, trained_head

import checkpoints
import jspec
from jspec import JspecError, SamplingParams
from jspec.drafter_names import Call, parse
from jspec.drafters.cascade import Cascade
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.first_of import FirstOf
from jspec.drafters.head_verifier import HeadVerifier
from jspec.drafters.ngram import NgramDrafter
from jspec.model import llama

L = 4
DEEP = dataclasses.replace(CONFIG, num_hidden_layers=L)
PARAMS = llama_params(0, config=DEEP)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


def llm(drafter, **settings):
    settings = {"dtype": "float32", "max_num_seqs": 2, "batch_sizes": (2,)} | settings
    return jspec.LLM(llama(DEEP), params=PARAMS, drafter=drafter, **settings)


def test_parsing():
    inner = Call("early_exit", ("4",), (("k", "2"),))
    assert parse("ngram:2") == ("ngram:2",)
    assert parse(" ngram , /a/b c ") == ("ngram", "/a/b c")
    assert parse("cascade(early_exit(4, k=2), early_exit:8, window=3)") == (
        Call("cascade", (inner, "early_exit:8"), (("window", "3"),)),
    )
    assert parse("f(g(h(a),b),c),d") == (
        Call("f", (Call("g", (Call("h", ("a",)), "b")), "c")),
        "d",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cascade(a, b", "a parenthesis is not closed"),
        ("cascade)a(", "a parenthesis is closed that was not opened"),
        ("cascade(a, b)x", "something stands behind the last parenthesis"),
        ("ngram,,none", "nothing stands before or behind a comma"),
        ("", "nothing stands before or behind a comma"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(JspecError, match=message):
        parse(text)


def test_exits_and_cascades_by_name():
    single = llm("early_exit(2, k=3)").drafter
    assert isinstance(single, EarlyExit)
    assert (single.layer, single.num_speculative_tokens) == (2, 3)
    nested = llm("cascade(cascade(early_exit:1, early_exit:2, window=2), early_exit:3)").drafter
    assert isinstance(nested, Cascade)
    assert (nested.window, nested.verifier.num_shared) == (4, 3)
    inner = nested.drafter
    assert isinstance(inner, Cascade)
    assert (inner.window, inner.drafter.layer, inner.verifier.num_shared) == (2, 1, 2)
    assert (inner.lenience, inner.name) == (1, "cascade(early_exit:1, early_exit:2, window=2)")
    lenient = llm("cascade(ngram(k=2), early_exit:2, window=1, lenience=0.1)").drafter
    assert isinstance(lenient, Cascade)
    assert lenient.lenience == 0.1
    assert lenient.name == "cascade(ngram, early_exit:2, window=1, lenience=0.1)"
    both = llm("ngram(2, k=5),none").drafter
    assert isinstance(both, FirstOf)
    assert both.drafters[0] == NgramDrafter(5, 2)


@pytest.mark.parametrize(
    "drafter",
    ["early_exit:2", "cascade(early_exit:1, early_exit:3, window=2)", "cascade(ngram, HEAD)"],
)
def test_the_text_is_that_of_plain_decoding(drafter, head):
    params = SamplingParams(max_tokens=20, temperature=0.0)
    engine = llm(drafter.replace("HEAD", f"mtp:{head}"), block_widths=(12,))
    plain = llm("none", block_widths=(12,)).generate(PROMPTS, params)
    texts = engine.generate(PROMPTS, params)
    assert [x.token_ids for x in texts] == [x.token_ids for x in plain]
    assert sum(x.metrics.num_drafted for x in texts) > 0


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    config, params = trained_head("mtp", 48)
    folder = tmp_path_factory.mktemp("heads") / "mtp"
    checkpoints.save_head(folder, config, params, shares_lm_head=False)
    return folder


def test_a_head_by_its_family(head):
    assert llm(f"mtp:{head}").drafter.config.family == "mtp"
    cascade = llm(f"cascade(ngram, mtp:{head})").drafter
    assert isinstance(cascade, Cascade)
    assert isinstance(cascade.verifier, HeadVerifier)
    with pytest.raises(JspecError, match=f"eagle3:{head}: this head is of the family mtp"):
        llm(f"eagle3:{head}")


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("early_exit:4", "the model has 4 layers, so an exit is behind 1 to 3 of them"),
        ("early_exit:0", "so an exit is behind 1 to 3 of them"),
        ("early_exit", "early_exit: it takes 1 in parentheses, not 0"),
        ("early_exit:x", "early_exit: LAYER=x: give a whole number"),
        ("early_exit(2, depth=3)", "early_exit: it has no option 'depth'"),
        ("early_exit(2, k=0)", "num_speculative_tokens=0: must be at least 1"),
        ("early_exit(2, k=many)", "early_exit: k=many: give a whole number"),
        ("ngram:two", "ngram: MATCH=two: give a whole number"),
        ("none:1", "none: it takes 0 in parentheses, not 1"),
        ("cascade(early_exit:3, early_exit:2)", "early_exit:2 cannot check what early_exit:3 dr"),
        ("cascade(early_exit:2, early_exit:2)", "early_exit:2 cannot check what early_exit:2 dr"),
        ("cascade(ngram, early_exit:4)", "the model has 4, so it can be behind 1 to 3"),
        ("cascade(ngram, early_exit:2, window=0)", "window=0 must be at least 1"),
        ("cascade(ngram, early_exit:2, window=x)", "window=x: give a whole number"),
        ("cascade(ngram, early_exit:2, lenience=0)", "lenience=0.0 must be above 0"),
        ("cascade(ngram, early_exit:2, lenience=2)", "lenience=2: give a probability"),
        ("cascade(ngram)", "write cascade(DRAFTER, VERIFIER, window=4, lenience=1)"),
        ("cascade(ngram, none)", "cascade: none does not verify"),
        ("ngram,early_exit:2", "use cascade(FIRST, early_exit:N) in place of"),
        ("hispec(ngram, none)", "drafter hispec(...) is not known; there are"),
    ],
)
def test_what_is_refused(drafter, message):
    with pytest.raises(JspecError) as error:
        llm(drafter).generate([[1, 2]], SamplingParams(max_tokens=2))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cascade_over_two_vocabularies(tmp_path):
    settings = hf_config(vocab_size=700)
    write_hf(tmp_path / "other", settings, hf_tensors(settings))
    with pytest.raises(JspecError, match="another vocabulary"):
        llm(f"cascade(ngram, {tmp_path / 'other'})")


def test_a_target_without_layers():
    for drafter in ("early_exit:1", "cascade(ngram, early_exit:1)"):
        with pytest.raises(JspecError, match="for models of the Llama family"):
            jspec.LLM(markov(9), params=jax.numpy.zeros((9, 9)), dtype="float32", drafter=drafter)


def test_engines_share_weights():
    first = llm("none")
    second = jspec.LLM(first, drafter="early_exit:2", dtype="float32")
    assert second.params[0] is first.params[0]
    assert second.resident_bytes() == first.resident_bytes()  # an exit keeps nothing
    assert llm("cascade(early_exit:1, early_exit:2)").resident_bytes() == first.resident_bytes()
    assert llm("cascade(ngram, early_exit:2)").resident_bytes() == first.resident_bytes()
    small = jspec.LLM(llama(CONFIG), params=llama_params(1), dtype="float32", drafter="none")
    assert small.resident_bytes() < first.resident_bytes()
