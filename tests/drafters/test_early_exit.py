"""Drafting with the target's own first layers: the text, what is accepted, what is computed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from exit_helpers import exits_of_places, layers_run, proposal
from tiny import CONFIG, counts_of, llama_params, rows_of, run, sampling, start, uncached

from jspec.decode import DecodeConfig
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.none import NoDrafter
from jspec.errors import JspecError
from jspec.exits import exit_logits, own_exit
from jspec.model import llama

L = 4
DEEP = dataclasses.replace(CONFIG, num_hidden_layers=L)
TARGET = llama(DEEP)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8]]
SIXTEEN = [[row + 9, *PROMPTS[row % 3]] for row in range(16)]


def params(dtype=jnp.float32, silent_from=L):
    """A random model, of which the layers from `silent_from` on add nothing."""
    whole = llama_params(0, dtype, DEEP)
    layers = tuple(
        layer
        if i < silent_from
        else layer.replace(o=jnp.zeros_like(layer.o), down=jnp.zeros_like(layer.down))
        for i, layer in enumerate(whole.layers)
    )
    return whole.replace(layers=layers)


def decode(drafter, target, drafter_params, *, max_tokens=40, prompts=PROMPTS, **settings):
    config = DecodeConfig(TARGET, drafter, (6,))
    wanted = sampling(len(prompts), **settings)
    state = start(config, prompts, max_tokens=max_tokens, settings=wanted)
    return run(config, (target, drafter_params), state)


def exiting(target, layer, K=4, stop=0.0, **settings):
    drafter = EarlyExit(DEEP, layer, K, stop)
    return decode(drafter, target, (target, own_exit(target)), **settings)


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_plain_decoding(layer, temperature):
    """Under the coupled rule (which greedy is a case of), whatever is drafted."""
    target = params()
    settings = {"temperature": temperature, "coupled": True}
    plain = decode(NoDrafter(), target, (), **settings)
    state = exiting(target, layer, **settings)
    assert rows_of(state) == rows_of(plain)
    assert counts_of(state).drafted.sum() > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sixteen_rows_of_uneven_acceptance(temperature):
    target = params()
    settings = {"temperature": temperature, "coupled": True, "prompts": SIXTEEN, "max_tokens": 24}
    plain = decode(NoDrafter(), target, (), **settings)
    state = exiting(target, 2, stop=0.1, **settings)
    assert rows_of(state) == rows_of(plain)
    assert len(set(counts_of(state).rounds.tolist())) > 2


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_exit_that_knows_all_is_accepted_always(layer, temperature):
    """Layers behind the exit that add nothing: the exit's law is the target's."""
    state = exiting(params(silent_from=layer), layer, temperature=temperature)
    counts = counts_of(state)
    assert np.array_equal(counts.drafted, counts.accepted)
    assert counts.rounds.tolist() == [8, 8, 8]  # 40 tokens, five a round


def test_a_trained_exit_with_a_vocabulary_of_its_own():
    target = params(silent_from=2)
    ids = np.flatnonzero(np.arange(DEEP.vocab_size) % 3)
    head = target.embed if target.lm_head is None else target.lm_head
    D = DEEP.hidden_size
    exit = own_exit(target).replace(
        lm_head=head[ids],
        token_ids=jnp.asarray(ids, jnp.int32),
        block=jnp.zeros((D, D)),
        bias=jnp.zeros((D,)),
    )
    state = decode(EarlyExit(DEEP, 2, 4), target, (target, exit))
    plain = decode(NoDrafter(), target, ())
    assert rows_of(state) == rows_of(plain)
    counts = counts_of(state)
    assert 0 < counts.accepted.sum() < counts.drafted.sum()


def test_the_law_of_an_exit():
    target = params()
    tokens = jnp.array([[5, 4, 3, 2]])
    _, hidden = uncached(TARGET, target, tokens)
    got = exit_logits(own_exit(target), hidden[2], eps=DEEP.rms_norm_eps, vocab_size=61)
    wide = np.asarray(hidden[2], np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + DEEP.rms_norm_eps)
    head = np.asarray(target.embed if target.lm_head is None else target.lm_head, np.float64)
    wanted = normed * np.asarray(target.final_norm, np.float64) @ head.T
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-4, atol=1e-4)


def test_every_token_goes_through_every_layer_once(monkeypatch):
    """Drafts and last token, whether below the exit or behind it."""
    target, K = params(), 4
    config = DecodeConfig(TARGET, EarlyExit(DEEP, 2, K), (K + 1,))
    state = start(config, [[7]], max_tokens=40)
    ran = layers_run(monkeypatch, config, (target, (target, own_exit(target))), state)
    assert ran == dict.fromkeys(range(L), K + 1)


def test_a_draft_that_is_not_made_costs_nothing(monkeypatch):
    """No row is sure of a first token: one token goes through each layer."""
    target, K = params(), 4
    config = DecodeConfig(TARGET, EarlyExit(DEEP, 2, K, stop=1.0), (1, K + 1))
    state = start(config, [[7]], max_tokens=40)
    ran = layers_run(monkeypatch, config, (target, (target, own_exit(target))), state)
    assert ran == dict.fromkeys(range(L), 1)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_stops_where_its_exit_is_not_sure(rows):
    """And what it drafts until then has the exit's law; rows of all temperatures in one batch."""
    target, K, stop = params(), 4, 0.1
    config = DecodeConfig(TARGET, EarlyExit(DEEP, 2, K, stop), (K + 1,))
    temperatures = [0.9, 0.0, 1.0][:rows]
    drafted = []
    for seed in range(16):
        prompts = [[seed + 1, *prompt] for prompt in PROMPTS[:rows]]
        wanted = sampling(rows, temperature=temperatures, seed=np.arange(rows) + seed)
        state = start(config, prompts, max_tokens=40, settings=wanted)
        draft = proposal(config, (target, (target, own_exit(target))), state)
        for row, prompt in enumerate(prompts):
            count = draft.num_drafted[row]
            places = exits_of_places(
                DEEP,
                target,
                (2,),
                [*prompt, *draft.tokens[row, :count]],
                first=len(prompt) - 1,
                stop=stop,
                temperature=temperatures[row],
            )
            assert [exit for exit, _ in places[:count]] == [2] * count
            assert count == K or places[count][0] is None
            for law, (_, expected) in zip(draft.probs[row], places[:count], strict=False):
                np.testing.assert_allclose(law, expected, atol=1e-4)
            drafted.append(count)
    assert len(set(drafted)) > 1


@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_of_a_drafter_that_stops_is_that_of_plain_decoding(rows):
    target, drafted = params(), 0
    for temperature in (0.0, 0.9):
        settings = {"temperature": temperature, "coupled": True, "prompts": PROMPTS[:rows]}
        plain = decode(NoDrafter(), target, (), **settings)
        state = exiting(target, 2, stop=0.1, **settings)
        assert rows_of(state) == rows_of(plain)
        drafted += counts_of(state).drafted.sum()
    assert drafted > 0


def test_a_stop_is_a_probability():
    with pytest.raises(JspecError, match="is no probability, from 0 to 1"):
        EarlyExit(DEEP, 2, stop=1.5)


@pytest.mark.parametrize("layer", [0, 4, 9])
def test_an_exit_is_inside_the_model(layer):
    with pytest.raises(JspecError, match=f"early_exit:{layer}: the model has 4 layers"):
        EarlyExit(DEEP, layer)
