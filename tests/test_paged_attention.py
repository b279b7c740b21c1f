"""The Hopper kernel, interpreted on a CPU, and its plain JAX give what the definition says."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.contract import HEAD_DIMS

IMPLEMENTATIONS = ("xla", "interpret")
ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The unit of rounding. Weights and results are rounded once each; sums are float32."""


def make(
    lengths,
    *,
    tokens=2,
    width=None,
    heads=(4, 2),
    head_dim=64,
    page_size=16,
    pages_a_row=8,
    dtype="bfloat16",
    page_dtype=None,
    in_flight=0,
    seed=0,
):
    """Arguments by name: rows of `lengths` in shuffled pages of a pool with room to spare."""
    B, (N, Nkv), H = len(lengths), heads, head_dim
    W, P = width or tokens, B * pages_a_row + 3
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(i, *shape, dtype=page_dtype or dtype):
        return jax.random.normal(keys[i], shape).astype(dtype)

    table = jax.random.permutation(keys[5], P)[: B * pages_a_row].reshape(B, pages_a_row)
    return {
        "queries": normal(0, B, tokens, N, H, dtype=dtype),
        "k_pages": normal(1, P, page_size, Nkv, H),
        "v_pages": normal(2, P, page_size, Nkv, H),
        "block_table": table.astype(jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "k_block": normal(3, B, W, Nkv, H),
        "v_block": normal(4, B, W, Nkv, H),
        "in_flight": jnp.int32(in_flight),
    }


def poisoned(arguments):
    """NaN wherever nothing may be read: unused pages, and slots of used ones from `lengths` on."""
    used = np.zeros(arguments["k_pages"].shape[:2], bool)
    size = used.shape[1]
    for row, length in enumerate(arguments["lengths"].tolist()):
        for slot in range(length):
            page = int(arguments["block_table"][row, slot // size])
            if 0 <= page < used.shape[0]:
                used[page, slot % size] = True
    poison = {
        name: jnp.where(used[..., None, None], arguments[name], jnp.nan).astype(
            arguments[name].dtype
        )
        for name in ("k_pages", "v_pages")
    }
    return arguments | poison


@functools.partial(jax.jit, static_argnames=("implementation", "window", "softcap", "scale"))
def run(arguments, **options):
    return paged_attention(**arguments, **options)


def definition(
    queries,
    k_pages,
    v_pages,
    block_table,
    lengths,
    k_block,
    v_block,
    in_flight,
    mask=None,
    depths=None,
    window=None,
    softcap=None,
    scale=None,
    k_scale=1.0,
    v_scale=1.0,
):
    """In float64, a query at a time: the slots that it sees, listed."""
    q, kp, vp, kb, vb = (
        np.asarray(x.astype(jnp.float32), np.float64)
        for x in (queries, k_pages, v_pages, k_block, v_block)
    )
    B, T, N, H = q.shape
    P, S, Nkv, _ = kp.shape
    W = kb.shape[1]
    out = np.zeros_like(q)
    for b, t in np.ndindex(B, T):
        me = int(in_flight) + t
        depth = np.arange(W) if depths is None else np.asarray(depths[b])
        sees = range(me + 1) if mask is None else np.flatnonzero(mask[b, t])
        length, keys, values = int(lengths[b]), [], []
        for slot in range(length):
            page = int(block_table[b, slot // S])
            if 0 <= page < P and (window is None or length + depth[me] - slot < window):
                keys.append(kp[page, slot % S])
                values.append(vp[page, slot % S])
        for j in sees:
            if length + j >= 0 and (window is None or depth[me] - depth[j] < window):
                keys.append(kb[b, j])
                values.append(vb[b, j])
        if not keys:
            continue
        k, v = np.stack(keys) * k_scale, np.stack(values) * v_scale
        for n in range(N):
            scores = k[:, n // (N // Nkv)] @ q[b, t, n] * (scale or H**-0.5)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[:, n // (N // Nkv)] / weights.sum()
    return out


def check(arguments, implementation, **options):
    """Within a unit of rounding of the largest value: each of a row's weights and the result are
    rounded by half a unit at most."""
    got = run(arguments, implementation=implementation, **options)
    got = np.asarray(got.astype(jnp.float32))
    want = definition(**arguments, **options)
    bound = ULP[arguments["queries"].dtype.name] * max(np.abs(want).max(), 1.0)
    assert np.isfinite(got).all()  # what is interpreted begins as NaN: all was written
    np.testing.assert_allclose(got, want, atol=1.5 * bound, rtol=0)


SHAPES = [  # head size, (heads, key/value heads), page size, tokens
    (64, (2, 2), 16, 1),
    (64, (9, 3), 64, 8),
    (80, (8, 2), 16, 8),
    (96, (8, 1), 32, 1),
    (128, (4, 1), 64, 2),
    (128, (8, 2), 16, 40),  # 160 rows a head: two tiles of 128
    (256, (4, 2), 64, 3),
    (256, (8, 2), 32, 20),
    (64, (14, 2), 32, 5),
    (128, (1, 1), 16, 64),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("head_dim", "heads", "page_size", "tokens"), SHAPES)
def test_shapes(head_dim, heads, page_size, tokens, implementation):
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, -tokens, 130]
    arguments = make(
        lengths,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_a_row=192 // page_size,
    )
    check(arguments, implementation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_lengths_around_a_tile(tokens, implementation):
    check(make([62, 63, 64, 65, 127, 128], tokens=tokens, pages_a_row=16), implementation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_pages_in_several_splits(implementation):
    arguments = make([1400, 7, 512, 511, -2], page_size=64, pages_a_row=24)
    check(arguments, implementation)


TREE = jnp.asarray(np.tril(np.random.default_rng(0).random((3, 12, 40)) < 0.5, 20))
DEPTHS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 9, (3, 40))), jnp.int32)
OPTIONS = {
    "tree": {"mask": TREE},
    "tree of one node": {"mask": TREE[:, :1, :1] | True, "width": 1, "tokens": 1},
    "nothing of the block": {"mask": TREE & False},
    "window": {"window": 30},
    "window in the block": {"window": 5},
    "window of one": {"window": 1},
    "tree and window": {"mask": TREE, "depths": DEPTHS, "window": 6},
    "soft cap": {"softcap": 3.0},
    "soft cap and window": {"softcap": 3.0, "window": 70},
    "scale": {"scale": 0.3},
    "tokens in flight before": {"in_flight": 9},
    "float16": {"dtype": "float16"},
    "wide block": {"width": 100, "in_flight": 70},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, implementation):
    options = {"tokens": 12, "width": 40} | OPTIONS[case]
    shape = {k: options.pop(k) for k in ("tokens", "width", "in_flight", "dtype") if k in options}
    arrays = {k: options.pop(k) for k in ("mask", "depths") if k in options}
    arguments = make([100, -3, 57], **shape) | arrays
    check(arguments, implementation, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("head_dim", "page_size", "pages_a_row"), [(64, 16, 8), (80, 32, 4), (256, 64, 4), (64, 64, 24)]
)
def test_fp8_pages(head_dim, page_size, pages_a_row, implementation):
    arguments = make(
        [130, 3, 1],
        head_dim=head_dim,
        page_size=page_size,
        pages_a_row=pages_a_row,
        page_dtype="float8_e4m3fn",
    )
    scales = {"k_scale": jnp.float32(0.7), "v_scale": jnp.float32(1.3)}
    check(arguments | scales, implementation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_table_that_points_outside_the_pool_reads_nothing_there(implementation):
    arguments = make([100, 40, 64], pages_a_row=8)
    table = arguments["block_table"].at[0, 1].set(-5).at[1, 0].set(2**31 - 1).at[2].set(99)
    check(arguments | {"block_table": table}, implementation)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page_dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_kernel_reads_nothing_that_is_not_there(page_dtype):
    """NaN behind every row, in every page that no row has, and in the block of another row."""
    arguments = make([100, 0, 64, 7], page_dtype=page_dtype)
    table = arguments["block_table"].at[0, 2].set(-1)
    poison = {name: arguments[name].at[1].set(jnp.nan) for name in ("k_block", "v_block")}
    arguments = poisoned(arguments | {"block_table": table} | poison)
    clean = jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0, x), arguments)
    got, want = (run(x, implementation="interpret") for x in (arguments, clean))
    others = jnp.array([0, 2, 3])
    np.testing.assert_array_equal(got[others], want[others])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_dtype", ["bfloat16", "float8_e4m3fn"])
def test_bits_do_not_depend_on_what_is_committed(page_dtype, implementation):
    """Token 130 alone behind 130 committed ones, or as one of a block behind fewer; with other
    rows beside it, and in a table of another width (another number of splits)."""
    full = make([0], tokens=150, width=150, pages_a_row=12, page_dtype=page_dtype)
    got = []
    for start, other, pages_a_row in ((130, 1, 10), (129, 90, 10), (125, 150, 12), (123, 0, 40)):
        arguments = make([start, other], tokens=8, pages_a_row=pages_a_row, page_dtype=page_dtype)
        slots = jnp.arange(start)
        pages = arguments["block_table"][0, slots // 16]
        arguments["queries"] = arguments["queries"].at[0].set(full["queries"][0, start : start + 8])
        for name in "kv":
            tokens = full[f"{name}_block"][0]
            paged = arguments[f"{name}_pages"].at[pages, slots % 16].set(tokens[:start])
            block = arguments[f"{name}_block"].at[0].set(tokens[start : start + 8])
            arguments |= {f"{name}_pages": paged, f"{name}_block": block}
        out = run(arguments, implementation=implementation)
        got.append(np.asarray(out[0, 130 - start].astype(jnp.float32)))
    for other in got[1:]:
        np.testing.assert_array_equal(got[0], other)


@pytest.mark.timeout(120)
def test_no_thread_races_another(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = plgpu.InterpretGPUParams(detect_races=True)
    watched = functools.partial(plgpu.force_gpu_interpret_mode, params)
    monkeypatch.setattr(plgpu, "force_gpu_interpret_mode", watched)
    for page_dtype in ("bfloat16", "float8_e4m3fn"):
        arguments = make([300, 63], pages_a_row=24, page_dtype=page_dtype, seed=7)
        paged_attention(**arguments, implementation="interpret").block_until_ready()
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("queries", jnp.zeros((2, 2, 4)), ValueError),
        ("queries", jnp.zeros((2, 2, 4, 64), jnp.int32), TypeError),
        ("k_pages", jnp.zeros((5, 16, 3, 64), jnp.bfloat16), ValueError),
        ("k_pages", jnp.zeros((19, 16, 2, 64), jnp.int8), TypeError),
        ("v_pages", jnp.zeros((5, 16, 2, 64), jnp.bfloat16), ValueError),
        ("v_pages", jnp.zeros((19, 16, 2, 64), jnp.float16), TypeError),
        ("block_table", jnp.zeros((3, 8), jnp.int32), ValueError),
        ("block_table", jnp.zeros((2, 8), jnp.float32), TypeError),
        ("lengths", jnp.zeros((3,), jnp.int32), ValueError),
        ("lengths", jnp.zeros((2,), jnp.uint32), TypeError),
        ("k_block", jnp.zeros((2, 1, 2, 64), jnp.bfloat16), ValueError),
        ("v_block", jnp.zeros((2, 2, 2, 32), jnp.bfloat16), ValueError),
        ("in_flight", jnp.zeros((2,), jnp.int32), ValueError),
        ("mask", jnp.zeros((2, 2, 3), bool), ValueError),
        ("mask", jnp.zeros((2, 2, 2), jnp.int32), TypeError),
        ("depths", jnp.zeros((2, 3), jnp.int32), ValueError),
        ("k_scale", jnp.zeros((2,)), ValueError),
        ("window", 0, ValueError),
        ("softcap", -1.0, ValueError),
        ("scale", 0.0, ValueError),
    ],
)
def test_arguments_out_of_contract_are_named(name, value, error):
    with pytest.raises(error, match=f"^{name}: "):
        paged_attention(**(make([1, 2]) | {name: value}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 48}, "heads of 48"),
        ({"page_size": 128}, "pages of 128 slots"),
        ({"tokens": 129}, "129 tokens in flight"),
        ({"dtype": "float32"}, "not float32"),
        ({"page_dtype": "float16"}, "pages of float16"),
    ],
)
def test_a_declined_shape_says_why_once_and_runs_as_xla(change, reason):
    dispatch._warn.cache_clear()
    arguments = make([3, 1], **change)
    with pytest.warns(UserWarning, match=reason):
        got = paged_attention(**arguments, implementation="mosaic")
    paged_attention(**arguments, implementation="mosaic")  # a second warning would be an error
    want = paged_attention(**arguments, implementation="xla")
    np.testing.assert_array_equal(got, want)


def test_none_means_what_use_says_and_xla_on_a_cpu():
    assert dispatch.current() is dispatch.Implementation.XLA
    with dispatch.use("interpret"):
        assert dispatch.current() is dispatch.Implementation.INTERPRET
        with dispatch.use("mosaic"):
            assert dispatch.choose("x", None, None) is dispatch.Implementation.MOSAIC
        assert dispatch.choose("x", "xla", None) is dispatch.Implementation.XLA
    assert dispatch.current() is dispatch.Implementation.XLA


def test_every_head_size_is_tried():
    assert {shape[0] for shape in SHAPES} == set(HEAD_DIMS)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", "9.0", "mosaic"), ("gpu", "8.0", "xla"), ("gpu", "10.0", "xla"), ("cpu", None, "xla")],
)
def test_the_device_decides(platform, capability, expected, monkeypatch):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    dispatch._of_device.cache_clear()
    try:
        assert dispatch.choose("x", None, None) == expected
    finally:
        dispatch._of_device.cache_clear()
