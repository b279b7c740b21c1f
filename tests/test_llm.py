import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIG, TARGET, llama_params, markov, uncached_greedy

import jspec
from jspec import JspecError, SamplingParams
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NgramDrafter
from jspec.llm import default_widths
from jspec.loading import check_vocabularies

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[7, 8, 9], [3, 1, 4, 1, 5], [2], [5, 5]]


class LetterTokenizer:
    """Token i is the letter chr(97 + i % 26)."""

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids):
        return "".join(chr(97 + i % 26) for i in ids)


def llm(**kwargs):
    settings = {
        "params": llama_params(0),
        "dtype": "float32",
        "drafter": NgramDrafter(4),
        "tokenizer": LetterTokenizer(),
    }
    return jspec.LLM(TARGET, **(settings | kwargs))


@pytest.fixture(scope="module")
def engine():
    return llm()


def test_a_list_gives_a_result_each_in_order(engine):
    outs = engine.generate(PROMPTS, GREEDY)
    for out, prompt in zip(outs, PROMPTS, strict=True):
        assert out.prompt_token_ids == prompt
        assert prompt + out.token_ids == uncached_greedy(TARGET, llama_params(0), prompt, 12)
        assert out.text == LetterTokenizer().decode(out.token_ids)
        assert out.finish_reason == "length"


def test_a_text_or_one_list_of_ids_is_one_prompt(engine):
    (a,), (b,) = engine.generate("dbebf", GREEDY), engine.generate([3, 1, 4, 1, 5], GREEDY)
    assert a.token_ids == b.token_ids


def test_more_prompts_than_rows_run_in_turns():
    engine = llm(max_num_seqs=3)
    seen = []
    outs = engine.generate(PROMPTS * 2, GREEDY, progress=lambda *args: seen.append(args))
    assert [o.token_ids for o in outs[:4]] == [o.token_ids for o in outs[4:]]
    assert seen == [("generating", n, 8) for n in (3, 6, 8)]


def test_each_prompt_may_have_its_own_settings(engine):
    settings = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=1.0, max_tokens=9, seed=4),
        SamplingParams(temperature=0.7, top_k=3, max_tokens=1, seed=5),
    ]
    together = engine.generate(PROMPTS[:3], settings)
    assert [len(o.token_ids) for o in together] == [3, 9, 1]
    assert [o.seed for o in together[1:]] == [4, 5]
    with pytest.raises(JspecError, match="2 prompts but 3 sampling_params"):
        engine.generate(PROMPTS[:2], settings)


def test_a_seed_reproduces_an_unseeded_output(engine):
    warm = SamplingParams(temperature=1.0, max_tokens=12)
    (first,), (second,) = engine.generate([PROMPTS[0]], warm), engine.generate([PROMPTS[0]], warm)
    assert first.seed != second.seed
    (again,) = engine.generate(
        [PROMPTS[0]], SamplingParams(temperature=1.0, max_tokens=12, seed=first.seed)
    )
    assert again.token_ids == first.token_ids


def test_stop_tokens_end_a_request_and_stay_in_its_ids(engine):
    (whole,) = engine.generate([PROMPTS[1]], GREEDY)
    stop = whole.token_ids[5]
    (out,) = engine.generate(
        [PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[60, stop])
    )
    assert out.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert out.finish_reason == "stop"


def test_eos_ends_a_request_unless_ignored():
    counting = jnp.where(jnp.arange(6) == (jnp.arange(6)[:, None] + 1) % 6, 9.0, 0.0)
    model = jspec.Model(markov(6).forward, 6, 64, jspec.CacheSpec(0, 1, 2), eos_token_ids=(4,))
    engine = jspec.LLM(model, params=counting, dtype="float32", drafter="none")
    (out,) = engine.generate([0], SamplingParams(temperature=0.0, max_tokens=8))
    assert (out.token_ids, out.finish_reason, out.text) == ([1, 2, 3, 4], "stop", "")
    ignored = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (out,) = engine.generate([0], ignored)
    assert out.token_ids == [1, 2, 3, 4, 5, 0, 1, 2]


def test_a_stream_gives_the_same_in_pieces(engine):
    chunks = list(engine.stream(PROMPTS[1], GREEDY))
    (whole,) = engine.generate([PROMPTS[1]], GREEDY)
    assert len(chunks) > 1
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert "".join(c.text for c in chunks) == whole.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1].output
    assert last is not None
    assert (last.token_ids, last.finish_reason) == (whole.token_ids, "length")


def test_metrics_add_up(engine):
    outs = engine.generate(PROMPTS, GREEDY)
    for out in outs:
        m = out.metrics
        assert (m.num_prompt_tokens, m.num_tokens) == (len(out.prompt_token_ids), 12)
        assert m.num_rounds <= 12 <= m.num_rounds + m.num_accepted
        assert m.num_accepted <= m.num_drafted == sum(m.drafted_per_position)
        assert m.decode_seconds > 0
        assert m.prefill_seconds > 0
    total = outs[0].metrics + outs[1].metrics
    assert total.num_tokens == 24
    assert total.mean_acceptance_length == 1 + total.num_accepted / total.num_rounds


def test_one_program_serves_every_length_of_a_shape(engine):
    before = len(engine._runner.programs)
    for n in (1, 5, 30):
        engine.generate([[1] * n], SamplingParams(temperature=0.5, max_tokens=n))
        list(engine.stream([2] * n, SamplingParams(temperature=0.0, max_tokens=n)))
    assert len(engine._runner.programs) <= before + 1


