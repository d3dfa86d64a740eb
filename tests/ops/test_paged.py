"""Paged attention: every implementation against dense attention in float64."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from tests.support.attention import (
    dequantized,
    exact_paged_attention,
    paged_problem,
    quantized_problem,
    quantized_tokens,
    without_pages_before_the_window,
)
from verax import ops
from verax.ops.paged import QuantizedPages, page_bytes

STATIC = ("window", "scale", "soft_cap")
attention = jax.jit(ops.paged_attention, static_argnames=STATIC)
decode = jax.jit(ops.paged_decode_attention, static_argnames=STATIC)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back under Linux")
def test_new_pages_take_memory_when_they_are_written():
    process = psutil.Process()
    before = process.memory_info().rss
    pages = ops.new_pages((1024, 4, 128, 128), jnp.float32)  # 268 MB
    written = jax.jit(lambda pages: pages.at[1000].set(1.0), donate_argnums=0)(pages).block_until_ready()
    assert process.memory_info().rss - before < 100e6
    assert float(written.sum()) == 4 * 128 * 128


RAGGED = {
    "one token": ([1], [1]),
    "decodes and a chunk": ([5, 300, 17, 40], [1, 1, 1, 40]),
    "chunk in the middle of a prompt": ([130, 9], [37, 9]),
    "page boundaries": ([16, 32, 33, 129], [16, 1, 33, 2]),
    "padding rows": ([7, 0, 0], [3, 0, 0]),
    "chunks longer than a tile": ([100, 65], [70, 65]),
}


def ragged(problem, seed, name, *, N, K):
    """A problem with the lengths and counts of `RAGGED`, of the same sizes for each: they share their programs."""
    lengths, counts = (numbers + [0] * (4 - len(numbers)) for numbers in RAGGED[name])
    return problem(seed, lengths, counts, N=N, K=K, H=8, p=16, num_pages=28, num_tokens=137, table_width=19)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("N", "K"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_ragged_attention_equals_dense_attention_in_float64(name, N, K, implementation):
    arrays, *rest = ragged(paged_problem, 0, name, N=N, K=K)
    with ops.use_implementations(paged_attention=implementation):
        out = attention(*arrays, *rest)
    np.testing.assert_allclose(out, exact_paged_attention(arrays, *rest), atol=2e-5)


@pytest.mark.parametrize(("N", "K"), [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("p", [16, 8, 48])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_decode_attention_equals_dense_attention_in_float64(N, K, p, implementation):
    lengths = [1, 130, 16, 0, 257]
    counts = [1, 1, 1, 1, 1]
    (q, k, v), table, kv, starts = paged_problem(1, lengths, counts, N=N, K=K, H=8, p=p)
    with ops.use_implementations(paged_decode_attention=implementation):
        out = decode(q[:5], k, v, table, kv)
    expected = exact_paged_attention((q[:5], k, v), table, [1, 130, 16, 1, 257], starts)
    expected[3] = 0  # the padding row
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("window", [1, 16, 37, 1000])
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_a_query_sees_its_window_only_and_pages_before_it_may_be_anyones(name, window, implementation):
    arrays, table, *rest = ragged(paged_problem, 6, name, N=4, K=2)
    freed = without_pages_before_the_window(window, table, *rest, 16)
    with ops.use_implementations(paged_attention=implementation):
        out = attention(*arrays, freed, *rest, window=window)
    np.testing.assert_allclose(out, exact_paged_attention(arrays, table, *rest, window=window), atol=2e-5)


@pytest.mark.parametrize("window", [1, 20, 130])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_a_decode_step_sees_its_window_only(window, implementation):
    (q, k, v), table, kv, starts = paged_problem(7, [1, 400, 16, 0, 257], [1] * 5, N=4, K=2, H=8, p=16)
    freed = without_pages_before_the_window(window, table, kv, starts, 16)
    with ops.use_implementations(paged_decode_attention=implementation):
        out = decode(q[:5], k, v, freed, kv, window=window)
    expected = exact_paged_attention((q[:5], k, v), table, [1, 400, 16, 1, 257], starts, window=window)
    expected[3] = 0  # the padding row
    np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_scores_are_scaled_then_capped(implementation):
    arrays, *rest = paged_problem(8, [130, 9], [37, 9], N=4, K=2, H=8, p=16)
    options = {"scale": 0.2, "soft_cap": 2.0}
    with ops.use_implementations(paged_attention=implementation):
        out = attention(*arrays, *rest, **options)
    np.testing.assert_allclose(out, exact_paged_attention(arrays, *rest, **options), atol=2e-5)


def test_table_wider_than_the_sequence_needs_is_not_read_into_the_result():
    arrays, table, lengths, starts = paged_problem(2, [20], [20], N=2, K=1, H=4, p=16, table_width=37)
    out = ops.paged_attention(*arrays, table, lengths, starts)
    assert np.abs(out - exact_paged_attention(arrays, table, lengths, starts)).max() < 2e-5


def test_bfloat16_cache_loses_no_more_than_rounding_its_inputs():
    arrays, *rest = paged_problem(3, [90, 33], [5, 33], N=4, K=2, H=16, p=16, dtype=jnp.bfloat16)
    exact = exact_paged_attention(arrays, *rest)
    for implementation in ("reference", "tiled"):
        with ops.use_implementations(paged_attention=implementation):
            out = ops.paged_attention(*arrays, *rest)
        assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


def test_huge_scores_give_neither_nan_nor_infinity():
    (q, k, v), *rest = paged_problem(4, [40, 3], [1, 3], N=2, K=1, H=8, p=16)
    out = ops.paged_attention(q * 1e4, k * 1e4, v, *rest)
    assert np.isfinite(out).all()


def test_written_pages_hold_what_was_written_and_nothing_else_changes():
    rng = np.random.default_rng(5)
    cache = jnp.asarray(rng.standard_normal((4, 2, 8, 3)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((3, 2, 3)), jnp.float32)
    pages, offsets = jnp.asarray([2, 1, 2]), jnp.asarray([7, 0, 3])
    out = np.array(ops.write_pages(cache, x, pages, offsets).astype(jnp.float32))
    expected = np.array(cache.astype(jnp.float32))
    for t in range(3):
        expected[pages[t], :, offsets[t]] = np.asarray(x[t].astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_written_by_head_are_those_of_the_reference(dtype):
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((5, 3, 24)), jnp.float32)
    pages, offsets = jnp.asarray([2, 1, 2, 0, 3]), jnp.asarray([7, 0, 3, 1, 7])
    names = ("reference", "by_head")
    cache = ops.new_pages((4, 3, 8, 24), dtype)
    expected, out = (ops.write_pages.implementations[name].function(cache, x, pages, offsets) for name in names)
    assert all(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(expected)))
    assert not all(map(np.array_equal, jax.tree.leaves(out), jax.tree.leaves(cache)))


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("N", "K", "dtype"), [(4, 2, "int8"), (3, 3, "int8"), (4, 2, "float8_e4m3fn")])
def test_quantised_pages_give_the_attention_of_the_numbers_that_they_stand_for(name, N, K, dtype):
    pages, arrays, *rest = ragged(partial(quantized_problem, cache_dtype=dtype), 0, name, N=N, K=K)
    exact = exact_paged_attention(arrays, *rest)
    with ops.use_implementations(paged_attention="reference"):
        np.testing.assert_allclose(attention(*pages, *rest), exact, atol=2e-5)
    with ops.use_implementations(paged_attention="tiled"):
        out = attention(*pages, *rest)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2  # queries and weights are rounded to bfloat16


@pytest.mark.parametrize(("p", "dtype"), [(16, "int8"), (48, "int8"), (48, "float8_e4m3fn")])
def test_quantised_decode_attention_is_that_of_the_numbers(p, dtype):
    sizes = {"N": 6, "K": 2, "H": 8, "p": p, "cache_dtype": dtype}
    (q, k, v), (_, *floats), table, kv, starts = quantized_problem(1, [1, 130, 16, 0, 257], [1] * 5, **sizes)
    expected = exact_paged_attention((q[:5], *floats), table, [1, 130, 16, 1, 257], starts)
    expected[3] = 0  # the padding row
    for implementation in ("reference", "chunked"):
        with ops.use_implementations(paged_decode_attention=implementation):
            out = decode(q[:5], k, v, table, kv)
        assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-2


def test_int8_pages_round_each_token_and_head_to_a_127th_of_its_largest():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 2, 24)) * [[[1], [1e-3]], [[50], [1]], [[1], [1]]])
    x = x.at[2, 0].set(0).at[2, 1, 3].set(jnp.nan)
    places, offsets = jnp.asarray([2, 1, 2]), jnp.asarray([7, 0, 3])
    out = jax.jit(ops.write_pages)(ops.new_pages((4, 2, 8, 24), "int8"), x, places, offsets)
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


@pytest.mark.parametrize(
    ("outliers", "size", "bounds"),
    [(1, 1, {"int8": 0.06, "float8_e4m3fn": 0.15}), (100, 1e-3, {"int8": 2, "float8_e4m3fn": 0.15})],
    ids=["alike", "channels past 448 among small ones"],
)
def test_errors_of_attention_over_quantised_pages(outliers, size, bounds):
    """int8 is the more exact one for numbers of one size, float8 where a few channels are a hundred times larger."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((125, 1, 16, 128)) for _ in range(2))
    q = 3 * rng.standard_normal((1, 8, 128))
    k[..., :2], q[..., :2], v = k[..., :2] * 8 * outliers, q[..., :2] / (8 * outliers), v * size
    table, lengths, starts = np.arange(125)[None], np.asarray([2000]), np.asarray([0, 1])
    exact = exact_paged_attention((q, k, v), table, lengths, starts)
    for dtype, bound in bounds.items():
        held = [dequantized(QuantizedPages(*quantized_tokens(jnp.asarray(x), dtype=dtype))) for x in (k, v)]
        out = exact_paged_attention((q, *held), table, lengths, starts)
        error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        assert bound / 4 < error < bound, dtype


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


def test_quantised_pages_take_nearly_half_of_the_memory():
    assert page_bytes((8, 16, 128), "float8_e4m3fn") == page_bytes((8, 16, 128), "int8")
    assert page_bytes((8, 16, 128), "int8") / page_bytes((8, 16, 128), "bfloat16") == pytest.approx(0.516, abs=1e-3)
