"""Sampling parameters and stop rules, from `generate` down: what users of vLLM rely on."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from test_llm import LetterTokenizer
from tiny import CONFIG, TARGET, llama_params, markov, uncached

import jspec
from jspec import JspecError, SamplingParams
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.engine.text import OutputText, find_stop, length_of_possible_stop

V = CONFIG.vocab_size
PROMPTS = [[7, 8, 9, 7, 8], [3, 1, 4, 1, 5], [2], [5, 5, 5]]
NEAR = jax.tree.map(lambda a, b: a + 0.05 * b, llama_params(0), llama_params(1))
DRAFTERS = {
    "none": lambda dtype: (NoDrafter(), ()),
    "ngram": lambda dtype: (NgramDrafter(4), ()),
    "draft model": lambda dtype: (
        DraftModel(TARGET, V, 4),
        jax.tree.map(lambda x: x.astype(dtype), NEAR),
    ),
}


def engine_of(drafter="draft model", dtype="float32", **kwargs):
    """An engine of one shape: four rows, blocks of five."""
    made, draft_params = DRAFTERS[drafter](dtype)
    settings = {
        "params": llama_params(0, jnp.dtype(dtype)),
        "dtype": dtype,
        "drafter": made,
        "drafter_params": draft_params,
        "tokenizer": LetterTokenizer(),
        "batch_sizes": (4,),
        "block_widths": (5,),
        "max_logprobs": 5,
    }
    return jspec.LLM(TARGET, **(settings | kwargs))


@pytest.fixture(scope="module")
def engine():
    return engine_of()


def greedy(**settings):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | settings))


def coupled(**settings):
    return SamplingParams(
        **({"max_tokens": 24, "seed": 5, "verification": "coupled", "temperature": 0.9} | settings)
    )


def reference_logits(ids):
    """`[len(ids), V]`: row i is for the place behind token i."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(uncached(TARGET, llama_params(0), tokens)[0][0, : len(ids)], np.float64)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


# Log probabilities


def check_scores(entries, tokens, laws, count):
    assert len(entries) == len(tokens)
    for entry, token, law in zip(entries, tokens, laws, strict=True):
        own = entry[token]
        np.testing.assert_allclose(own.logprob, law[token], atol=1e-4)
        assert own.rank == 1 + int((law > law[token] + 1e-5).sum())
        best = sorted(range(V), key=lambda t: -law[t])[:count]
        for rank, other in enumerate(best, 1):
            if law[other] == -np.inf:
                continue
            np.testing.assert_allclose(entry[other].logprob, law[other], atol=1e-4)
            assert entry[other].rank == rank
        assert len(entry) <= count + 1


@pytest.mark.parametrize("settings", [greedy(logprobs=3), coupled(logprobs=0, top_k=4)])
def test_logprobs_are_those_of_the_model_itself(engine, settings):
    """Of accepted, recovered and bonus tokens alike: nothing tells them apart here."""
    for out in engine.generate(PROMPTS, settings):
        logits = reference_logits([*out.prompt_token_ids, *out.token_ids])
        start = len(out.prompt_token_ids) - 1
        laws = [log_softmax(x) for x in logits[start:-1]]
        check_scores(out.logprobs, out.token_ids, laws, settings.logprobs)
        total = sum(e[t].logprob for e, t in zip(out.logprobs, out.token_ids, strict=True))
        assert out.cumulative_logprob == pytest.approx(total)
        assert out.metrics.num_accepted > 0
        assert out.metrics.num_accepted + out.metrics.num_rounds >= len(out.token_ids)
        assert out.logprobs[0][out.token_ids[0]].decoded_token == out.text[0]


