import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import sampling

from jspec.sampling import chain_prefix
from jspec.tree import Tree
from jspec.verify import verify
from pallas_kernels import dispatch
from pallas_kernels.rejection_sampling.reference import (
    count_accepted,
    residual_at,
    verify_exact_match,
)

LAW = jnp.array([[[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]])


def places(drafts):
    """Behind a text of one token."""
    ones = jnp.ones((drafts.shape[0],), jnp.int32)
    return chain_prefix(ones[:, None], ones, drafts)


def accepted(tokens, probs, coins, drafted=2):
    flags = jnp.arange(2) < drafted
    target_prob = LAW[:, [0, 1], tokens]
    return count_accepted(
        jnp.array([tokens]), probs, flags[None], target_prob, jnp.array([coins], jnp.float32)
    ).tolist()


def test_a_certain_draft_is_kept_as_often_as_the_target_would_say_it():
    assert accepted([0, 3], None, [0.49, 0.39]) == [2]
    assert accepted([0, 3], None, [0.51, 0.0]) == [0]
    assert accepted([0, 3], None, [0.49, 0.41]) == [1]
    assert accepted([3, 3], None, [0.0, 0.0]) == [0]  # the target never says 3 there


def test_a_soft_draft_is_kept_by_the_ratio_of_the_laws():
    probs = jnp.array([[[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.2, 0.8]]])
    assert accepted([0, 3], probs, [0.49, 0.49]) == [2]
    assert accepted([0, 3], probs, [0.49, 0.51]) == [1]
    under = jnp.array([[[0.2, 0.6, 0.2, 0.0], [0.0, 0.0, 0.2, 0.8]]])
    assert accepted([0, 3], under, [0.999, 0.999]) == [1]  # draft 0.2 <= target 0.5: always kept


def test_what_was_not_drafted_is_not_accepted():
    assert accepted([0, 3], None, [0.0, 0.0], drafted=1) == [1]


def residual(num_accepted, probs, tokens=(0, 3), drafted=2):
    return residual_at(
        jnp.array([num_accepted]),
        jnp.array([tokens]),
        probs,
        (jnp.arange(2) < drafted)[None],
        LAW[:, num_accepted],
    )[0]


def test_residual_is_the_positive_part_of_the_difference():
    probs = jnp.array([[[0.4, 0.6, 0.0, 0.0], [0.0, 0.0, 0.2, 0.8]]])
    np.testing.assert_allclose(residual(0, probs), [0.1, 0.0, 0.2, 0.0], atol=1e-7)
    np.testing.assert_allclose(residual(0, None), [0.0, 0.3, 0.2, 0.0])
    np.testing.assert_allclose(residual(2, probs), LAW[0, 2])  # bonus: the target's own law
    np.testing.assert_allclose(residual(1, None, drafted=1), LAW[0, 1])  # nothing drafted there


def test_exact_match_keeps_the_leading_equal_tokens():
    num_accepted, next_token = verify_exact_match(
        jnp.array([[5, 6, 7], [5, 6, 7], [5, 6, 7]]),
        jnp.array([[5, 6], [4, 6], [5, 9]]),
        jnp.full((3, 2), True),
    )
    assert num_accepted.tolist() == [2, 0, 1]
    assert next_token.tolist() == [7, 5, 6]


def test_rows_of_one_batch_follow_their_own_rule():
    """Greedy, rejection and coupled rows decide alike alone and together."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 3, 11)), jnp.float32)
    tokens = jnp.asarray(np.argmax(logits[:, :2], axis=-1), jnp.int32)
    probs = jnp.asarray(rng.dirichlet(np.ones(11), size=(3, 2)), jnp.float32)
    rows = {"temperature": [0.0, 1.0, 1.0], "coupled": [False, False, True]}

    def decide(which, **rows):
        return verify(
            tokens[which],
            probs[which],
            jnp.full((len(which),), 2),
            target_logits=logits[which],
            sampling=sampling(len(which), vocab_size=11, seed=which, **rows),
            prefix=places(tokens[which]),
        )

    together = decide(np.arange(3), **rows)
    for b in range(3):
        alone = decide(np.array([b]), **{k: v[b] for k, v in rows.items()})
        assert together.num_accepted[b] == alone.num_accepted[0]
        assert together.next_token[b] == alone.next_token[0]


def test_only_what_was_drafted_is_verified():
    """A drafter's padding behind `num_drafted` is not accepted even where the target agrees."""
    logits = jnp.log(jnp.array([[[0.1, 0.9], [0.9, 0.1], [0.1, 0.9]]]))
    for temperature, coupled in ((0.0, False), (1e-3, False), (1e-3, True)):
        verdict = verify(
            jnp.array([[1, 0]]),
            None,
            jnp.array([1]),
            target_logits=logits,
            sampling=sampling(1, vocab_size=2, temperature=temperature, coupled=coupled),
            prefix=places(jnp.array([[1, 0]])),
        )
        assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([1], [0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("coupled", [True, False])
def test_the_verdict_of_the_hopper_kernels_is_that_of_plain_jax(coupled):
    """One row has no law at its second place, one has a NaN there."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 1000)).astype(np.float32)
    logits[1, 1], logits[2, 1, 7] = -np.inf, np.nan
    tokens = jnp.asarray(np.argmax(logits[:, :2], axis=-1), jnp.int32)
    verdicts = []
    for implementation in ("xla", "interpret"):
        with dispatch.use(implementation):
            verdicts.append(
                verify(
                    tokens,
                    None,
                    jnp.full((4,), 2),
                    target_logits=jnp.asarray(logits),
                    sampling=sampling(
                        4, vocab_size=1000, temperature=0.3, coupled=coupled, seed=np.arange(4)
                    ),
                    prefix=places(tokens),
                )
            )
    means = np.asarray(verdicts[0].num_accepted < verdicts[0].num_valid)  # else its token does not
    assert means[[0, 3]].all()
    for name in ("num_accepted", "next_token", "num_valid", "finite"):
        both = [getattr(verdict, name) for verdict in verdicts]
        one, other = (np.where(means, x, -1) if name == "next_token" else x for x in both)
        assert one.tolist() == other.tolist(), name
    assert verdicts[0].num_valid.tolist() == [3, 1, 1, 3]
    assert verdicts[0].finite.tolist()[1:3] == [True, False]


def drafts_near(rows, K, size, rng):
    """Logits, and drafts drawn from laws close to theirs, so that about half are accepted."""
    logits = rng.normal(size=(rows, K + 1, size)) * 2
    near = logits[:, :-1] + rng.normal(size=(rows, K, size))
    probs = np.exp(near) / np.exp(near).sum(-1, keepdims=True)
    draws = probs.cumsum(-1) > rng.random((rows, K, 1))
    tokens = jnp.asarray(np.argmax(draws, axis=-1), jnp.int32)
    return jnp.asarray(logits, jnp.float32), tokens, jnp.asarray(probs, jnp.float32)


@pytest.mark.parametrize("soft", [True, False], ids=["soft", "certain"])
def test_a_tree_of_single_children_is_judged_as_the_chain(soft):
    """By the same coins, under every rule, with all, some and no drafts there; at places without
    a law, too."""
    rows, K, size = 240, 4, 11
    rng = np.random.default_rng(2)
    logits, tokens, probs = drafts_near(rows, K, size, rng)
    logits = logits.at[:8, 1].set(-jnp.inf).at[8:16, 1, 3].set(jnp.nan)
    settings = sampling(
        rows,
        vocab_size=size,
        temperature=np.arange(rows) % 3 / 2 * 1.2,  # 0, 0.6, 1.2
        coupled=np.arange(rows) % 2 == 0,
        top_k=np.where(np.arange(rows) % 5 == 0, 6, 0),
    )
    num_drafted = jnp.asarray(rng.integers(0, K + 1, size=rows), jnp.int32)
    chain = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (rows, K))
    verdicts = [
        jax.jit(verify)(
            tokens,
            probs if soft else None,
            num_drafted,
            target_logits=logits,
            sampling=settings,
            prefix=places(tokens),
            tree=tree,
        )
        for tree in (None, Tree(parents=chain, depth=K, branching=1))
    ]
    one, other = jax.device_get(verdicts)
    assert set(one.num_accepted) == set(range(K + 1))
    np.testing.assert_array_equal(one.num_accepted, other.num_accepted)
    # What a verdict says of places behind the next token means nothing.
    emitted = one.num_accepted + 1
    np.testing.assert_array_equal(
        np.minimum(one.num_valid, emitted), np.minimum(other.num_valid, emitted)
    )
    means = one.num_valid >= emitted
    assert 0 < means.sum() < rows
    np.testing.assert_array_equal(one.next_token[means], other.next_token[means])
    np.testing.assert_array_equal(one.finite[~means], other.finite[~means])
    np.testing.assert_array_equal(one.num_valid[16:], other.num_valid[16:])
    index = np.arange(K + 1)
    np.testing.assert_array_equal(other.path, np.minimum(index, other.num_accepted[:, None]))
    assert one.path is None


@pytest.mark.parametrize(
    ("num_drafted", "path", "next_token"), [(5, [0, 1, 4], 8), (3, [0, 1, 1], 4), (0, [0, 0, 0], 1)]
)
@pytest.mark.parametrize("rule", ["greedy", "rejection", "coupled"])
def test_the_way_down_a_tree(rule, num_drafted, path, next_token):
    """The docstring of `jspec.tree`: x = 1, y = 2; u = 3, v = 4 below x; w = 5 below y. The target
    says x, then v, then 8."""
    says = jnp.array([1, 4, 0, 0, 8, 0])
    verdict = verify(
        jnp.array([[1, 2, 3, 4, 5]]),
        None,
        jnp.array([num_drafted]),
        target_logits=jnp.where(jnp.arange(9) == says[:, None], 50.0, 0.0)[None],
        sampling=sampling(
            1, vocab_size=9, temperature=float(rule != "greedy"), coupled=rule == "coupled"
        ),
        prefix=places(jnp.array([[1, 2, 3, 4, 5]])),
        tree=Tree(parents=jnp.array([[0, 0, 1, 1, 2]]), depth=2, branching=2),
    )
    assert verdict.path.tolist() == [path]
    assert verdict.num_accepted.tolist() == [len(set(path)) - 1]
    assert verdict.next_token.tolist() == [next_token]
    assert verdict.num_valid.tolist() == [3]
