import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as cache_lib
from jspec.attention import attend
from jspec.cache import CacheSpec
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import kernel_sm90
from pallas_kernels.paged_attention.reference import KEY_TILE

NKV, H = 2, 8


def random_tokens(seed, batch, count, heads):
    return jax.random.normal(jax.random.key(seed), (batch, count, heads, H), jnp.float32)


def filled(keys, values, committed, *, capacity, dtype=jnp.float32, shuffle=True):
    """A cache that holds the first `committed[b]` of `[B, S, Nkv, H]` keys in shuffled pages."""
    batch = keys.shape[0]
    cache = cache_lib.init_cache(CacheSpec(1, NKV, H), batch, capacity, page_size=16, dtype=dtype)
    if shuffle:
        order = np.random.default_rng(0).permutation(cache.table.size)
        cache = cache.replace(table=jnp.asarray(order.reshape(cache.table.shape), jnp.int32))
    cache = cache_lib.append(cache_lib.open_block(cache, keys.shape[1]), 0, keys, values)
    return cache_lib.commit(cache, jnp.asarray(committed, jnp.int32))


def in_block(cache, queries, keys, values, lengths):
    """Attention of the T tokens at `lengths[b]` .. , whose keys are cut from the full arrays."""
    width = queries.shape[1]
    where = jnp.asarray(lengths)[:, None] + jnp.arange(width)

    def cut(x):
        return jnp.take_along_axis(x, where[..., None, None], axis=1)

    return attend(cache_lib.open_block(cache, width), 0, queries, cut(keys), cut(values))[0]


def dense(queries, keys, values, lengths):
    """The definition, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (queries, keys, values))
    B, T, N, _ = q.shape
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            visible = lengths[b] + t + 1
            for n in range(N):
                g = n // (N // NKV)
                scores = k[b, :visible, g] @ q[b, t, n] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[b, :visible, g] / weights.sum()
    return out


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_equals_the_definition_at_any_length(heads):
    lengths = [0, 1, 15, 16, 17, KEY_TILE - 2, KEY_TILE, 300]
    size, B = 320, len(lengths)
    keys, values = (random_tokens(i, B, size, NKV) for i in (1, 2))
    queries = random_tokens(3, B, 5, heads)
    cache = filled(keys, values, lengths, capacity=size)
    got = in_block(cache, queries, keys, values, lengths)
    np.testing.assert_allclose(got, dense(queries, keys, values, lengths), atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_do_not_depend_on_what_is_committed_already(dtype):
    """Token 260 alone behind 260 committed ones, or as token 4 of a block behind 256."""
    keys, values = (random_tokens(i, 2, 280, NKV).astype(dtype) for i in (1, 2))
    queries = random_tokens(3, 2, 280, 4).astype(dtype)
    got = []
    for start in (260, 258, 256, 253):
        cache = filled(keys, values, [start] * 2, capacity=512, dtype=dtype)
        out = in_block(cache, queries[:, start : start + 8], keys, values, [start] * 2)
        got.append(np.asarray(out[:, 260 - start].astype(jnp.float32)))
    for other in got[1:]:
        np.testing.assert_array_equal(got[0], other)


def test_bits_do_not_depend_on_capacity_other_rows_or_page_order():
    keys, values = (random_tokens(i, 2, 300, NKV) for i in (1, 2))
    queries = random_tokens(3, 2, 4, 4)
    outs = []
    for lengths, capacity, shuffle in (
        ([40, 40], 304, True),
        ([40, 280], 304, True),
        ([40, 0], 2048, False),
    ):
        cache = filled(keys, values, lengths, capacity=capacity, shuffle=shuffle)
        outs.append(np.asarray(in_block(cache, queries, keys, values, lengths)[0]))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_a_token_before_the_first_slot_gives_a_number():
    """A block that starts at slot -1 (see `Cache.lengths`): no NaN, and slot 0 sees itself."""
    keys, values = (random_tokens(i, 1, 4, NKV) for i in (1, 2))
    queries = random_tokens(3, 1, 2, 4)
    cache = filled(keys, values, [0], capacity=16).replace(lengths=jnp.array([-1]))
    out, _ = attend(cache_lib.open_block(cache, 2), 0, queries, keys[:, :2], values[:, :2])
    assert bool(jnp.all(jnp.isfinite(out)))
    np.testing.assert_allclose(out[0, 1, 0], values[0, 1, 0], rtol=1e-6)


@pytest.mark.timeout(120)
def test_a_model_attends_in_the_hopper_kernel_where_it_runs(monkeypatch):
    """Behind committed tokens and two in flight, in the middle of a block."""
    spec = CacheSpec(1, NKV, 64)
    cache = cache_lib.init_cache(spec, 2, 64, page_size=16, dtype=jnp.bfloat16)
    shape = (2, 20, NKV, 64)
    keys, values = (
        jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i in (1, 2)
    )
    queries = jax.random.normal(jax.random.key(3), (2, 3, 4, 64)).astype(jnp.bfloat16)
    cache = cache_lib.append(cache_lib.open_block(cache, 20), 0, keys, values)
    cache = cache_lib.commit(cache, jnp.array([17, 4], jnp.int32))
    cache = cache_lib.append(cache_lib.open_block(cache, 8), 0, keys[:, :2], values[:, :2])
    cache = cache.replace(in_flight=2)
    traced, kernel = [], kernel_sm90.attend
    monkeypatch.setattr(
        kernel_sm90, "attend", lambda *args, **kw: traced.append(kw) or kernel(*args, **kw)
    )
    outs = []
    for implementation in ("xla", "interpret"):
        with dispatch.use(implementation):
            out, _ = attend(cache, 0, queries, keys[:, 2:5], values[:, 2:5])
        outs.append(np.asarray(out.astype(jnp.float32)))
    assert traced == [{"interpret": True}]
    np.testing.assert_allclose(*outs, atol=0.02)