def test_processed_logprobs_are_those_of_the_law(engine):
    wanted = {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.4, "frequency_penalty": 0.3}
    settings = coupled(logprobs=2, logprobs_mode="processed_logprobs", **wanted)
    for out in engine.generate(PROMPTS, settings):
        prompt = out.prompt_token_ids
        text = [*prompt, *out.token_ids]
        logits = reference_logits(text)
        laws = [
            reference.law(logits[n - 1], text[:n], num_prompt=len(prompt), **wanted)
            for n in range(len(prompt), len(text))
        ]
        with np.errstate(divide="ignore"):
            check_scores(out.logprobs, out.token_ids, [np.log(x) for x in laws], 2)


def test_rows_without_logprobs_have_none(engine):
    some = engine.generate(PROMPTS[:2], [greedy(logprobs=1), greedy()])
    assert len(some[0].logprobs) == 24
    assert some[1].logprobs is None
    assert some[1].cumulative_logprob is None
    assert some[0].prompt_logprobs is None


def test_prompt_logprobs(engine):
    prompts = [list(range(40)), [9], [4, 4, 4]]
    plain = engine.generate(prompts, greedy(max_tokens=5))
    for out, without in zip(
        engine.generate(prompts, greedy(max_tokens=5, prompt_logprobs=2)), plain, strict=True
    ):
        laws = [log_softmax(x) for x in reference_logits(out.prompt_token_ids)[:-1]]
        assert out.prompt_logprobs[0] is None
        check_scores(out.prompt_logprobs[1:], out.prompt_token_ids[1:], laws, 2)
        assert out.token_ids == without.token_ids


# Bit for bit


def everything(out):
    return [(o.token_ids, o.text, o.logprobs, o.finish_reason) for o in out.outputs]


NEIGHBOURS = [
    SamplingParams(seed=1, max_tokens=9),
    SamplingParams(seed=2, max_tokens=30, top_p=0.8, repetition_penalty=1.5, logprobs=4),
    SamplingParams(temperature=0.0, max_tokens=20, bad_words=["ab"], stop="q", min_tokens=3),
]


@pytest.fixture(scope="module")
def engines_16():
    return {name: engine_of(name, "bfloat16") for name in DRAFTERS}


@pytest.mark.parametrize(
    "settings",
    [
        greedy(logprobs=3),
        greedy(logprobs=2, repetition_penalty=1.3, logprobs_mode="processed_logprobs"),
        coupled(logprobs=3),
        coupled(logprobs=1, top_p=0.9, presence_penalty=0.5, min_tokens=4, stop_token_ids=[9, 30]),
    ],
    ids=["greedy", "greedy, penalised", "coupled", "coupled, filtered"],
)
def test_ids_and_logprobs_are_the_same_bits_for_every_drafter_and_batch(engines_16, settings):
    """In bfloat16, at one shape: alone, and in three places among neighbours that ask for other
    things, whatever drafts."""
    a, b, c, d = PROMPTS
    seen = []
    for llm in engines_16.values():
        seen.append(everything(llm.generate([b], settings)[0]))
        for slot in range(3):
            prompts, params = [a, c, d], list(NEIGHBOURS)
            prompts.insert(slot, b)
            params.insert(slot, settings)
            seen.append(everything(llm.generate(prompts, params)[slot]))
    assert all(one == seen[0] for one in seen)


BAND = 1e-3
"""Of logits in float32, in which shapes may differ: 100 times what they differ by here."""


def test_across_shapes_float32_texts_part_only_within_a_band():
    """Other rows, widths and drafters at once: ids agree up to a near tie, logprobs to the band;
    under the coupled rule, where a tie is one of probability and noise, there is none here."""
    shapes = [((4,), (5,), "none"), ((1,), (2, 5), "ngram"), ((8,), (7,), "draft model")]
    engines = [
        engine_of(drafter, batch_sizes=rows, block_widths=widths)
        for rows, widths, drafter in shapes
    ]
    texts = [
        [llm.generate([p], greedy(max_tokens=100, logprobs=2))[0] for p in PROMPTS]
        for llm in engines
    ]
    sampled = [
        [llm.generate([prompt], coupled(max_tokens=60))[0].token_ids for prompt in PROMPTS]
        for llm in engines
    ]
    assert sampled[0] == sampled[1] == sampled[2]
    compared = 0
    for outs in zip(*texts, strict=True):
        for place in range(100):
            entries = [list(o.logprobs[place].values()) for o in outs]
            gap = entries[0][0].logprob - entries[0][1].logprob
            if gap < BAND:
                break
            assert len({o.token_ids[place] for o in outs}) == 1
            for entry in entries[1:]:
                assert abs(entry[0].logprob - entries[0][0].logprob) < BAND / 10
            compared += 1
    assert compared > 200


