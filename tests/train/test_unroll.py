"""What is trained is what drafts: the unrolled forward pass against inference over a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import CONFIG, TARGET

from jspec import cache as cache_lib
from jspec import heads
from jspec.attention import attend
from jspec.cache import CacheSpec
from jspec.head_params import MedusaConfig, init_head
from jspec.heads import medusa_output
from jspec.train.new_head import head_config, new_head, whole_head
from jspec.train.unroll import anchored, earlier, later, unrolled

STEPS = 3


def random_head(family):
    config = head_config(family, CONFIG, draft_vocab_size=61, norms=True, num_heads=2)
    params = init_head(config, jax.random.key(1))
    noise = jax.random.key(2)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(noise, x.shape, x.dtype), params)
    return config, params.replace(embed=TARGET.params.embed)


def drafted(params, config, features, tokens, anchor):
    """Outputs of step 0 at `anchor` and of the draft steps behind it, over a cache."""
    layers = config.layers
    spec = CacheSpec(layers.num_hidden_layers, layers.num_key_value_heads, layers.head_dim)
    cache = cache_lib.init_cache(spec, 1, 32, page_size=4, dtype=jnp.float32)

    @jax.jit
    def run(tokens, carried, cache):
        return heads.forward(
            params,
            config,
            tokens,
            carried,
            cache,
            positions=cache.positions(tokens.shape[1]),
            attend=attend,
        )

    width = anchor + 1
    fused = heads.fuse(params, config, tuple(x[:, :width] for x in features))
    hidden, cache = run(tokens[:, 1 : width + 1], fused, cache_lib.open_block(cache, width))
    cache = cache_lib.open_block(cache_lib.commit(cache, jnp.array([width])), STEPS)
    outputs = [hidden[:, -1:]]
    for step in range(1, STEPS):
        token = tokens[:, anchor + 1 + step, None]
        hidden, cache = run(token, heads.carry(params, config, outputs[-1]), cache)
        cache = cache.replace(in_flight=step)
        outputs.append(hidden)
    return [np.asarray(x[0, 0]) for x in outputs]


@pytest.mark.parametrize("family", ["eagle", "mtp", "eagle3"])
def test_training_runs_a_head_as_drafting_does(family):
    """Two texts in a row, the second of which must not see the first."""
    config, params = random_head(family)
    lengths, S = (9, 12), 24
    keys = jax.random.split(jax.random.key(3), 3)
    tokens = jax.random.randint(keys[0], (1, S), 0, 61)
    features = tuple(
        jax.random.normal(key, (1, S, 32)) for key in jax.random.split(keys[1], len(config.taps))
    )
    segments = jnp.array([[1] * 9 + [2] * 12 + [0] * 3])
    positions = jnp.array([[*range(9), *range(12), 0, 0, 0]])
    outputs = jax.jit(
        lambda p: unrolled(
            p,
            config,
            features,
            tokens,
            positions=positions,
            segments=segments,
            num_steps=STEPS,
        )
    )(params)
    for first, length in ((0, lengths[0]), (lengths[0], lengths[1])):
        text = slice(first, first + length)
        for anchor in (0, length - STEPS - 1):
            expected = drafted(
                params, config, tuple(x[:, text] for x in features), tokens[:, text], anchor
            )
            for step, values in enumerate(expected):
                got = outputs[step][0, first + anchor + step]
                np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-4)


def test_shifts():
    x = jnp.array([[1, 2, 3, 4]])
    assert later(x, 1).tolist() == [[0, 1, 2, 3]]
    assert earlier(x, 3).tolist() == [[4, 0, 0, 0]]
    assert later(x, 0).tolist() == x.tolist()
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0]])
    assert anchored(segments, 0).tolist() == [[True] * 5 + [False] * 2]
    assert anchored(segments, 1).tolist() == [[False, True, True, False, True, False, False]]
    assert anchored(segments, 2).tolist() == [[False, False, True] + [False] * 4]


def test_medusa_says_what_its_heads_say():
    config = MedusaConfig(3, 32, 61, 61)
    head = new_head(config, TARGET.params, np.arange(61), seed=0)
    keys = jax.random.split(jax.random.key(0), 6)
    trained = head.trained.replace(
        blocks=tuple(jax.random.normal(k, (32, 32)) for k in keys[:3]),
        biases=tuple(jax.random.normal(k, (32,)) for k in keys[3:]),
    )
    params = whole_head(config, trained, head.frozen)
    final = jax.random.normal(keys[0], (2, 32))
    expected = heads.medusa_logits(params, final)
    for i in range(3):
        logits = medusa_output(params, final, i) @ params.lm_heads[i].T
        np.testing.assert_allclose(logits, expected[i], rtol=1e-4, atol=1e-4)
