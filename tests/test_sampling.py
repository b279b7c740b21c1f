import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import sampling

from jspec.sampling import Purpose, draw, gumbel_noise, probs_from_logits, uniform_draw


def reference(logits, temperature, top_k, top_p, min_p):
    """The same law by sorting, in float64."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    x = np.asarray(logits, np.float64) / temperature
    x[x < x.max() + np.log(min_p or 1e-300)] = -np.inf
    if top_k:
        x[x < np.sort(x)[::-1][min(top_k, len(x)) - 1]] = -np.inf
    law = np.exp(x - x.max())
    law /= law.sum()
    if top_p < 1:
        order = np.sort(law)[::-1]
        kept = min(int(np.searchsorted(np.cumsum(order), top_p - 1e-9)) + 1, len(law))
        law[law < order[kept - 1]] = 0
        law /= law.sum()
    return law


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.integers(0, 7),
    st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0]),
    st.sampled_from([0.0, 0.07, 0.5, 1.0]),
)
def test_filters_equal_a_sorting_reference(logits, temperature, top_k, top_p, min_p):
    """Logits on a grid of 1/8 have ties, which must all be kept."""
    logits = np.array(logits) / 8
    rows = sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probs_from_logits(jnp.asarray(logits, jnp.float32)[None, None], rows)[0, 0]
    np.testing.assert_allclose(got, reference(logits, temperature, top_k, top_p, min_p), atol=1e-5)


def test_rows_keep_their_own_settings():
    logits = jax.random.normal(jax.random.key(0), (5, 2, 50), jnp.float32)
    rows = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 1.0],
        "top_k": [0, 0, 3, 0, 7],
        "top_p": [1.0, 0.5, 1.0, 0.9, 0.8],
        "min_p": [0.0, 0.0, 0.0, 0.2, 0.1],
    }
    got = probs_from_logits(logits, sampling(5, **rows))
    for b in range(5):
        want = [reference(row, *(rows[k][b] for k in rows)) for row in np.asarray(logits[b])]
        np.testing.assert_allclose(got[b], want, atol=1e-5)


def test_top_k_and_top_p_cut_where_they_should():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.15, 0.1]]]))
    law = lambda **k: probs_from_logits(logits, sampling(1, temperature=1.0, **k))[0, 0]  # noqa: E731
    np.testing.assert_allclose(law(top_k=2), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_p=0.7), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_p=0.76), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], atol=1e-6)
    np.testing.assert_allclose(law(min_p=0.4), [2 / 3, 1 / 3, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_k=4), [0.5, 0.25, 0.15, 0.1], atol=1e-6)


def test_a_draw_depends_on_seed_position_and_purpose_alone():
    law = jnp.full((3, 2, 40), 1 / 40)
    rows = sampling(3, temperature=1.0, seed=[7, 8, 7])
    where = jnp.array([[5, 6], [5, 6], [6, 5]])
    got = draw(law, rows, where, Purpose.TARGET)
    assert got[0].tolist() == got[2, ::-1].tolist()
    assert got[0].tolist() != got[1].tolist()
    alone = draw(law[:1], sampling(1, temperature=1.0, seed=[7]), where[:1], Purpose.TARGET)
    assert alone[0].tolist() == got[0].tolist()
    noise = [gumbel_noise(rows.seed, where, purpose, 40) for purpose in Purpose]
    assert len({float(x[0, 0, 0]) for x in noise}) == len(Purpose)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size():
    """So that a draft model whose vocabulary is padded differently shares the target's noise."""
    seed, where = jnp.array([3], jnp.uint32), jnp.array([[11]])
    small, large = (gumbel_noise(seed, where, Purpose.TARGET, v) for v in (50, 77))
    np.testing.assert_array_equal(small[0, 0], large[0, 0, :50])


@pytest.mark.parametrize("purpose", list(Purpose))
def test_draws_follow_their_law(purpose):
    """Chi-square of 20,000 draws, 4 degrees of freedom: over 23.5 once in 10,000 runs."""
    law = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    rows = sampling(20_000, temperature=1.0)
    got = draw(
        jnp.broadcast_to(jnp.asarray(law, jnp.float32), (20_000, 1, 5)),
        rows,
        jnp.full((20_000, 1), 3),
        purpose,
    )
    counts = np.bincount(np.asarray(got)[:, 0], minlength=5)
    assert counts[4] == 0
    expected = law[:4] * 20_000
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 23.5


def test_uniform_draws_are_uniform():
    seeds = jnp.arange(20_000, dtype=jnp.uint32)
    got = uniform_draw(seeds, jnp.full((20_000, 1), 9), Purpose.ACCEPT)
    counts = np.histogram(np.asarray(got), bins=10, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 33.7  # 9 degrees of freedom, once in 10,000
