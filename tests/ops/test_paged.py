"""Paged attention by every implementation, against dense attention in float64; what pages hold.

The C++ kernels run at every level; what they promise about bits is tested in tests/ops/cpu/test_paged.py.
"""

import sys
from functools import cache, lru_cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from tests.support.attention import (
    exact_paged_attention,
    paged_problem,
    quantized_problem,
    quantized_tokens,
    with_nan_in_page_0,
    without_pages_before_the_window,
)
from tests.support.cpu import NATIVE, at_level
from verax import ops
from verax.ops.paged import page_bytes


@cache
def program(operation, implementation):
    @partial(jax.jit, static_argnames=("window", "scale", "soft_cap"))
    def run(*arrays, **options):
        with ops.use_implementations(**{operation: implementation}):
            return getattr(ops, operation)(*arrays, **options)

    return run


def attend(by, *arrays, **options):
    """Attention of a ragged step by an implementation, or of a decode step, whose arguments lack `starts`."""
    implementation, level = at_level(by)
    with level:
        operation = "paged_attention" if len(arrays) == 6 else "paged_decode_attention"
        return np.asarray(program(operation, implementation)(*arrays, **options))


def problem(seed, lengths, counts, dtype, heads, **sizes):
    """Queries and pages, the arrays that they stand for, and the rest of a call."""
    sizes = dict(zip("NKH", heads, strict=True)) | sizes
    if dtype in ("int8", "float8_e4m3fn"):
        return quantized_problem(seed, lengths, counts, cache_dtype=dtype, **sizes)
    arrays, *rest = paged_problem(seed, lengths, counts, dtype=jnp.dtype(dtype), **sizes)
    return arrays, arrays, *rest


def assert_close(by, out, expected, dtype):
    """Assert that a result is exact but for rounding: queries and weights become bfloat16 with pages of fewer bits."""
    if dtype == "float32" or (by == "reference" and dtype != "bfloat16"):
        # The C++ kernels' heads are larger: scores reach 30, so that weights are good to 1e-5; values reach 10.
        np.testing.assert_allclose(out, expected, atol=1e-4 if by in NATIVE else 2e-5)
    else:
        assert np.linalg.norm(out - expected) <= 1e-2 * np.linalg.norm(expected)


def pairwise(rows, columns, values):
    """Each row with each column, and values in turn."""
    places = product(enumerate(rows), enumerate(columns))
    return [(row, column, values[(i + j) % len(values)]) for (i, row), (j, column) in places]


def by_each(plain, plain_cases, native_cases):
    """Parameters of a test: an implementation, and its cases; implementations of a case come in turn."""
    native = [(by, *case) for case in native_cases for by in NATIVE]
    return [*((by, *case) for case in plain_cases for by in plain), *native]


RAGGED = {
    "one token": ([1], [1]),
    "decodes and a chunk": ([5, 300, 17, 40], [1, 1, 1, 40]),
    "chunk in the middle of a prompt": ([130, 9], [37, 9]),
    "page boundaries": ([16, 32, 33, 129], [16, 1, 33, 2]),
    "padding rows": ([7, 0, 0], [3, 0, 0]),
    "chunks longer than a tile": ([400, 250], [300, 250]),
    "several spans": ([1100, 513, 700], [1, 1, 200]),
}
SIZES = dict(p=16, num_pages=150, num_tokens=552, table_width=69)
"""Sizes that all of `RAGGED` have room in, so that they share their programs."""

DTYPES = ("float32", "bfloat16", "int8")
SMALL = ((4, 2, 8), (3, 3, 8), (4, 1, 8))
LARGE = ((4, 2, 16), (5, 1, 20), (3, 3, 80))
DECODE = ((2, 2, 64), (4, 2, 128), (5, 1, 80), (16, 2, 128), (16, 1, 40), (8, 1, 256))


@lru_cache(maxsize=1)
def ragged_problem(name, dtype, heads):
    """Arguments and the exact result: one test of each implementation after the other."""
    lengths, counts = (numbers + [0] * (4 - len(numbers)) for numbers in RAGGED[name])
    arrays, floats, *rest = problem(0, lengths, counts, dtype, heads, **SIZES)
    return (*arrays, *rest), exact_paged_attention(floats, *rest)


@pytest.mark.parametrize(
    ("by", "name", "dtype", "heads"),
    by_each(
        ("reference", "tiled"), pairwise(RAGGED, (*DTYPES, "float8_e4m3fn"), SMALL), pairwise(RAGGED, DTYPES, LARGE)
    ),
)
def test_ragged_attention_equals_dense_attention_in_float64(by, name, dtype, heads):
    arguments, expected = ragged_problem(name, dtype, heads)
    assert_close(by, attend(by, *arguments), expected, dtype)


