"""Both implementations of the rejection kernels against the rules written anew in float64.

Coins keep away from the thresholds, so how many drafts stand is exact; tokens are exact too, but
for near ties of a race, which the fixed seeds do not hold. Kernels are interpreted: memory that
no block has written is NaN or the largest integer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import draws
from pallas_kernels import rejection_sampling
from pallas_kernels.rejection_sampling import kernel_sm90, reference

IMPLEMENTATIONS = ("xla", "interpret")
B = 3
SEED = 35  # see test_the_cases_hold_every_outcome
CASES = [  # V, K, soft
    (17, 0, True),
    (17, 3, True),
    (1000, 3, False),
    (8195, 1, True),  # two chunks that overlap, 513 groups of which the last is padded
    (32000, 7, True),
]
SIBLINGS = [  # V, S, soft, from logits
    (17, 3, True, True),
    (17, 3, False, False),
    (1000, 1, True, False),
    (8195, 3, False, True),
    (8195, 2, True, False),
]


class Case(NamedTuple):
    """Arguments, and the laws in float64."""

    tokens: np.ndarray
    probs: np.ndarray | None
    num_drafted: np.ndarray
    logits: np.ndarray
    scale: np.ndarray
    coins: np.ndarray
    keys: tuple[np.ndarray, np.ndarray]
    law: np.ndarray
    draft_law: np.ndarray

    @property
    def drafts(self):
        return self.tokens, self.probs, self.num_drafted


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def make_case(V, K, soft, places=None):
    """Rows with their own temperatures and numbers of drafts; a third of the tokens are not
    allowed; drafts come from a law near the target's, or are certain."""
    rng = np.random.default_rng(SEED + V + K + soft)
    logits = (rng.normal(size=(B, K + 1 if places is None else places, V)) * 3).astype(np.float32)
    logits[rng.random(logits.shape) < 1 / 3] = -np.inf
    scale = rng.uniform(0.5, 2, B).astype(np.float32)
    law = softmax(logits.astype(np.float64) * scale[:, None, None])
    near = np.broadcast_to(law[:, :1], (B, K, V)) if places else law[:, :K]
    other = rng.dirichlet(np.ones(V), size=(B, K)).reshape(B, K, V)
    draft_law = (0.7 * near + 0.3 * other).astype(np.float32)
    uniform = rng.random((B, K, 1)) * draft_law.sum(axis=-1, keepdims=True, dtype=np.float64)
    tokens = np.sum(np.cumsum(draft_law, axis=-1, dtype=np.float64) < uniform, axis=-1)
    tokens = np.minimum(tokens, V - 1).astype(np.int32)
    if not soft:
        best = np.argsort(-near, axis=-1).astype(np.int32)
        tokens = best[:, 0, :K] if places else best[..., 0]
        draft_law = np.eye(V, dtype=np.float32)[tokens]
    coins = rng.random((B, K)) ** (1 if places else 2) * np.array([[0.2], [1.0], [0.2]])
    return Case(
        tokens,
        draft_law if soft else None,
        np.minimum([K, K, K - 1], K).clip(0).astype(np.int32),
        logits,
        scale,
        coins.astype(np.float32),
        tuple(rng.integers(0, 2**32, (2, B, K + 1), dtype=np.uint32)),
        law,
        draft_law.astype(np.float64),
    )


def judge(law, draft_law, token, coin, total=1.0):
    """Whether a draft stands, and what is left of the law if not."""
    threshold = coin * draft_law[token] * total
    assert abs(threshold - law[token]) > 1e-6 * max(threshold, law[token])
    return threshold < law[token], np.maximum(law - total * draft_law, 0)


def expected_chain(case):
    accepted, tokens = [], []
    for b in range(B):
        for j in range(case.num_drafted[b] + 1):
            left = case.law[b, j]
            if j == case.num_drafted[b]:
                break
            draft = case.draft_law[b, j], case.tokens[b, j], case.coins[b, j]
            stands, residual = judge(left, *draft)
            if not stands:
                left = residual if residual.sum() > 0 else left
                break
        accepted.append(j)
        tokens.append(race(left, case.keys[0][b, j], case.keys[1][b, j]))
    return accepted, tokens


def expected_siblings(case):
    accepted, tokens = [], []
    S = case.tokens.shape[1]
    for b in range(B):
        left, total, child = case.law[b, 0], 1.0, S
        for s in range(case.num_drafted[b]):
            draft = case.draft_law[b, s], case.tokens[b, s], case.coins[b, s]
            stands, residual = judge(left, *draft, total)
            if stands:
                child = s
                break
            left, total = residual, residual.sum()
        accepted.append(child)
        tokens.append(race(left, case.keys[0][b, 0], case.keys[1][b, 0]))
    return accepted, tokens