@pytest.mark.parametrize("drafter", ["ngram", "draft model"])
def test_the_parts_of_a_round_can_be_timed(engine, drafter):
    if drafter == "draft model":
        draft = DraftModel(TARGET, CONFIG.vocab_size, 3)
        engine = llm(drafter=draft, drafter_params=llama_params(1))
    times = engine.measure_round(20, repeats=1)
    assert min(times.plain_seconds, times.verify_seconds, times.draft_seconds) > 0
    assert times.plain_width == 1


class NnxModel(nnx.Module):
    """One attention layer over embeddings, as a user would bring it."""

    vocab_size, max_position_embeddings = 20, 64
    num_layers, num_kv_heads, head_dim = 1, 2, 4
    eos_token_ids = ()

    def __init__(self, rngs):
        self.embed = nnx.Embed(20, 8, rngs=rngs)
        self.qkv = nnx.Linear(8, 24, rngs=rngs)
        self.head = nnx.Linear(8, 20, rngs=rngs)

    def __call__(self, tokens, cache):
        x = self.embed(tokens)
        q, k, v = jnp.split(self.qkv(x).reshape(*tokens.shape, 6, 4), 3, axis=2)
        attended, cache = jspec.attend(cache, 0, q, k, v)
        x = x + attended.reshape(x.shape)
        return jspec.Output(self.head(x), (x,), cache)


def test_an_nnx_module_is_a_model():
    module = NnxModel(nnx.Rngs(0))
    greedy = SamplingParams(temperature=0.0, max_tokens=10)
    text = [
        jspec.LLM(module, dtype="float32", drafter=d, block_widths=(4,)).generate([3, 4, 5], greedy)
        for d in ("none", NgramDrafter(3))
    ]
    assert text[0][0].token_ids == text[1][0].token_ids
    model, params = jspec.from_nnx(module)
    assert text[0][0].token_ids == uncached_greedy(model, params, [3, 4, 5], 10)[3:]


def test_a_draft_model_may_pad_its_vocabulary_differently():
    check_vocabularies(151936, 152064)
    with pytest.raises(JspecError, match=r"another vocabulary \(32000 tokens\).*\(128256\)"):
        check_vocabularies(32000, 128256)


def test_default_widths(monkeypatch):
    for rows in (1, 8):
        assert default_widths(6, "bfloat16", rows) == (2, 7)
        assert default_widths(6, "float32", rows) == (1, 7)
        assert default_widths(0, "float32", rows) == (1,)
    assert default_widths(0, "bfloat16", 1) == (2,)
    assert default_widths(0, "bfloat16", 8) == (1,)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert default_widths(6, "bfloat16", 1) == (7,)


BAD_PARAMS = [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"top_k": -2}, "top_k=-2"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"seed": -1}, "seed=-1"),
    ({"stop_token_ids": [-3]}, "stop_token_ids"),
    ({"verification": "typical"}, "verification='typical'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_PARAMS, ids=lambda x: str(x))
def test_bad_sampling_params_are_refused_by_name(settings, message):
    with pytest.raises(JspecError, match=message):
        SamplingParams(**settings)


def test_bad_prompts_are_refused(engine):
    limit = CONFIG.max_position_embeddings
    for prompt, message in (
        ("", "empty"),
        ([], "no prompts"),
        ([[]], "empty"),
        ([61], "token id 61 is outside the vocabulary of 61"),
        ([1] * (limit + 1), f"{limit + 1} tokens, the model's limit is {limit}"),
        ([1] * 499, r"prompt \(499\) \+ max_tokens \(12\) \+ num_speculative_tokens \(4\)"),
    ):
        with pytest.raises(JspecError, match=message):
            engine.generate(prompt, GREEDY)
    engine.generate([1] * 496, GREEDY)  # exactly fits


def test_logits_that_are_not_finite_are_an_error():
    broken = jax.tree.map(lambda x: x, llama_params(0))
    broken = broken.replace(final_norm=broken.final_norm.at[0].set(np.nan))
    with pytest.raises(JspecError, match="not finite after 3 tokens"):
        llm(params=broken).generate([1, 2, 3], GREEDY)


BAD_ENGINES = [
    ({"dtype": "int8"}, "dtype='int8'"),
    ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ({"drafter": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ({"drafter": "no-such-drafter"}, "'no-such-drafter' is none of"),
    ({"drafter": "ngram:9"}, "ngram: min_match=9: must be from 1 to 8"),
    ({"params": None}, "needs params="),
    (
        {"block_widths": (2, 4)},
        r"block widths \(2, 4\): the last must be at least 5, for the 4 tokens",
    ),
    ({"batch_sizes": (4, 0)}, "batch_sizes"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_ENGINES, ids=lambda x: str(x))
def test_bad_engine_settings_are_refused(settings, message):
    with pytest.raises(JspecError, match=message):
        llm(**settings)


def test_an_unknown_object_is_no_model():
    with pytest.raises(JspecError, match="model of type dict"):
        jspec.LLM({"a": 1})
    with pytest.raises(JspecError, match="chat template"):
        llm().chat([{"role": "user", "content": "hi"}])


def test_powers_of_two_cover_the_batch():
    assert [llm(max_num_seqs=n)._batch_sizes for n in (1, 3, 8)] == [(1,), (1, 2, 3), (1, 2, 4, 8)]
    assert list(itertools.chain(llm(batch_sizes=[5])._batch_sizes)) == [5]
