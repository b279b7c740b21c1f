import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import sampling

from jspec import draws
from jspec.draws import Purpose, argmax
from jspec.sampling import Prefix, chain_prefix, draw_key, probs_from_logits, process_logits

V = 6


def nothing_before(rows: int, places: int = 1) -> Prefix:
    """Places of a text that is not looked at."""
    zeros = jnp.zeros((rows,), jnp.int32)
    return Prefix(
        tokens=jnp.zeros((rows, 1), jnp.int32),
        lengths=zeros,
        drafts=jnp.zeros((rows, places, 0), jnp.int32),
        depths=jnp.zeros((places,), jnp.int32),
    )


@jax.jit
def law_of_chain(logits, rows, tokens, lengths, drafts):
    return probs_from_logits(logits, rows, chain_prefix(tokens, lengths, drafts))


TOKENS = st.integers(0, V - 1)


@st.composite
def places(draw_, temperatures=(0.0, 0.3, 1.0, 2.0)):
    """Settings of one row, and a text of prompt, output and drafts. Logits on a grid of 1/8 have
    ties, which filters must all keep."""
    return {
        "logits": draw_(
            st.lists(st.lists(st.integers(-40, 40), min_size=V, max_size=V), min_size=4, max_size=4)
        ),
        "prompt": draw_(st.lists(TOKENS, min_size=1, max_size=4)),
        "output": draw_(st.lists(TOKENS, max_size=3)),
        "drafts": draw_(st.lists(TOKENS, min_size=3, max_size=3)),
        "settings": {
            "temperature": draw_(st.sampled_from(temperatures)),
            "top_k": draw_(st.integers(0, V + 1)),
            "top_p": draw_(st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0])),
            "min_p": draw_(st.sampled_from([0.0, 0.07, 0.5, 1.0])),
            "repetition_penalty": draw_(st.sampled_from([1.0, 1.25, 2.0, 0.5])),
            "presence_penalty": draw_(st.sampled_from([0.0, 0.75, -0.5])),
            "frequency_penalty": draw_(st.sampled_from([0.0, 0.25, -0.5])),
            "bias": draw_(
                st.lists(st.sampled_from([0.0, 1.5, -2.0, -np.inf]), min_size=V, max_size=V)
            ),
            "bad_words": draw_(
                st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=2)
            ),
            "stop_ids": draw_(st.lists(TOKENS, min_size=1, max_size=1)),
            "min_tokens": draw_(st.integers(0, 5)),
        },
    }


def engine_settings(wanted, num_prompt):
    """Of `sampling()`, from those of the reference."""
    given_ = dict(wanted)
    min_tokens = given_.pop("min_tokens")
    words = given_.pop("bad_words")
    padded = np.full((2, 3), -1)
    for row, word in zip(padded, words, strict=False):
        row[3 - len(word) :] = word
    return given_ | {
        "bad_words": padded,
        "prompt_lengths": num_prompt,
        "min_lengths": num_prompt + min_tokens,
    }


@settings(max_examples=300, deadline=None, derandomize=True)
@given(places())
def test_the_law_of_every_place_equals_a_plain_reference(case):
    """All settings at once, at four places of which three have drafts before them."""
    prompt, output, drafts = case["prompt"], case["output"], case["drafts"]
    committed = [*prompt, *output]
    rows = sampling(1, vocab_size=V, **engine_settings(case["settings"], len(prompt)))
    tokens = np.full((1, 12), 5, np.int32)
    tokens[0, : len(committed)] = committed
    logits = np.array(case["logits"]) / 8
    got = law_of_chain(
        jnp.asarray(logits[None], jnp.float32),
        rows,
        jnp.asarray(tokens),
        jnp.array([len(committed)], jnp.int32),
        jnp.array([drafts], jnp.int32),
    )[0]
    for j in range(4):
        text = [*committed, *drafts[:j]]
        after = reference.processed(logits[j], text, num_prompt=len(prompt), **case["settings"])
        if np.all(after == -np.inf):
            assert np.all(np.asarray(got[j]) == 0)
        else:
            want = reference.law(logits[j], text, num_prompt=len(prompt), **case["settings"])
            np.testing.assert_allclose(got[j], want, atol=2e-5)


