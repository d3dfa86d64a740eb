"""Paged attention: every form against dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops


def paged_problem(seed, lengths, counts, *, N, K, H, p, spare_pages=3, dtype=np.float32, table_width=None):
    """Random pages in a shuffled order; garbage (large, finite) where no sequence should look."""
    rng = np.random.default_rng(seed)
    widths = [-(-length // p) for length in lengths]
    W = table_width or max([*widths, 1])
    P = 1 + sum(widths) + spare_pages
    k, v = (rng.standard_normal((P, K, p, H)) * 3 for _ in range(2))
    k[0], v[0] = 1e4, -1e4
    order = iter(1 + rng.permutation(P - 1))
    table = np.zeros((len(lengths), W), np.int32)
    for row, width in enumerate(widths):
        table[row, :width] = [next(order) for _ in range(width)]
    T = sum(counts) + 2
    q = rng.standard_normal((T, N, H)) * 2
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return arrays, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), jnp.asarray(starts)


def dense_attention(arrays, table, lengths, starts):
    """The definition, token by token, in float64."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    T, N, H = q.shape
    K, p = k.shape[1:3]
    out = np.zeros((T, N, H))
    for b in range(len(lengths)):
        for t in range(starts[b], starts[b + 1]):
            position = lengths[b] - starts[b + 1] + t
            for n in range(N):
                keys, values = (
                    [x[table[b, s // p], n // (N // K), s % p] for s in range(position + 1)] for x in (k, v)
                )
                scores = np.asarray(keys) @ q[t, n] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[t, n] = weights @ np.asarray(values) / weights.sum()
    return out


RAGGED = {
    "one token": ([1], [1]),
    "decodes and a chunk": ([5, 300, 17, 40], [1, 1, 1, 40]),
    "chunk in the middle of a prompt": ([130, 9], [37, 9]),
    "page boundaries": ([16, 32, 33, 129], [16, 1, 33, 2]),
    "padding rows": ([7, 0, 0], [3, 0, 0]),
    "chunks longer than a tile": ([100, 65], [70, 65]),
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("N", "K"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("form", ["plain", "tiled"])
def test_ragged_attention_equals_dense_attention_in_float64(name, N, K, form):
    lengths, counts = RAGGED[name]
    arrays, *rest = paged_problem(0, lengths, counts, N=N, K=K, H=8, p=16)
    with ops.use_forms(paged_attention=form):
        out = jax.jit(ops.paged_attention)(*arrays, *rest)
    np.testing.assert_allclose(out, dense_attention(arrays, *(np.asarray(x) for x in rest)), atol=2e-5)


@pytest.mark.parametrize(("N", "K"), [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("p", [16, 8, 48])
@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_decode_attention_equals_dense_attention_in_float64(N, K, p, form):
    lengths = [1, 130, 16, 0, 257]
    counts = [1, 1, 1, 1, 1]
    (q, k, v), table, kv, starts = paged_problem(1, lengths, counts, N=N, K=K, H=8, p=p)
    with ops.use_forms(paged_decode_attention=form):
        out = jax.jit(ops.paged_decode_attention)(q[:5], k, v, table, kv)
    expected = dense_attention((q[:5], k, v), np.asarray(table), [1, 130, 16, 1, 257], np.asarray(starts))
    expected[3] = 0  # the padding row
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_table_wider_than_the_sequence_needs_is_not_read_into_the_result():
    arrays, table, lengths, starts = paged_problem(2, [20], [20], N=2, K=1, H=4, p=16, table_width=37)
    out = ops.paged_attention(*arrays, table, lengths, starts)
    assert np.abs(out - dense_attention(arrays, *map(np.asarray, (table, lengths, starts)))).max() < 2e-5


def test_bfloat16_cache_loses_no_more_than_rounding_its_inputs():
    arrays, *rest = paged_problem(3, [90, 33], [5, 33], N=4, K=2, H=16, p=16, dtype=jnp.bfloat16)
    exact = dense_attention(arrays, *map(np.asarray, rest))
    for form in ("plain", "tiled"):
        with ops.use_forms(paged_attention=form):
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
