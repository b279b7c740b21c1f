import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import counts_of, markov, medusa_params, run, start

from jspec import heads
from jspec.decode import DecodeConfig
from jspec.drafters.growth import StaticTree
from jspec.drafters.medusa import MedusaDrafter
from jspec.head_params import MedusaConfig

# A target that counts up modulo 10; its hidden state is its logits, 9 at the next token, which the
# blocks (all zeros) leave as it is. Head i then knows that the token i + 2 places on is that token
# and i + 1 more.
V, WIDTH, NUM_HEADS = 10, 16, 3
COUNTING = jnp.where(jnp.arange(V) == (jnp.arange(V)[:, None] + 1) % V, 9.0, 0.0)
CONFIG = MedusaConfig(NUM_HEADS, WIDTH, V, V)
TREE = StaticTree(((1,), (0,), (1, 0), (0, 0), (0, 1), (0, 0, 0)))


def counting(shuffled=None):
    """Heads that are right about every token; their own ids of tokens may be shuffled."""
    tokens = np.arange(V) if shuffled is None else shuffled
    states = np.eye(WIDTH, dtype=np.float32)[(tokens[None] - 1 - np.arange(NUM_HEADS)[:, None]) % V]
    zeros = (jnp.zeros((WIDTH, WIDTH)),) * NUM_HEADS, (jnp.zeros((WIDTH,)),) * NUM_HEADS
    params = medusa_params(CONFIG, 0).replace(blocks=zeros[0], biases=zeros[1])
    token_ids = None if shuffled is None else jnp.asarray(shuffled, jnp.int32)
    return params.replace(lm_heads=tuple(map(jnp.asarray, states)), token_ids=token_ids)


@pytest.mark.parametrize("shuffled", [None, np.arange(V) * 3 % V], ids=["plain", "shuffled"])
def test_head_i_predicts_the_token_i_and_two_places_on(shuffled):
    """Prompts of two tokens, of one chunk and of several; only before a prompt of one token is
    there no hidden state to draft from."""
    prompts = [[4], [8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [i % V for i in range(20)]]
    max_tokens = [12, 13, 24, 30]
    config = DecodeConfig(markov(V), MedusaDrafter(CONFIG, TREE), (7,), prefill_chunk=8)
    state = start(config, prompts, max_tokens=max_tokens, capacity=64)
    state = run(config, (COUNTING, counting(shuffled)), state)
    for tokens, prompt, n in zip(np.asarray(state.tokens), prompts, max_tokens, strict=True):
        length = len(prompt) + n
        assert tokens[:length].tolist() == [(prompt[0] + i) % V for i in range(length)]
    rounds, accepted = np.asarray(state.log.rounds), np.asarray(state.log.accepted)
    assert rounds[1:].tolist() == [-(-n // 4) for n in max_tokens[1:]]
    assert all(np.all(a[i:r] == 3) for a, i, r in zip(accepted, (1, 0, 0, 0), rounds, strict=True))
    assert np.all(counts_of(state).drafted == rounds[:, None])


def test_a_head_is_a_residual_block_and_a_projection():
    config = MedusaConfig(2, 6, 9, 9)
    params = medusa_params(config, 1)
    hidden = np.random.default_rng(0).normal(size=(3, 6))
    got = jax.jit(heads.medusa_logits)(params, jnp.asarray(hidden, jnp.float32))
    blocks = zip(params.blocks, params.biases, params.lm_heads, strict=True)
    for logits, arrays in zip(np.asarray(got), blocks, strict=True):
        block, bias, lm_head = (np.asarray(x, np.float64) for x in arrays)
        inner = hidden @ block.T + bias
        expected = (hidden + inner / (1 + np.exp(-inner))) @ lm_head.T
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_tree_is_no_deeper_than_there_are_heads():
    with pytest.raises(ValueError, match=r"depth 4: .*num_heads=3"):
        MedusaDrafter(CONFIG, StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))
