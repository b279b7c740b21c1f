"""Several exits: which one a token leaves at, with what law; the text; what is computed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from exit_helpers import exits_of_places, layers_run, proposal
from tiny import CONFIG, counts_of, llama_params, rows_of, run, sampling, start

from jspec.decode import DecodeConfig
from jspec.drafters.adaptive import Adaptive
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.none import NoDrafter
from jspec.errors import JspecError
from jspec.exits import own_exit
from jspec.model import llama

L, K = 5, 4
DEEP = dataclasses.replace(CONFIG, num_hidden_layers=L)
TARGET = llama(DEEP)
LAYERS = (1, 2, 4)
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8]]
SIXTEEN = [*PROMPTS, *([row + 9, *PROMPTS[row % 3]] for row in range(13))]
PARAMS = llama_params(0, jnp.float32, DEEP)
WITH_EXITS = (PARAMS, (PARAMS, (own_exit(PARAMS),) * len(LAYERS)))


def adaptive(threshold):
    return Adaptive(DEEP, LAYERS[0], K, threshold, deeper=LAYERS[1:])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_leaves_at_the_first_exit_that_is_sure_of_it(rows):
    """With the law of that exit, behind all that was drafted before, by whichever exits; where
    none is sure the draft ends. The reference runs whole texts through all layers."""
    threshold, temperatures = 0.12, [0.9, 0.0, 1.0][:rows]
    config = DecodeConfig(TARGET, adaptive(threshold), (K + 1,))
    left, drafted = [], []
    for seed in range(6):
        prompts = [[seed + 1, *prompt] for prompt in PROMPTS[:rows]]
        wanted = sampling(rows, temperature=temperatures, seed=np.arange(rows) + seed)
        state = start(config, prompts, max_tokens=40, settings=wanted)
        draft = proposal(config, WITH_EXITS, state)
        for row, prompt in enumerate(prompts):
            count = draft.num_drafted[row]
            places = exits_of_places(
                DEEP,
                PARAMS,
                LAYERS,
                [*prompt, *draft.tokens[row, :count]],
                first=len(prompt) - 1,
                stop=threshold,
                temperature=temperatures[row],
            )
            assert all(exit is not None for exit, _ in places[:count])
            assert count == K or places[count][0] is None
            for law, (_, expected) in zip(draft.probs[row], places[:count], strict=False):
                np.testing.assert_allclose(law, expected, atol=1e-4)
            left += [exit for exit, _ in places[:count]]
            drafted.append(count)
    assert set(left) == set(LAYERS)
    assert len(set(drafted)) > 1


def decode(drafter, drafter_params, prompts, **settings):
    config = DecodeConfig(TARGET, drafter, (6,))
    wanted = sampling(len(prompts), **settings)
    state = start(config, prompts, max_tokens=30, settings=wanted)
    return run(config, (PARAMS, drafter_params), state)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_text_is_that_of_plain_decoding(rows):
    for temperature in (0.0, 0.9):
        settings = {"temperature": temperature, "coupled": True, "prompts": SIXTEEN[:rows]}
        plain = decode(NoDrafter(), (), **settings)
        state = decode(adaptive(0.1), WITH_EXITS[1], **settings)
        assert rows_of(state) == rows_of(plain)
        assert counts_of(state).accepted.sum() > 0


def test_a_threshold_of_nothing_is_early_exit():
    first = proposal(*started(adaptive(0.0)))
    other = proposal(*started(EarlyExit(DEEP, LAYERS[0], K), (PARAMS, own_exit(PARAMS))))
    assert np.array_equal(first.tokens, other.tokens)
    assert first.num_drafted.tolist() == [K]


def started(drafter, drafter_params=WITH_EXITS[1]):
    config = DecodeConfig(TARGET, drafter, (1, K + 1))
    return config, (PARAMS, drafter_params), start(config, [[7]], max_tokens=40)


def test_layers_that_nobody_needs_do_not_run(monkeypatch):
    """The first exit is sure of everything: every token goes through every layer once."""
    ran = layers_run(monkeypatch, *started(adaptive(0.0)))
    assert ran == dict.fromkeys(range(L), K + 1)


def test_a_token_that_no_exit_is_sure_of(monkeypatch):
    """Went through the layers below the last exit, and no token behind it through any. Those that
    it went further through than others would have run over a block."""
    ran = layers_run(monkeypatch, *started(adaptive(1.0)))
    block = K + 1
    assert ran == {0: 1, 1: block + 1, 2: block + 1, 3: block + 1, 4: 1}


@pytest.mark.parametrize("deeper", [(1,), (4, 3), (5,)])
def test_exits_ascend_within_the_model(deeper):
    with pytest.raises(JspecError, match="its exits must ascend and stay below the model's 5"):
        Adaptive(DEEP, 1, deeper=deeper)