def race(weights, *key):
    return int(draws.draw_weighted(jnp.asarray(weights, jnp.float32), tuple(map(jnp.uint32, key))))


def call(name, *args, implementation):
    function = functools.partial(getattr(rejection_sampling, name), implementation=implementation)
    decision = jax.jit(function)(*jax.tree.map(jnp.asarray, args))[:2]
    return [x.tolist() for x in decision]


@functools.cache
def chain(V, K, soft):
    case = make_case(V, K, soft)
    return case, expected_chain(case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("V", "K", "soft"), CASES)
def test_a_chain_by_rejection(V, K, soft, implementation):
    case, expected = chain(V, K, soft)
    args = (*case.drafts, case.logits, case.scale, case.coins, case.keys)
    found = call("rejection_from_logits", *args, implementation=implementation)
    assert found == list(expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["rejection_from_logits", "coupled_from_logits"])
def test_peaks_tell_which_places_have_a_law(name, implementation):
    case = make_case(8195, 3, soft=False)
    logits = case.logits.copy()
    logits[0, 1], logits[1, 2, 77], logits[2, 3, 5] = -np.inf, np.nan, np.inf
    drafts = case.drafts if name == "rejection_from_logits" else (case.tokens, case.num_drafted)
    coins = (case.coins,) if name == "rejection_from_logits" else ()
    args = jax.tree.map(jnp.asarray, (*drafts, logits, case.scale, *coins, case.keys))
    function = functools.partial(getattr(rejection_sampling, name), implementation=implementation)
    peaks = np.asarray(jax.jit(function)(*args).peaks)
    np.testing.assert_array_equal(np.isfinite(peaks), np.isfinite(logits.max(axis=-1)))
    np.testing.assert_array_equal(peaks[0, 1], -np.inf)
    np.testing.assert_array_equal(peaks[:, 0], logits[:, 0].max(axis=-1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("V", "K", "soft"), CASES[2:4])
def test_a_chain_by_rejection_from_probabilities(V, K, soft, implementation):
    case, expected = chain(V, K, soft)
    args = (*case.drafts, case.law.astype(np.float32), case.coins, case.keys)
    assert call("rejection", *args, implementation=implementation) == list(expected)


def test_the_cases_hold_every_outcome():
    """Rejections, full acceptance, and the end of a short draft, of soft and certain drafts; of
    children the first that stands, a later one, or none."""
    outcomes = set()
    for V, K, soft in CASES:
        case, (accepted, _) = chain(V, K, soft)
        for n, drafted in zip(accepted, case.num_drafted, strict=True):
            outcomes.add((soft, "all" if n == K else "short" if n == drafted else "rejected"))
    for V, S, soft, _ in SIBLINGS:
        _, (accepted, _) = children(V, S, soft)
        outcomes |= {(soft, "none" if n == S else "later" if n else "first") for n in accepted}
    assert len(outcomes) == 12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("V", "K", "soft"), [CASES[0], CASES[3]])
