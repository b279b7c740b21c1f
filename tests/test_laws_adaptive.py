"""The law of what is emitted where drafts stop by confidence or leave at several exits.

As `test_laws`, with a target that has layers: a Llama whose attention adds nothing says what
follows from the last token alone, so its laws can be enumerated, too.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import reference
from laws import NUM_TOKENS, PROMPTS, SETTINGS, V, columns, excess
from tiny import llama_params, run, sampling, start, uncached

from jspec.config import ModelConfig
from jspec.decode import DecodeConfig
from jspec.drafters.adaptive import Adaptive
from jspec.drafters.early_exit import EarlyExit
from jspec.exits import own_exit
from jspec.model import llama
from pallas_kernels.paged_attention import reference as paged_attention

CONFIG = ModelConfig(V, 8, 8, 3, 1, 1, 2, 4096)
MODEL = llama(CONFIG)


def markov_llama():
    params = llama_params(7, jnp.float32, CONFIG)
    layers = tuple(x.replace(o=jnp.zeros_like(x.o)) for x in params.layers)
    return params.replace(layers=layers, embed=params.embed * 0.3, lm_head=params.lm_head * 4)


PARAMS = markov_llama()
EXIT = own_exit(PARAMS)
TABLE = np.asarray(uncached(MODEL, PARAMS, jnp.arange(V)[:, None])[0][:, 0], np.float64)
DRAFTERS = {
    "early exit that stops": (EarlyExit(CONFIG, 1, 3, stop=0.5), EXIT),
    "adaptive": (Adaptive(CONFIG, 1, 3, 0.5, deeper=(2,)), (EXIT, EXIT)),
}
NAMES = ("plain", "top_p", "everything", "greedy")
ROWS = 3_000


@pytest.mark.parametrize("name", DRAFTERS)
def test_joint_law(name, monkeypatch):
    """Rows of all settings under both rules, in one batch."""
    monkeypatch.setattr(paged_attention, "KEY_TILE", 16)
    drafter, exits = DRAFTERS[name]
    groups = [SETTINGS[group] for group in NAMES for _ in range(2)]
    rows = {key: np.repeat(x, ROWS, axis=0) for key, x in columns(groups).items()}
    prompts = [PROMPTS[g % len(PROMPTS)] for g in range(len(groups)) for _ in range(ROWS)]
    min_tokens, stop_ids = rows.pop("min_tokens"), rows.pop("stop_ids")
    coupled = np.repeat([False, True] * len(NAMES), ROWS)
    config = DecodeConfig(MODEL, drafter, (4,), prefill_chunk=8)
    state = start(
        config,
        prompts,
        max_tokens=NUM_TOKENS,
        min_tokens=min_tokens,
        settings=sampling(len(prompts), vocab_size=V, coupled=coupled, **rows),
        stop_ids=stop_ids,
        capacity=16,
    )
    state = run(config, (PARAMS, (PARAMS, exits)), state)
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    places = np.array([len(prompt) for prompt in prompts])[:, None] + np.arange(NUM_TOKENS)
    emitted = np.take_along_axis(tokens, np.minimum(places, lengths[:, None] - 1), axis=1)
    wrong = []
    for g, group in enumerate(groups):
        law = reference.joint_law(TABLE, tuple(PROMPTS[g % len(PROMPTS)]), NUM_TOKENS, **group)
        if excess(emitted[g * ROWS : (g + 1) * ROWS], law) >= 0:
            wrong.append((NAMES[g // 2], "coupled" if g % 2 else "rejection"))
    assert wrong == []
    drafted = np.asarray(state.log.drafted)[:, 0]
    assert 0 < np.mean(drafted) < 3  # drafts, and stops


def test_the_exits_differ_and_are_sometimes_sure():
    """So that a law handed out for another's would be seen."""
    from jspec.exits import exit_logits

    hidden = uncached(MODEL, PARAMS, jnp.arange(V)[:, None])[1]
    laws = []
    for layer in (1, 2):
        logits = exit_logits(EXIT, hidden[layer], eps=CONFIG.rms_norm_eps, vocab_size=V)[:, 0]
        laws.append(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    sure = [law.max(axis=1) >= 0.5 for law in laws]
    assert 0 < sure[0].sum() < V
    assert (~sure[0] & sure[1]).any()
    assert np.abs(laws[0] - laws[1]).max() > 0.2
