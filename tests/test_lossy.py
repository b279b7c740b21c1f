"""The lossy rule: what it keeps, that it is labelled, measured, and that nothing else takes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, TARGET, counts_of, llama_params, rows_of, run, sampling, start, uncached

import jspec
from jspec import JspecError, SamplingParams, terminal
from jspec.accuracy import greedy_share
from jspec.decode import DecodeConfig
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.lossy_sprinter import LossySprinter
from jspec.drafters.none import NoDrafter
from jspec.exits import own_exit
from jspec.sampling import chain_prefix
from jspec.verify import accept_all_lossy, verify

PARAMS = llama_params(0)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8]]
LOSSY = "lossy_sprinter(1, threshold=0.1, k=3)"


def test_it_keeps_every_draft_and_the_next_token_is_the_targets():
    """As if the drafts were committed: the token does not depend on how many there were."""
    K, V, rows = 3, 11, 4
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, K + 1, V)) * 2, jnp.float32)
    drafts = jnp.asarray(rng.integers(0, V, (rows, K)), jnp.int32)
    count = jnp.array([0, 3, 2, 3])
    temperature = np.array([1.0, 0.0, 0.7, 1.3])
    settings = sampling(rows, vocab_size=V, temperature=temperature, repetition_penalty=1.7)
    text = jnp.zeros((rows, 8), jnp.int32).at[:, 0].set(5)
    lengths = jnp.ones((rows,), jnp.int32)
    kept = jax.jit(accept_all_lossy)(
        drafts,
        None,
        count,
        target_logits=logits,
        sampling=settings,
        prefix=chain_prefix(text, lengths, drafts),
    )
    assert kept.num_accepted.tolist() == count.tolist()
    told = jax.jit(verify)(
        drafts[:, :0],
        None,
        0 * count,
        target_logits=jnp.take_along_axis(logits, count[:, None, None], axis=1),
        sampling=settings,
        prefix=chain_prefix(text.at[:, 1 : K + 1].set(drafts), lengths + count, drafts[:, :0]),
    )
    assert kept.next_token.tolist() == told.next_token.tolist()


def decode(drafter, drafter_params, **settings):
    config = DecodeConfig(TARGET, drafter, (6,), **settings)
    state = start(config, PROMPTS, max_tokens=30)
    return run(config, (PARAMS, drafter_params), state)


def test_the_rule_and_not_the_drafter_is_lossy():
    exits = (PARAMS, own_exit(PARAMS))
    drafter = LossySprinter(CONFIG, 1, 3, 0.1)
    plain = rows_of(decode(NoDrafter(), ()))
    judged = decode(drafter, exits)
    assert rows_of(judged) == plain
    assert counts_of(judged).accepted.sum() < counts_of(judged).drafted.sum()
    kept = decode(drafter, exits, rule=accept_all_lossy)
    assert rows_of(kept) != plain
    assert np.array_equal(counts_of(kept).accepted, counts_of(kept).drafted)


@pytest.mark.parametrize("drafter", [EarlyExit(CONFIG, 1), NoDrafter()])
def test_a_lossless_drafter_never_takes_it(drafter):
    with pytest.raises(JspecError, match=f"the drafter {drafter.name} is lossless: a lossy rule"):
        DecodeConfig(TARGET, drafter, (6,), rule=accept_all_lossy)


def llm(drafter):
    return jspec.LLM(TARGET, params=PARAMS, drafter=drafter, dtype="float32", max_num_seqs=1)


def outputs_of(engine):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    return [engine.generate([prompt], params)[0] for prompt in PROMPTS[:2]]


def test_what_it_costs_is_counted_and_said():
    target, lossy = llm("early_exit(1, stop=0.1, k=3)"), llm(LOSSY)
    for out, cheap in zip(outputs_of(target), outputs_of(lossy), strict=True):
        assert greedy_share(target, out.prompt_token_ids, out.token_ids) == 1.0
        assert out.metrics.num_lossy == 0 < out.metrics.num_drafted
        assert "lossy" not in terminal.figures_line(out.metrics, target.drafter.name)
        share = greedy_share(target, cheap.prompt_token_ids, cheap.token_ids)
        assert share == greedy_share(lossy, cheap.prompt_token_ids, cheap.token_ids)
        assert share == share_by_whole_passes(cheap.prompt_token_ids, cheap.token_ids) < 1.0
        assert cheap.metrics.num_lossy == cheap.metrics.num_accepted > 0
        assert "lossy" in terminal.figures_line(cheap.metrics, lossy.drafter.name)
    assert lossy.drafter.name == "lossy_sprinter(1, threshold=0.1)"


def share_by_whole_passes(prompt, token_ids):
    text = jnp.asarray([[*prompt, *token_ids]])
    logits = np.asarray(uncached(TARGET, PARAMS, text)[0])
    best = logits[0, len(prompt) - 1 : -1].argmax(axis=-1)
    return np.mean(best == np.asarray(token_ids))


def test_a_long_name_does_not_hide_it():
    metrics = dataclasses.replace(
        jspec.Metrics(num_tokens=10_000, num_rounds=5_000, decode_seconds=10.0),
        drafted_per_position=(5_000,),
        accepted_per_position=(5_000,),
        num_lossy=5_000,
    )
    line = terminal.figures_line(metrics, "lossy_sprinter(12, threshold=0.6)")
    assert len(line) <= 80
    assert "100% kept unasked (lossy), mean" in line


@pytest.mark.parametrize(
    "drafter", ["none", "ngram", "early_exit:1", "early_exit(1, stop=0.4)", "auto"]
)
def test_no_other_name_gets_it(drafter):
    engine = llm(drafter)
    assert not engine._runner.config.is_lossy
    assert "lossy" not in engine.drafter.name


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (f"ngram,{LOSSY}", "is lossy, which others are not: use it alone"),
        (f"cascade({LOSSY}, early_exit:1)", "is lossy, which others are not: use it alone"),
        ("lossy_sprinter(1, threshold=2)", "threshold=2: give a probability, from 0 to 1"),
        ("early_exit(1, stop=often)", "stop=often: give a probability, from 0 to 1"),
        ("adaptive(1, threshold=0.5)", r"adaptive: write adaptive\(LAYER, LAYER, "),
        ("adaptive(1, 1)", "its exits must ascend and stay below the model's 2 layers"),
        ("adaptive(1, often)", "adaptive: LAYER=often: give a whole number"),
        ("cascade(adaptive(1, 2), early_exit:1)", "its exits must ascend"),
    ],
)
def test_names_that_say_too_much(drafter, message):
    with pytest.raises(JspecError, match=message):
        llm(drafter)