@lru_cache(maxsize=1)
def decode_problem(heads, p, dtype, lengths=None, window=None):
    """Arguments of rows of many lengths, none among them, and the exact result of each row."""
    lengths = lengths or (0, 1, p - 1, p, p + 1, 64, 65, 511, 512, 513, 1500)
    counts = [int(length > 0) for length in lengths]
    (q, *pages), floats, table, kv, starts = problem(1, lengths, counts, dtype, heads, p=p)
    newest = np.maximum(np.asarray(starts[1:]) - 1, 0)
    expected = exact_paged_attention(floats, table, kv, starts, window=window)[newest]
    expected[np.asarray(lengths) == 0] = 0
    freed = table if window is None else without_pages_before_the_window(window, table, kv, starts, p)
    return (np.asarray(q)[newest], *pages, freed, kv), expected


@pytest.mark.parametrize(
    ("by", "heads", "p", "dtype"),
    by_each(
        ("reference", "chunked"),
        pairwise(SMALL, (8, 16, 48), ("float32", "int8", "float8_e4m3fn", "float32")),
        pairwise(DECODE, (8, 16, 48), DTYPES),
    ),
)
def test_decode_attention_equals_dense_attention_in_float64(by, heads, p, dtype):
    arguments, expected = decode_problem(heads, p, dtype)
    assert_close(by, attend(by, *arguments), expected, dtype)


WINDOWS = [((1, 16, 70, 600), "float32"), ((16, 512), "bfloat16"), ((1, 512), "int8")]


@pytest.mark.parametrize(("by", "windows", "dtype"), by_each(("reference", "tiled"), WINDOWS[:1], WINDOWS))
def test_no_key_outside_of_a_window_is_read(by, windows, dtype):
    lengths, counts = [1100, 9, 513, 700, 0, 400], [1, 1, 2, 200, 0, 400]
    for window in windows:
        heads = (4, 1, 20) if by in NATIVE else (4, 2, 8)
        (q, *pages), floats, table, *rest = problem(3, lengths, counts, dtype, heads, p=16)
        expected = exact_paged_attention(floats, table, *rest, window=window)
        freed = without_pages_before_the_window(window, table, *rest, 16)
        assert_close(by, attend(by, q, *with_nan_in_page_0(pages), freed, *rest, window=window), expected, dtype)


@pytest.mark.parametrize(("by", "windows", "dtype"), by_each(("reference", "chunked"), WINDOWS[:1], WINDOWS))
def test_a_decode_step_sees_its_window_only(by, windows, dtype):
    for window in windows:
        heads = (6, 2, 64) if by in NATIVE else (4, 2, 8)
        (q, *rest), expected = decode_problem(heads, 16, dtype, (1, 15, 0, 64, 65, 511, 512, 513, 1500), window)
        out = attend(by, q, *with_nan_in_page_0(rest[:2]), *rest[2:], window=window)
        assert_close(by, out, expected, dtype)


@pytest.mark.parametrize(
    ("by", "dtype"), by_each(("reference", "tiled"), [("float32",)], [(dtype,) for dtype in DTYPES])
)
def test_scores_are_scaled_then_capped(by, dtype):
    changes, heads = {"scale": 0.3, "soft_cap": 4.0}, (4, 2, 20) if by in NATIVE else (4, 2, 8)
    (q, *pages), floats, *rest = problem(5, [600, 40, 5], [1, 40, 1], dtype, heads, p=16)
    assert_close(by, attend(by, q, *pages, *rest, **changes), exact_paged_attention(floats, *rest, **changes), dtype)
    assert np.isfinite(attend(by, 1e9 * q, *pages, *rest, **changes)).all()


@pytest.mark.parametrize(
    ("by", "window", "dtype"),
    by_each(("reference", "tiled"), [(None, "float32")], [(None, "float32"), (40, "bfloat16"), (None, "int8")]),
)
def test_each_head_sees_its_sink_too(by, window, dtype):
    """Sinks from one that no query notices to one that takes all weight; a lone query sees several spans of keys."""
    sinks = np.asarray([-40, 0, 3, 60, 1, -2], np.float32)
    heads = (6, 2, 20) if by in NATIVE else (6, 2, 8)
    lengths, counts = [1100, 40, 0, 5], [1, 40, 0, 1]
    (q, *pages), floats, *rest = problem(7, lengths, counts, dtype, heads, p=16)
    expected = exact_paged_attention(floats, *rest, window=window, sinks=sinks)
    assert_close(by, attend(by, q, *pages, *rest, window=window, sinks=sinks), expected, dtype)


@pytest.mark.parametrize("by", ["reference", "chunked", *NATIVE])
@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 3, 8)])
def test_a_decode_step_sees_its_sinks(by, heads):
    sinks = np.linspace(-5, 30, heads[0], dtype=np.float32)
    lengths = [1, 0, 17, 600]
    (q, *pages), floats, table, kv, starts = problem(8, lengths, [1, 0, 1, 1], "float32", heads, p=16)
    expected = exact_paged_attention(floats, table, kv, starts, sinks=sinks)[[0, 0, 1, 2]]
    expected[1] = 0
    out = attend(by, np.asarray(q)[[0, 0, 1, 2]], *pages, table, kv, sinks=sinks)
    assert_close(by, out, expected, "float32")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back under Linux")