# Stop strings

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class PairTokenizer:
    """Token i is the pair of letters (i, i + 1), so that stops straddle tokens."""

    def encode(self, text):
        return [LETTERS.index(text[0])]

    def decode(self, ids):
        return "".join(LETTERS[i % 26] + LETTERS[(i + 1) % 26] for i in ids)


COUNTING = jnp.where(jnp.arange(26) == (jnp.arange(26)[:, None] + 1) % 26, 9.0, 0.0)


@pytest.fixture(scope="module")
def counter():
    """Counts up: after 0 come 1 2 3 ..., as text bc cd de ..., a round a hop of five."""
    model = jspec.Model(markov(26).forward, 26, 512, jspec.CacheSpec(0, 1, 2), eos_token_ids=(25,))
    return jspec.LLM(
        model,
        params=COUNTING,
        tokenizer=PairTokenizer(),
        dtype="float32",
        drafter=DraftModel(markov(26), 26, 4),
        drafter_params=COUNTING,
        batch_sizes=(4,),
        max_logprobs=2,
    )


def whole_text(n):
    return PairTokenizer().decode(range(1, n + 1))


def expected_stop(stop, include, min_tokens, max_tokens):
    """Tokens and text by pushing one token after the other, and how it ends."""
    for n in range(1, max_tokens + 1):
        text, before = whole_text(n), whole_text(n - 1)
        ends = [
            (text.find(s, max(0, len(before) - len(s) + 1)) + len(s), -len(s), s)
            for s in stop
            if text.find(s, max(0, len(before) - len(s) + 1)) >= 0
        ]
        if ends and n > min_tokens:
            end, length, s = min(ends)
            return n, text[: end if include else end + length], s
    return max_tokens, whole_text(max_tokens), None


