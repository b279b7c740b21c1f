"""The law of what is emitted where the target's own layers draft and verify.

With attention that adds nothing, a Llama's next token depends on the last one alone: what each of
its exits says is a table, too, and the target's law can be enumerated (`laws.py`).
"""

import jax.numpy as jnp
import numpy as np
import pytest
from laws import Target, V, narrow_tiles, wrong_in_a_mixed_batch, wrong_where_no_row_asks
from tiny import llama_params, uncached

from jspec.config import ModelConfig
from jspec.drafters.cascade import Cascade
from jspec.drafters.early_exit import EarlyExit
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.verifiers import exit_verifier
from jspec.exits import exit_logits, own_exit
from jspec.model import llama

CONFIG = ModelConfig(V, 8, 8, 4, 1, 1, 2, 4096)
PARAMS = llama_params(3, config=CONFIG)
PARAMS = PARAMS.replace(
    layers=tuple(
        layer.replace(o=jnp.zeros_like(layer.o), down=layer.down * 4) for layer in PARAMS.layers
    ),
    final_norm=PARAMS.final_norm * 3,
)
MINE = (PARAMS, own_exit(PARAMS))
ALL = jnp.arange(V)[:, None]
TARGET = Target(
    llama(CONFIG), PARAMS, np.asarray(uncached(llama(CONFIG), PARAMS, ALL)[0][:, 0], np.float64)
)
EXIT = EarlyExit(CONFIG, 1, 2)
TWO = Cascade(EXIT, exit_verifier(CONFIG, 2), window=2)
LENIENT = Cascade(EXIT, exit_verifier(CONFIG, 2), window=2, lenience=0.3)
BELOW = MINE[1].replace(lm_head=MINE[1].lm_head[:4], token_ids=jnp.arange(4))
CASES = {
    "early exit": (EarlyExit(CONFIG, 2, 3), MINE),
    "early exit that knows four tokens": (EarlyExit(CONFIG, 2, 3), (PARAMS, BELOW)),
    "cascade of two": (TWO, (MINE, MINE)),
    "cascade of three": (Cascade(TWO, exit_verifier(CONFIG, 3), window=2), ((MINE, MINE), MINE)),
    "n-grams below an exit": (Cascade(NgramDrafter(2), exit_verifier(CONFIG, 2), 2), ((), MINE)),
    "n-grams below a lenient exit": (
        Cascade(NgramDrafter(2), exit_verifier(CONFIG, 2), 2, lenience=0.1),
        ((), MINE),
    ),
    "lenient cascade of two": (LENIENT, (MINE, MINE)),
    "lenient cascade of three": (
        Cascade(LENIENT, exit_verifier(CONFIG, 3), window=2, lenience=0.5),
        ((MINE, MINE), MINE),
    ),
    "an exit below one that knows four tokens": (TWO, (MINE, (PARAMS, BELOW))),
}


@pytest.fixture(autouse=True, scope="module")
def _():
    with narrow_tiles():
        yield


def test_exits_differ_from_the_target():
    """Else the laws below would hold whatever a cascade does."""
    hidden = uncached(TARGET.model, PARAMS, ALL)[1]
    law = np.exp(TARGET.table) / np.exp(TARGET.table).sum(-1, keepdims=True)
    assert law.min() > 0.005
    assert law.max() < 0.9
    for layer in (1, 2, 3):
        said = exit_logits(MINE[1], hidden[layer], eps=CONFIG.rms_norm_eps, vocab_size=V)[:, 0]
        own = np.exp(said) / np.exp(said).sum(-1, keepdims=True)
        assert np.abs(own - law).sum(-1).mean() > 0.15


@pytest.mark.parametrize("case", CASES)
def test_joint_law_in_a_mixed_batch(case):
    assert wrong_in_a_mixed_batch(*CASES[case], TARGET, rows_a_group=2_000) == []


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("case", CASES)
def test_joint_law_where_no_row_asks_for_anything(case, coupled):
    assert wrong_where_no_row_asks(*CASES[case], coupled, TARGET, rows_a_group=10_000) == []