def test_rows_keep_their_own_settings():
    logits = jax.random.normal(jax.random.key(0), (5, 2, 50), jnp.float32)
    rows = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 1.0],
        "top_k": [0, 0, 3, 0, 7],
        "top_p": [1.0, 0.5, 1.0, 0.9, 0.8],
        "min_p": [0.0, 0.0, 0.0, 0.2, 0.1],
    }
    got = probs_from_logits(logits, sampling(5, vocab_size=50, **rows), nothing_before(5, 2))
    for b in range(5):
        want = [
            reference.law(row, [], **{k: rows[k][b] for k in rows}) for row in np.asarray(logits[b])
        ]
        np.testing.assert_allclose(got[b], want, atol=1e-5)


def test_top_k_and_top_p_cut_where_they_should():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.15, 0.1]]]))

    def law(**wanted):
        rows = sampling(1, vocab_size=4, temperature=1.0, **wanted)
        return probs_from_logits(logits, rows, nothing_before(1))[0, 0]

    np.testing.assert_allclose(law(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_p=0.7), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_p=0.76), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], atol=1e-6)
    np.testing.assert_allclose(law(min_p=0.4), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_k=4), [0.5, 0.25, 0.15, 0.1], atol=1e-6)


def test_a_processor_sees_the_text_before_each_place():
    """Its own place, the tokens before it, drafts among them, and -1 behind."""
    seen = []

    def processor(logits, tokens, position):
        jax.debug.callback(lambda *args: seen.append(args), tokens, position)
        return jnp.where(jnp.arange(4) == position % 4, -jnp.inf, logits)

    rows = sampling(1, vocab_size=4, temperature=1.0).replace(processor=processor)
    prefix = chain_prefix(jnp.array([[3, 1, 9, 9, 9, 9]]), jnp.array([2]), jnp.array([[2, 0]]))
    out = process_logits(jnp.zeros((1, 3, 4)), rows, prefix)
    jax.effects_barrier()
    forbidden = [np.flatnonzero(np.asarray(row) == -np.inf).tolist() for row in out[0]]
    assert forbidden == [[2], [3], [0]]
    texts = {int(position): tokens.tolist() for tokens, position in seen}
    assert texts == {
        2: [3, 1, -1, -1, -1, -1],
        3: [3, 1, 2, -1, -1, -1],
        4: [3, 1, 2, 0, -1, -1],
    }


def test_nan_is_not_filtered_away():
    logits = jnp.array([[[1.0, jnp.nan, 3.0, 2.0]]])
    for wanted in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"repetition_penalty": 2.0}):
        rows = sampling(1, vocab_size=4, temperature=1.0, **wanted)
        assert jnp.isnan(process_logits(logits, rows, nothing_before(1))).any()


# Draws


def test_the_generator_is_that_of_jax():
    seed = jnp.array([7, 2**32 - 1], jnp.uint32)
    key = draws.draw_key(seed, jnp.array([5, 123456]), Purpose.ACCEPT)
    for b in range(2):
        theirs = jax.random.key(seed[b])
        for word in ((5, 123456)[b], int(Purpose.ACCEPT)):
            theirs = jax.random.fold_in(theirs, word)
        assert jax.random.key_data(theirs).tolist() == [int(key[0][b]), int(key[1][b])]
        ours = draws.random_bits((key[0][b], key[1][b]), 0, jnp.arange(50))
        np.testing.assert_array_equal(ours, jax.random.bits(theirs, (50,)))


def drawn(logits, rows, positions, purpose, scale=1.0):
    scales = jnp.full(logits.shape[:-1], scale, jnp.float32)
    return draws.draw(draws.law_of(logits, scales), draw_key(rows, positions, purpose))


def test_a_draw_depends_on_seed_position_and_purpose_alone():
    logits = jnp.zeros((3, 2, 40))
    rows = sampling(3, temperature=1.0, seed=[7, 8, 7])
    where = jnp.array([[5, 6], [5, 6], [6, 5]])
    got = drawn(logits, rows, where, Purpose.TARGET)
    assert got[0].tolist() == got[2, ::-1].tolist()
    assert got[0].tolist() != got[1].tolist()
    alone = drawn(logits[:1], sampling(1, seed=[7]), where[:1], Purpose.TARGET)
    assert alone[0].tolist() == got[0].tolist()
    keys = {tuple(int(w[0, 0]) for w in draw_key(rows, where, p)) for p in Purpose}
    assert len(keys) == len(Purpose)