def test_new_pages_take_memory_when_they_are_written():
    process = psutil.Process()
    before = process.memory_info().rss
    pages = ops.new_pages((1024, 4, 128, 128), jnp.float32)  # 268 MB
    written = jax.jit(lambda pages: pages.at[1000].set(1.0), donate_argnums=0)(pages).block_until_ready()
    assert process.memory_info().rss - before < 100e6
    assert float(written.sum()) == 4 * 128 * 128


def test_written_pages_hold_what_was_written_and_nothing_else_changes():
    rng = np.random.default_rng(5)
    cache = jnp.asarray(rng.standard_normal((4, 2, 8, 3)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((3, 2, 3)), jnp.float32)
    pages, offsets = jnp.asarray([2, 1, 2]), jnp.asarray([7, 0, 3])
    for out, y in zip(ops.write_pages(cache, cache, x, -x, pages, offsets), (x, -x), strict=True):
        expected = np.array(cache.astype(jnp.float32))
        for t in range(3):
            expected[pages[t], :, offsets[t]] = np.asarray(y[t].astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(np.array(out.astype(jnp.float32)), expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_tokens_without_a_place_are_not_written(dtype):
    x = jnp.ones((4, 2, 8))
    caches = tuple(ops.new_pages((4, 2, 8, 8), dtype) for _ in range(2))
    arrays = x, -x, jnp.asarray([-1, 4, 1, 2]), jnp.asarray([7, 0, -1, 3])
    for implementation in ops.write_pages.supporting(*caches, *arrays):
        for array in jax.tree.leaves(implementation(*caches, *arrays)):
            pages, _, offsets, *_ = np.nonzero(np.asarray(array))
            assert set(zip(pages.tolist(), offsets.tolist(), strict=True)) == {(2, 3)}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_written_by_head_equal_the_references(dtype):
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((5, 3, 24)), jnp.float32)
    pages, offsets = jnp.asarray([2, 1, 2, 0, 3]), jnp.asarray([7, 0, 3, 1, 7])
    names = ("reference", "by_head")
    caches = tuple(ops.new_pages((4, 3, 8, 24), dtype) for _ in range(2))
    writers = (ops.write_pages.implementations[name].function for name in names)
    expected, out = (write(*caches, x, -x, pages, offsets) for write in writers)
    assert all(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(expected)))
    assert not any(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(caches)))


def test_int8_pages_round_each_token_and_head_to_a_127th_of_its_largest():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 2, 24)) * [[[1], [1e-3]], [[50], [1]], [[1], [1]]])
    x = x.at[2, 0].set(0).at[2, 1, 3].set(jnp.nan)
    places, offsets = jnp.asarray([2, 1, 2]), jnp.asarray([7, 0, 3])
    empty = (ops.new_pages((4, 2, 8, 24), "int8") for _ in range(2))
    out, _ = jax.jit(ops.write_pages)(*empty, x, x, places, offsets)
    assert (out.shape, out.dtype, out.nbytes) == ((4, 2, 8, 24), jnp.int8, 4 * page_bytes((2, 8, 24), "int8"))
    held = np.asarray(out.values * out.scales[..., None])
    for t in range(2):
        error = np.abs(held[places[t], :, offsets[t]] - np.asarray(x[t]))
        assert np.all(error <= 0.5001 / 127 * np.abs(x[t]).max(-1, keepdims=True))
    np.testing.assert_array_equal(held[2, 0, 3], 0)
    assert np.isnan(held[2, 1, 3]).all()
    assert np.count_nonzero(np.nan_to_num(held, nan=1)) == np.count_nonzero(
        np.nan_to_num(held[[2, 1, 2], :, [7, 0, 3]], nan=1)
    )


def test_float8_pages_hold_any_size_of_numbers_and_no_nan():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((64, 24)) * np.logspace(-30, 30, 64)[:, None], jnp.float32)
    x = x.at[3].set(0).at[7, 3].set(jnp.nan).at[9, 3].set(jnp.inf)
    values, scales = quantized_tokens(x, dtype="float8_e4m3fn")
    values, scales, x = (np.asarray(a).astype(np.float32) for a in (values, scales, x))
    assert np.isfinite(values).all()  # a NaN in unread values would outlive a weight of 0
    assert np.isfinite(scales).sum() == 62
    kept = np.isfinite(scales)
    largest = np.abs(x[kept]).max(-1, keepdims=True)
    error = np.abs(values[kept] * scales[kept, None] - x[kept])
    assert np.all(error <= np.maximum(np.abs(x[kept]) / 15.9, largest / 448 / 500))
    np.testing.assert_array_equal(np.abs(values[kept]).max(-1), np.where(largest[:, 0] > 0, 448, 0))
