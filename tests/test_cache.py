import jax.numpy as jnp
import numpy as np

from jspec import cache as cache_lib
from jspec.cache import CacheSpec, KeysValues

SPEC = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1)


def make(lengths, *, table=((2, 0), (3, 1)), fill=-1.0):
    """Two rows, pages of two slots; every slot holds `fill`, so that a write is visible."""
    cache = cache_lib.init_cache(SPEC, 2, 4, page_size=2, dtype=jnp.float32)
    pages = tuple(KeysValues(*(jnp.full_like(x, fill) for x in pair)) for pair in cache.pages)
    return cache.replace(
        pages=pages,
        table=jnp.array(table, jnp.int32),
        lengths=jnp.array(lengths, jnp.int32),
    )


def in_flight(cache, tokens):
    """Puts `[B, T]` numbers into the block: the number as key, its negative as value."""
    values = jnp.array(tokens, jnp.float32)[..., None, None]
    return cache_lib.append(cache_lib.open_block(cache, values.shape[1]), 0, values, -values)


def test_commit_copies_the_accepted_tokens_and_nothing_else():
    before = in_flight(make([1, 0]), [[10, 11, 12], [20, 21, 22]])
    cache = cache_lib.commit(before, jnp.array([2, 1]))
    # row 0: slots 1, 2 = page 2 offset 1, page 0 offset 0; row 1: slot 0 = page 3 offset 0
    assert cache.pages[0].keys[..., 0, 0].tolist() == [[11, -1], [-1, -1], [-1, 10], [20, -1]]
    assert cache.pages[0].values[..., 0, 0].tolist() == [[-11, -1], [-1, -1], [-1, -10], [-20, -1]]
    assert cache.lengths.tolist() == [3, 1]
    assert cache.block == ()


def test_commit_of_nothing_changes_no_page():
    before = make([1, 2])
    after = cache_lib.commit(in_flight(before, [[10, 11], [20, 21]]), jnp.array([0, 0]))
    np.testing.assert_array_equal(after.pages[0].keys, before.pages[0].keys)
    assert after.lengths.tolist() == [1, 2]


def test_slots_outside_the_table_are_nowhere():
    """A block that starts at slot -1 or ends beyond the last page writes only what has a place."""
    cache = cache_lib.commit(in_flight(make([-1, 3]), [[9, 10], [20, 21]]), jnp.array([2, 2]))
    assert cache.pages[0].keys[..., 0, 0].tolist() == [[-1, -1], [-1, 20], [10, -1], [-1, -1]]
    assert cache.lengths.tolist() == [1, 5]


def test_append_goes_behind_what_is_in_flight():
    cache = cache_lib.open_block(make([0, 0]), 3)
    first = jnp.full((2, 1, 1, 1), 5.0)
    cache = cache_lib.append(cache, 0, first, first).replace(in_flight=1)
    assert cache.positions(2).tolist() == [[1, 2], [1, 2]]
    second = jnp.full((2, 2, 1, 1), 7.0)
    cache = cache_lib.append(cache, 0, second, second)
    assert cache.block[0].keys[0, :, 0, 0].tolist() == [5, 7, 7]


def test_every_row_owns_its_own_pages():
    cache = cache_lib.init_cache(SPEC, 3, 5, page_size=2, dtype=jnp.float32)
    assert cache.table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cache.capacity == 6


def test_a_fork_shares_full_pages_and_copies_the_one_in_the_middle():
    """Two rows of 5 and 4 tokens and one without a child, pages of 2, into six rows."""
    spec = cache_lib.CacheSpec(1, 1, 1)
    cache = cache_lib.init_cache(spec, 3, 8, page_size=2, dtype=jnp.float32)
    tokens = jnp.arange(1.0, 25.0).reshape(3, 8, 1, 1)
    cache = cache_lib.append(cache_lib.open_block(cache, 8), 0, tokens, -tokens)
    cache = cache_lib.commit(cache, jnp.array([5, 4, 3]))
    forked = cache_lib.fork(cache, jnp.array([0, 0, 1, 0, 1, 0]))
    assert forked.lengths.tolist() == [5, 5, 4, 5, 4, 5]
    assert forked.pages[0].keys.shape == (24, 2, 1, 1)
    table = forked.table.tolist()
    assert table[0] == [0, 1, 2, 3]
    assert [row[:2] for row in table] == [[0, 1], [0, 1], [4, 5], [0, 1], [4, 5], [0, 1]]
    own = [page for row in table for page in row[2:]]
    assert len(set(own)) == len(own)

    def held(cache, row, kind):
        pages = np.asarray(getattr(cache.pages[0], kind))[np.asarray(cache.table)[row]]
        return pages.reshape(-1)[: int(cache.lengths[row])].tolist()

    for row, parent in enumerate([0, 0, 1, 0, 1, 0]):
        for kind in ("keys", "values"):
            assert held(forked, row, kind) == held(cache, parent, kind)
    # what one child adds, the others do not see
    block = cache_lib.append(
        cache_lib.open_block(forked, 1), 0, *[jnp.full((6, 1, 1, 1), 99.0)] * 2
    )
    grown = cache_lib.commit(block, jnp.array([1, 0, 0, 0, 0, 0]))
    assert held(grown, 0, "keys")[-1] == 99
    for row in range(1, 6):
        assert held(grown, row, "keys") == held(forked, row, "keys")