def test_a_coupled_chain_is_the_targets_own_draws(V, K, soft, implementation):
    case, _ = chain(V, K, soft)
    scale = jnp.broadcast_to(jnp.asarray(case.scale)[:, None], (B, K + 1))
    law = draws.law_of(jnp.asarray(case.logits), scale)
    tokens = np.asarray(draws.draw(law, tuple(map(jnp.asarray, case.keys))))
    drafts = tokens[:, :K].copy()
    drafts[1, K // 2 :] += 1  # the second row's drafts are wrong from there on
    accepted = [case.num_drafted[0], K // 2, case.num_drafted[2]]
    args = (drafts, case.num_drafted, case.logits, case.scale, case.keys)
    found = call("coupled_from_logits", *args, implementation=implementation)
    assert found == [accepted, [tokens[b, n] for b, n in enumerate(accepted)]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("which", [[True] * B, [False] * B, [False, True] * B])
def test_each_row_gets_the_rule_that_it_asks_for(which, implementation):
    case, _ = chain(*CASES[3])
    coupled = np.array(which[:B])
    law = (case.logits, case.scale)
    args = (*case.drafts, *law, case.coins, case.keys, coupled)
    found = np.array(call("chain_from_logits", *args, implementation=implementation))
    matched = call(
        "coupled_from_logits", case.tokens, case.num_drafted, *law, case.keys, implementation="xla"
    )
    rejected = call(
        "rejection_from_logits", *case.drafts, *law, case.coins, case.keys, implementation="xla"
    )
    assert found.tolist() == np.where(coupled, matched, rejected).tolist()
    assert matched != rejected


@functools.cache
def children(V, S, soft):
    case = make_case(V, S, soft, places=1)
    return case, expected_siblings(case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("V", "S", "soft", "from_logits"), SIBLINGS)
def test_siblings_one_after_another(V, S, soft, from_logits, implementation):
    case, (accepted, tokens) = children(V, S, soft)
    key = tuple(word[:, 0] for word in case.keys)
    if from_logits:
        name, target = "siblings_from_logits", (case.logits[:, 0], case.scale)
    else:
        name, target = "siblings", (case.law[:, 0].astype(np.float32),)
    args = (*case.drafts, *target, case.coins, key)
    found = call(name, *args, implementation=implementation)
    assert found[0] == accepted
    for n, token, want in zip(*found, tokens, strict=True):
        assert token == want if n == S else 0 <= token < V


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft", [True, False])
def test_where_nothing_is_left_the_target_speaks(soft, implementation):
    """Soft: the draft's law is the target's, and the draft a token that neither says. Certain: the
    target says nothing but the draft, and the coin is one."""
    law = np.float32([0.25, 0.25, 0.0, 0.25, 0.25] if soft else [0, 1, 0, 0, 0])
    token = np.full((1, 1), 2 if soft else 1, np.int32)
    probs = law[None, None] if soft else None
    drafted, coins, key = np.ones(1, np.int32), np.ones((1, 1), np.float32), np.uint32([[3], [4]])
    want = [[0], [race(law, 3, 4)]]
    keys = tuple(np.repeat(key[:, None], 2, axis=2))
    target = np.stack([law, law])[None]
    args = (token, probs, drafted, target, coins, keys)
    assert call("rejection", *args, implementation=implementation) == want
    twice = np.repeat(token, 2, axis=1), None if probs is None else np.repeat(probs, 2, axis=1)
    args = (*twice, drafted + 1, law[None], np.repeat(coins, 2, axis=1), tuple(key))
    assert call("siblings", *args, implementation=implementation) == [[2], want[1]]


@pytest.mark.parametrize("soft", [True, False])
def test_siblings_do_not_change_the_law(soft):
    """Drafts from laws of their own, or certain ones; 2**17 rows, so 5 standard deviations are
    less than 0.007. A short row stops behind its first child."""
    rng, V, N, S = np.random.default_rng(2), 5, 2**17, 3
    law = np.float32([0.05, 0.4, 0.25, 0.3, 0.0])
    laws = np.float32(rng.dirichlet(np.ones(V), size=S))
    laws[2] = laws[1]
    tokens = np.stack([rng.choice(V, N, p=np.float64(q) / np.float64(q).sum()) for q in laws], 1)
    if not soft:
        tokens = np.tile([1, 3, 1], (N, 1))
    num_drafted = rng.integers(1, S + 1, N).astype(np.int32)
    probs = jnp.broadcast_to(laws, (N, S, V)) if soft else None
    coins = rng.random((N, S), dtype=np.float32)
    key = tuple(jnp.asarray(rng.integers(0, 2**32, (2, N), dtype=np.uint32)))
    accepted, token = jax.jit(reference.siblings)(
        jnp.asarray(tokens, jnp.int32),
        probs,
        jnp.asarray(num_drafted),
        jnp.broadcast_to(law, (N, V)),
        jnp.asarray(coins),
        key,
    )
    accepted, token = np.asarray(accepted), np.asarray(token)
    chosen = tokens[np.arange(N), np.minimum(accepted, S - 1)]
    emitted = np.where(accepted < S, chosen, token)
    for rows in (num_drafted == 1, num_drafted == S, num_drafted > 0):
        found = np.bincount(emitted[rows], minlength=V) / rows.sum()
        np.testing.assert_allclose(found, law, atol=5 * np.sqrt(0.25 / rows.sum()))


def test_sixteen_bit_logits_are_read_as_they_are():
    case, _ = chain(17, 3, True)
    logits = jnp.asarray(case.logits, jnp.bfloat16)
    args = (*case.drafts, logits, case.scale, case.coins, case.keys)
    wide = (*case.drafts, logits.astype(jnp.float32), case.scale, case.coins, case.keys)
    want = call("rejection_from_logits", *wide, implementation="xla")
    for implementation in IMPLEMENTATIONS:
        assert call("rejection_from_logits", *args, implementation=implementation) == want


@pytest.mark.parametrize("soft", [True, False])
def test_what_every_subtraction_leaves(soft):
    """Of laws in two chunks that overlap; rows subtract three times, once and not at all, and the
    last is not asked for."""
    rng, V, S = np.random.default_rng(4), 8195, 3
    laws = rng.dirichlet(np.full(V, 0.1), size=(4, S + 1)).astype(np.float32)
    factors = np.float32(rng.uniform(0.1, 1, (4, S)))
    count = np.array([3, 1, 0, -1], np.int32)
    tokens = np.argmax(laws[:, 1:], axis=-1).astype(np.int32)
    draft_law = np.float64(laws[:, 1:]) if soft else np.eye(V)[tokens]
    want = np.zeros((4, S + 1))
    for b, n in enumerate(count):
        left = np.float64(laws[b, 0])
        for s in range(n + 1):
            want[b, s] = left.sum()
            if s < n:
                left = np.maximum(left - (factors[b, s] if soft else 1) * draft_law[b, s], 0)
    nowhere = jnp.zeros((4,), jnp.int32)
    target = kernel_sm90._Target(jnp.asarray(laws[:, :1]), None)
    probs = jnp.asarray(laws[:, 1:]) if soft else None
    drafts = kernel_sm90._Drafts(jnp.asarray(tokens), probs, nowhere, jnp.asarray(factors))
    key = (jnp.ones((4,), jnp.uint32),) * 2
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        sums, _ = kernel_sm90._stages(target, nowhere, drafts, jnp.asarray(count), key)
    np.testing.assert_allclose(sums, want, rtol=1e-5)


def test_every_partial_result_is_written(monkeypatch):
    """By rows that subtract all their children, one, and none."""
    launch, outputs = kernel_sm90._launch, []

    def recorded(*args):
        outputs.append(launch(*args))
        return outputs[-1]

    monkeypatch.setattr(kernel_sm90, "_launch", recorded)
    case, _ = children(17, 3, False)
    key = tuple(word[:, 0] for word in case.keys)
    for probs in (None, np.float32(case.draft_law)):
        coins = np.float32([[1, 1, 1], [0, 0, 0], [1, 1, 1]])
        args = (case.tokens, probs, case.num_drafted, case.logits[:, 0], case.scale, coins, key)
        args = jax.tree.map(jnp.asarray, args)
        rejection_sampling.siblings_from_logits(*args, implementation="interpret")
    coupled = (case.tokens[:, :0], case.num_drafted * 0, case.logits, case.scale, case.keys)
    coupled = jax.tree.map(lambda x: jnp.asarray(x[:, :1] if x.dtype == np.uint32 else x), coupled)
    rejection_sampling.coupled_from_logits(*coupled, implementation="interpret")
    assert len(outputs) == 7
    for out in outputs:
        for x in out:
            written = x < 2**31 - 1 if x.dtype == jnp.int32 else jnp.isfinite(x)
            assert written.all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"draft_tokens": np.zeros((2, 3), np.int64)}, TypeError, "draft_tokens: int32 is needed"),
        ({"draft_probs": np.zeros((2, 3, 8), np.float32)}, ValueError, "draft_probs: shape"),
        ({"num_drafted": np.zeros((3,), np.int32)}, ValueError, "num_drafted: shape"),
        ({"logits": np.zeros((2, 3, 9), np.float32)}, ValueError, "logits: shape"),
        ({"logits": np.zeros((2, 4, 9), np.float16)}, TypeError, "logits: float32 or bfloat16"),
        ({"scale": np.zeros((2, 1), np.float32)}, ValueError, "scale: shape"),
        ({"coins": np.zeros((2, 4), np.float32)}, ValueError, "coins: shape"),
        ({"keys": (np.zeros((2, 4), np.int32),) * 2}, TypeError, r"keys\[0\]: uint32 is needed"),
    ],
)
def test_arguments_out_of_contract_are_named(change, error, message):
    good = {
        "draft_tokens": np.zeros((2, 3), np.int32),
        "draft_probs": None,
        "num_drafted": np.zeros((2,), np.int32),
        "logits": np.zeros((2, 4, 9), np.float32),
        "scale": np.ones((2,), np.float32),
        "coins": np.zeros((2, 3), np.float32),
        "keys": (np.zeros((2, 4), np.uint32),) * 2,
    }
    with pytest.raises(error, match=message):
        rejection_sampling.rejection_from_logits(**(good | change))


def test_a_node_without_children_is_refused():
    none, law = np.zeros((2, 0), np.int32), np.ones((2, 9), np.float32)
    key = (np.zeros((2,), np.uint32),) * 2
    with pytest.raises(ValueError, match="draft_tokens: no children"):
        rejection_sampling.siblings(
            none, None, np.zeros((2,), np.int32), law, np.zeros((2, 0), np.float32), key
        )
