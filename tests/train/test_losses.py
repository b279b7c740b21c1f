"""Losses on literal numbers, their gradients, and the choice of a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import CONFIG

from jspec.errors import JspecError
from jspec.train import losses
from jspec.train.losses import (
    Lesson,
    certain_law,
    cross_entropy,
    smooth_l1,
    soft_cross_entropy,
    step_weights,
    target_law,
)
from jspec.train.new_head import draft_vocabulary, head_config
from jspec.train.step import Sums


def test_cross_entropy_by_hand():
    """A vocabulary of two, identity as lm_head: logits are the hidden states."""
    outputs = jnp.array([[[[0.0, 0.0], [2.0, 0.0]]], [[[0.0, 1.0], [5.0, 5.0]]]])
    target = jnp.array([[[np.log(3.0), 0.0], [0.0, 0.0]]], jnp.float32)
    weights = jnp.array([[[1.0, 0.5]], [[2.0, 0.0]]])
    loss, choice = soft_cross_entropy(outputs, target, jnp.eye(2), weights)
    first = np.log(2) + 0.5 * (np.log(np.exp(2) + 1) - 1)
    second = 2 * (0.75 * np.log(1 + np.e) + 0.25 * (np.log(1 + np.e) - 1))
    np.testing.assert_allclose(loss, [first, second], rtol=1e-6)
    assert choice.tolist() == [[[0, 0]], [[1, 0]]]


def plain(outputs, target, lm_head, weights):
    law = jax.nn.softmax(target @ lm_head.T)
    logs = jax.nn.log_softmax(outputs @ lm_head.T)
    return -jnp.sum(weights[..., None] * law * logs, axis=(1, 2, 3))


@pytest.mark.parametrize(("chunk", "groups"), [(4, 1), (512, 2)])
def test_gradient_is_that_of_plain_autodiff(monkeypatch, chunk, groups):
    """Entries without a weight, in front or at the end, take no part."""
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", chunk)
    keys = jax.random.split(jax.random.key(0), 4)
    outputs = jax.random.normal(keys[0], (2, 2, 6, 5))
    target, lm_head = jax.random.normal(keys[1], (2, 6, 5)), jax.random.normal(keys[2], (9, 5))
    weights = jax.random.uniform(keys[3], (2, 2, 6)).at[:, 0, :4].set(0).at[0, 1, 2].set(0)
    scale = jnp.array([1.0, 3.0])

    def total(function):
        return lambda x: jnp.vdot(scale, function(x))

    ours = total(lambda x: soft_cross_entropy(x, target, lm_head, weights, groups)[0])
    theirs = total(lambda x: plain(x, target, lm_head, weights))
    for mine, reference in zip(
        jax.value_and_grad(ours)(outputs), jax.value_and_grad(theirs)(outputs), strict=True
    ):
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(outputs), theirs(outputs), rtol=1e-5)


def test_gradients_where_the_output_head_learns_and_rows_stand_for_several_tokens():
    """Against plain autodiff over a vocabulary in which those rows are there several times."""
    keys = jax.random.split(jax.random.key(1), 5)
    outputs, lm_head = jax.random.normal(keys[0], (1, 2, 6, 3)), jax.random.normal(keys[1], (4, 3))
    target, teacher = jax.random.normal(keys[2], (2, 6, 5)), jax.random.normal(keys[3], (4, 5))
    weights = jax.random.uniform(keys[4], (1, 2, 6)).at[0, 1].set(0)
    lesson = Lesson(target, teacher, jnp.array([1.0, 1.0, 3.0, 2.0]))
    rows = np.array([0, 1, 2, 2, 2, 3, 3])

    def ours(outputs, lm_head):
        return 2 * cross_entropy(outputs, lm_head, lesson, weights, law=target_law)[0][0]

    def theirs(outputs, lm_head):
        law = jax.nn.softmax(target @ teacher[rows].T)
        logs = jax.nn.log_softmax(outputs @ lm_head[rows].T)
        return -2 * jnp.sum(weights[..., None] * law * logs)

    for mine, reference in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1))(outputs, lm_head)),
        jax.tree.leaves(jax.value_and_grad(theirs, (0, 1))(outputs, lm_head)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=1e-6)


def test_a_certain_law():
    law = certain_law(jnp.array([3, 9]), jnp.array([1, 3, 4]))
    assert law.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_smooth_l1_by_hand():
    carried = jnp.array([[[0.5, 3.0], [1.0, -1.0]]])
    weights = jnp.array([[2.0, 1.0]])
    assert float(smooth_l1(carried, jnp.zeros_like(carried), weights)) == pytest.approx(
        2 * (0.125 + 2.5) / 2 + (0.5 + 0.5) / 2
    )


def test_steps_weigh_less_and_less():
    assert step_weights(3) == pytest.approx((1.0, 0.8, 0.64))


def test_means_of_sums():
    numbers = ((6, 2), (3, 2), (4, 1), (2, 1), (2, 0), (4, 2))
    sums = Sums(*(np.array(pair, np.float32) for pair in numbers), np.int32(9))
    assert sums.means() == {
        "logit_loss": [2.0, 1.0],
        "hidden_loss": [1.0, 0.5],
        "agreement": [0.5, 0.5],
        "length": 1.5,
    }


def test_the_vocabulary_is_the_most_frequent_tokens_and_eos():
    counts = np.array([5, 0, 7, 7, 1, 0, 5])
    assert draft_vocabulary(counts, 3, ()).tolist() == [0, 2, 3]
    assert draft_vocabulary(counts, 3, (5,)).tolist() == [2, 3, 5]
    assert draft_vocabulary(counts, 6, ()).tolist() == [0, 1, 2, 3, 4, 6]
    assert draft_vocabulary(counts, 7, (5,)).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("family", "norms", "size", "message"),
    [
        ("mtp", True, 62, "a draft vocabulary of 62: the target has 61 tokens"),
        ("mtp", True, 0, "a draft vocabulary of 0"),
        ("eagle3", False, 40, "a head of family eagle3 has norms"),
    ],
)
def test_heads_that_cannot_be(family, norms, size, message):
    with pytest.raises(JspecError, match=message):
        head_config(family, CONFIG, draft_vocab_size=size, norms=norms, num_heads=2)