def chi_square(counts, law):
    expected = law * counts.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    return ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("size", [5, 40, 300])
def test_draws_follow_their_law(size, purpose):
    """Chi-square of 50,000 draws, on one, three and nineteen groups; once in 10,000 runs above
    23.5 (4 degrees of freedom), 80.3 (38) and 404 (298)."""
    rng = np.random.default_rng(size)
    law = rng.dirichlet(np.full(size, 2.0))
    law[size // 2] = 0
    law /= law.sum()
    with np.errstate(divide="ignore"):
        logits = jnp.broadcast_to(jnp.asarray(np.log(law) * 2, jnp.float32), (50_000, 1, size))
    rows = sampling(50_000, vocab_size=1)
    got = drawn(logits, rows, jnp.full((50_000, 1), 3), purpose, scale=0.5)
    counts = np.bincount(np.asarray(got)[:, 0], minlength=size)
    assert chi_square(counts, law) < {5: 23.5, 40: 80.3, 300: 404}[size]


def test_improbable_tokens_get_their_share():
    """One token of 90% and 160,000 of 6e-7 each, ten times less than the steps of a float32
    below one: the tail is drawn one time in ten (2,000 draws, five standard deviations)."""
    tail = 160_000
    logits = jnp.full((tail + 1,), np.log(0.1 / tail), jnp.float32).at[7].set(np.log(0.9))

    @jax.jit
    def one(seed):
        return drawn(
            logits[None, None],
            sampling(1, vocab_size=1).replace(seed=seed[None]),
            jnp.zeros((1, 1), jnp.int32),
            Purpose.TARGET,
        )[0, 0]

    got = np.asarray(jax.lax.map(one, jnp.arange(2_000, dtype=jnp.uint32)))
    hits = int((got != 7).sum())
    assert abs(hits - 200) < 5 * np.sqrt(2_000 * 0.09)
    assert len(set(got[got != 7].tolist())) > 0.98 * hits


def test_similar_laws_draw_the_same_token_with_the_same_key():
    rng = np.random.default_rng(3)
    a = rng.normal(size=(2_000, 1, 512)) * 4
    b = a + rng.normal(size=a.shape) * 0.5
    rows, where = sampling(2_000, vocab_size=1), jnp.zeros((2_000, 1), jnp.int32)
    tokens = [drawn(jnp.asarray(x, jnp.float32), rows, where, Purpose.TARGET) for x in (a, b)]
    probs = [np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b)]
    most = np.minimum(*probs).sum(-1).mean()  # no coupling can do better
    assert np.mean(np.asarray(tokens[0] == tokens[1])) > 0.93 * most


def test_uniform_draws_are_uniform():
    key = draws.draw_key(jnp.arange(20_000, dtype=jnp.uint32), jnp.int32(9), Purpose.ACCEPT)
    got = draws.uniform(key)
    assert got.min() >= 0
    assert got.max() < 1
    counts = np.histogram(np.asarray(got), bins=10, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 33.7  # 9 degrees of freedom, once in 10,000


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 1000])
def test_argmax_is_the_first_of_the_largest(size):
    rng = np.random.default_rng(size)
    x = rng.integers(0, 4, size=(50, size)).astype(np.float32)
    np.testing.assert_array_equal(argmax(jnp.asarray(x)), np.argmax(x, axis=1))
    assert argmax(jnp.full((2, size), -jnp.inf)).tolist() == [0, 0]


def test_one_nan_among_many_logits_is_seen():
    """XLA's maximum on a CPU overlooks it."""
    logits = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32)
    logits[1, 77] = np.nan
    want = [True, False, True]
    assert np.isfinite(jax.jit(draws.largest)(logits)[0]).tolist() == want
    law = jax.jit(draws.law_of)(logits, jnp.ones((3,)))
    assert np.isfinite(law.peak).tolist() == want
