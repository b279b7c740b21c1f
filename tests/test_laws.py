"""The law of what is emitted is the target's own, whatever is drafted.

A Markov target over five tokens lets the joint law of the first three tokens be enumerated. Each
case runs 20,000 rows, one seed a row, and compares counts by chi-square. The threshold lets a
right engine fail once in 10,000 runs a case (scipy's quantile for the cells at hand).
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import TableDrafter, markov, rows_of, run, sampling, start

from jspec.decode import DecodeConfig
from jspec.drafters.draft_model import DraftModel
from jspec.drafters.ngram import NgramDrafter
from jspec.drafters.none import NoDrafter
from jspec.sampling import probs_from_logits

V, ROWS, NUM_TOKENS = 5, 20_000, 3
PROMPT = [1, 2, 1]
RNG = np.random.default_rng(5)
TARGET = jnp.asarray(RNG.normal(size=(V, V)) * 1.5, jnp.float32)
NEAR = TARGET + jnp.asarray(RNG.normal(size=(V, V)), jnp.float32)
OUTSIDE = jnp.where(jnp.arange(V) < 2, -jnp.inf, NEAR)  # never drafts 0 or 1

SETTINGS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.15},
    "all": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
}
DRAFTERS = {
    "none": (NoDrafter(), ()),
    "soft": (TableDrafter(3), NEAR),
    "perfect": (TableDrafter(3), TARGET),
    "one-hot": (TableDrafter(3, deterministic=True), NEAR),
    "worst token first": (TableDrafter(3, deterministic=True), -TARGET),
    "partly outside": (TableDrafter(3), OUTSIDE),
    "opposite": (TableDrafter(3), -TARGET),
    "ngram": (NgramDrafter(3), ()),
    "draft model": (DraftModel(markov(V), V, 3), NEAR),
}


def enumerated(settings) -> np.ndarray:
    """`[V, V, V]`: the target's joint law of the first three tokens."""
    law = np.asarray(probs_from_logits(TARGET[:, None], sampling(V, **settings)))[:, 0]
    joint = np.zeros((V,) * NUM_TOKENS)
    for tokens in itertools.product(range(V), repeat=NUM_TOKENS):
        path = [PROMPT[-1], *tokens]
        joint[tokens] = np.prod([law[a, b] for a, b in itertools.pairwise(path)])
    return joint


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """The statistic and the value that a right engine exceeds once in 10,000 runs.

    Cells expected fewer than five times are pooled.
    """
    expected = law * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token outside the target's support was emitted"
    large = expected >= 5
    cells = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    keep = wanted > 0
    statistic = ((cells[keep] - wanted[keep]) ** 2 / wanted[keep]).sum()
    return float(statistic), float(stats.chi2.ppf(1 - 1e-4, keep.sum() - 1))


def emitted(drafter, params, settings, coupled) -> np.ndarray:
    """`[ROWS, 3]` tokens; the last row's padding and mixed seeds come with the batch."""
    config = DecodeConfig(markov(V), drafter, (4,))
    rows = sampling(ROWS, coupled=coupled, **settings)
    state = start(config, [PROMPT] * ROWS, max_tokens=NUM_TOKENS, settings=rows, capacity=16)
    return np.array(rows_of(run(config, (TARGET, params), state)))[:, len(PROMPT) :]


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joint_law_of_three_tokens(drafter, settings, coupled):
    tokens = emitted(*DRAFTERS[drafter], SETTINGS[settings], coupled)
    counts = np.zeros((V,) * NUM_TOKENS)
    np.add.at(counts, tuple(tokens.T), 1)
    statistic, threshold = chi_square(counts, enumerated(SETTINGS[settings]))
    assert statistic < threshold


def test_the_test_sees_a_wrong_law():
    """The counts of one setting are rejected for another close to it."""
    tokens = emitted(*DRAFTERS["none"], SETTINGS["plain"], False)
    counts = np.zeros((V,) * NUM_TOKENS)
    np.add.at(counts, tuple(tokens.T), 1)
    statistic, threshold = chi_square(counts, enumerated({"temperature": 1.06}))
    assert statistic > threshold