@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
@pytest.mark.parametrize(
    ("stop", "min_tokens"),
    [((s,), 0) for s in ("b", "bc", "cc", "cd", "dd", "eeff", "fg", "gg", "h", "llmm", "ss", "zz")]
    + [
        (("hh", "gh"), 0),
        (("gh", "hh", "ggh"), 0),
        (("f", "c"), 3),
        (("cc", "jj"), 2),
        (("xz",), 0),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_output_at_every_offset(counter, stop, min_tokens, include):
    settings = greedy(
        stop=list(stop),
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        max_tokens=20,
        logprobs=1,
    )
    n, text, reason = expected_stop(stop, include, min_tokens, 20)
    (out,) = counter.generate([[0]], settings)
    assert (out.token_ids, out.text) == (list(range(1, n + 1)), text)
    assert out.finish_reason == ("length" if reason is None else "stop")
    assert out.stop_reason == reason
    assert len(out.logprobs) == n
    metrics = out.metrics
    rounds = -(-n // 5)
    assert (metrics.num_tokens, metrics.num_rounds) == (n, rounds)
    assert metrics.accepted_per_position == (rounds,) * 4
    chunks = list(counter.stream([0], settings))
    assert "".join(c.text for c in chunks) == text
    assert [t for c in chunks for t in c.token_ids] == out.token_ids
    assert [e for c in chunks for e in c.logprobs] == out.logprobs
    assert everything(chunks[-1].output) == everything(out)
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [out.finish_reason]


def test_a_stop_token_hides_its_text_unless_included(counter):
    for include in (False, True):
        (out,) = counter.generate(
            [[0]], greedy(stop_token_ids=[3], include_stop_str_in_output=include, stop="de")
        )
        # "de" is complete in token 3, too: the token comes first
        assert (out.token_ids, out.stop_reason) == ([1, 2, 3], "de" if include else 3)
    (out,) = counter.generate([[20]], greedy())
    assert (out.token_ids, out.text) == ([21, 22, 23, 24, 25], whole_text(24)[-8:])
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_rows_with_stop_strings_do_not_disturb_the_others(counter):
    outs = counter.generate(
        [[0], [0], [3], [0]],
        [greedy(stop="ff"), greedy(max_tokens=24), greedy(stop="ff"), greedy(stop=["zzz"])],
    )
    assert [len(o.token_ids) for o in outs] == [5, 24, 2, 24]
    assert outs[1].text == outs[3].text == whole_text(24)


def test_find_stop():
    assert find_stop("abcabc", ["bc"], 3) == (4, 6, "bc")
    assert find_stop("abcabc", ["bc"], 2) == (1, 3, "bc")
    assert find_stop("abcabc", ["c", "bc", "abc"], 0) == (0, 3, "abc")
    assert find_stop("abcabc", ["x"], 0) is None
    assert length_of_possible_stop("so <", ["<end>"]) == 1
    assert length_of_possible_stop("so <end", ["<end>", "d>"]) == 4
    assert length_of_possible_stop("so <end>", ["<end>"]) == 0


def test_text_that_may_begin_a_stop_string_is_held_back():
    text = OutputText(_Letters(), ["cde"], include_stop=False, min_tokens=0)
    pieces = []
    for token in "abcdcdxcde":
        text.push([ord(token)], ended=False, by_token=False)
        pieces.append(text.take(ended=text.stopped_by is not None))
    assert pieces == ["a", "b", "", "", "cd", "", "cdx", "", "", ""]
    assert (text.text, text.stopped_by) == ("abcdcdx", "cde")


class _Letters:
    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


# Several outputs


def test_n_outputs_are_those_of_the_seeds(engine):
    settings = coupled(n=3, seed=2**32 - 2, logprobs=1)
    (out,) = engine.generate([PROMPTS[1]], settings)
    assert [o.index for o in out.outputs] == [0, 1, 2]
    assert [o.seed for o in out.outputs] == [2**32 - 2, 2**32 - 1, 0]
    assert len({tuple(o.token_ids) for o in out.outputs}) == 3
    for o in out.outputs:
        (alone,) = engine.generate([PROMPTS[1]], coupled(seed=o.seed, logprobs=1))
        assert alone.token_ids == o.token_ids
        assert alone.text == o.text
    assert (out.text, out.token_ids, out.seed) == (
        out.outputs[0].text,
        out.outputs[0].token_ids,
        2**32 - 2,
    )
    assert out.logprobs == out.outputs[0].logprobs


def test_outputs_of_several_requests_fill_batches_in_order(engine):
    settings = [coupled(n=2, seed=10), coupled(n=5, seed=20), coupled(seed=30), greedy(n=3, seed=0)]
    prompts = [[1, 2, 3], list(range(30)), [4], [5, 6]]
    steps = []
    outs = engine.generate(prompts, settings, progress=lambda *args: steps.append(args))
    assert [len(o.outputs) for o in outs] == [2, 5, 1, 3]
    assert [o.prompt_token_ids for o in outs] == prompts
    assert [c.seed for c in outs[1].outputs] == [20, 21, 22, 23, 24]
    assert steps[-1] == ("generating", 4, 4)
    assert len({tuple(c.token_ids) for c in outs[3].outputs}) == 1  # greedy
    for out, one in zip(outs, settings, strict=True):
        for o in out.outputs[1:]:
            alone = dataclasses.replace(one, n=1, seed=o.seed)
            (single,) = engine.generate([out.prompt_token_ids], alone)
            assert single.token_ids == o.token_ids


def test_a_stream_of_several_outputs(engine):
    settings = coupled(n=3, stop="q", max_tokens=40)
    chunks = list(engine.stream(PROMPTS[0], settings))
    (whole,) = engine.generate([PROMPTS[0]], settings)
    assert [c.output is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert everything(chunks[-1].output) == everything(whole)
    for o in whole.outputs:
        mine = [c for c in chunks if c.index == o.index]
        assert "".join(c.text for c in mine) == o.text
        assert [t for c in mine for t in c.token_ids] == o.token_ids
        assert mine[-1].finish_reason == o.finish_reason
    with pytest.raises(JspecError, match="n=5: a stream has at most 4 outputs"):
        engine.stream(PROMPTS[0], coupled(n=5))


# What may be said


@pytest.mark.parametrize("rule", [greedy, coupled])
def test_allowed_tokens_bias_and_bad_words(engine, rule):
    (out,) = engine.generate([PROMPTS[0]], rule(allowed_token_ids=[3, 17, 40]))
    assert set(out.token_ids) <= {3, 17, 40}
    (out,) = engine.generate([PROMPTS[0]], rule(logit_bias={11: 1e4}))
    assert set(out.token_ids) == {11}
    allowed = list(range(26))
    (with_pair,) = engine.generate([PROMPTS[0]], rule(allowed_token_ids=allowed, max_tokens=60))
    word = with_pair.text[10:12]
    assert word in with_pair.text
    (out,) = engine.generate(
        [PROMPTS[0]], rule(allowed_token_ids=allowed, bad_words=[word], max_tokens=60)
    )
    assert word not in out.text


def test_min_tokens_holds_back_every_stop(counter):
    for n in (1, 2, 4, 7):
        settings = greedy(min_tokens=n, stop_token_ids=[3], max_tokens=12)
        (out,) = counter.generate([[0]], settings)
        if n < 3:
            assert out.token_ids == [1, 2, 3]
        else:  # 3 is not allowed at the third place, and without it the count goes on from 0
            assert out.token_ids[:3] == [1, 2, 0]
            assert out.token_ids.index(3) >= n


def no_repeats(logits, tokens, position):
    """Forbids what stands anywhere in the last four places."""
    last = jnp.take(tokens, jnp.maximum(position - 1 - jnp.arange(4), 0))
    return logits.at[last].set(-jnp.inf)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_users_processor_acts_at_every_place(drafter):
    llm = engine_of(drafter, logits_processor=no_repeats)
    outs = [llm.generate(PROMPTS, rule(max_tokens=40)) for rule in (greedy, coupled)]
    for out in itertools.chain(*outs):
        text = [*out.prompt_token_ids, *out.token_ids]
        for n in range(len(out.prompt_token_ids), len(text)):
            assert text[n] not in text[max(n - 4, 0) : n]
    if drafter != "none":
        assert sum(o.metrics.num_accepted for o in outs[0]) > 0


def test_a_place_where_nothing_is_allowed_is_an_error():
    llm = engine_of("ngram", logits_processor=lambda x, t, p: jnp.where(p == 9, -jnp.inf, x))
    with pytest.raises(JspecError, match="no token is allowed after 9 tokens"):
        llm.generate([PROMPTS[0]], greedy())
    assert len(llm.generate([PROMPTS[0]], greedy(max_tokens=4))[0].token_ids) == 4


def test_no_setting_compiles_anything_new(engine):
    engine.generate(PROMPTS, greedy(n=1))
    before = len(engine._runner.programs)
    for settings in (
        coupled(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1),
        greedy(logit_bias={3: 1.0}, allowed_token_ids=[1, 2, 3], bad_words=["abc"], min_tokens=2),
        SamplingParams(logprobs=5, logprobs_mode="processed_logprobs", max_tokens=3, seed=1),
        greedy(stop_token_ids=[1, 2, 3], ignore_eos=True, skip_special_tokens=False),
    ):
        engine.generate(PROMPTS, settings)
        engine.generate(PROMPTS[:2], [settings, greedy()])
    assert len(engine._runner.programs) <= before + 1  # a bad word of three tokens: one more shape
