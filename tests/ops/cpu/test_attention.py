"""The native attention kernel at every level, against the definition in float64 and the reference's derivative."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import exact_attention
from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library
from verax.ops.cpu.attention import IN_PLACE

pytestmark = needs_library

native = jax.jit(
    lambda *args, **options: ops.attention.implementations["native"].function(*args, **options),
    static_argnames=("causal", "scale", "window", "soft_cap"),
)
reference = ops.attention.reference


@jax.jit
def native_each(problems):
    """Attention of several sizes, causal and not, in one program: it takes longer to compile than to run."""
    return [[native(*problem, causal=causal) for causal in (True, False)] for problem in problems]


LENGTHS = [(1, 1), (1, 70), (7, 7), (64, 65), (31, 200), (257, 257), (3, 1100)]
HEADS = [
    *(((1, 1, 16), jnp.float32), ((2, 1, 20), jnp.bfloat16), ((4, 4, 64), jnp.bfloat16), ((5, 1, 80), jnp.float32)),
    *(((10, 2, 33), jnp.float32), ((10, 2, 33), jnp.bfloat16), ((8, 1, 128), jnp.float32), ((2, 2, 256), jnp.bfloat16)),
]
"""Heads of queries, heads of keys and values, their size; the dtype of keys and values."""


def arrays(B, T, S, N, K, H, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((B, T, N, H)), jnp.float32)
    return q, *(jnp.asarray(rng.standard_normal((B, S, K, H)), dtype) for _ in range(2))


def visible(T, S, causal):
    return np.tril(np.ones((T, S), bool), S - T) if causal else np.ones((T, S), bool)


def exact(q, k, v, causal, segments=None):
    rows = []
    for b in range(q.shape[0]):
        seen = visible(q.shape[1], k.shape[1], causal)
        if segments is not None:
            seen &= np.equal.outer(segments[b], segments[b])
        rows.append(exact_attention(q[b], k[b], v[b], seen))
    return np.stack(rows)


def assert_close(out, expected, dtype):
    if dtype == jnp.float32:
        np.testing.assert_allclose(out, expected, atol=5e-6)
    else:
        assert np.linalg.norm(out - expected) <= 1e-2 * np.linalg.norm(expected)


@lru_cache(maxsize=1)
def problems_of_each_length(N, K, H, dtype):
    """Arguments of each of `LENGTHS`, and the exact results, causal and not: one test of each level after the other."""
    problems = [arrays(2, T, S, N, K, H, dtype) for T, S in LENGTHS]
    return problems, [[exact(*problem, causal) for causal in (True, False)] for problem in problems]


@for_each_level
@pytest.mark.parametrize(("heads", "dtype"), HEADS)
def test_every_shape_equals_the_definition(level, heads, dtype):
    problems, expected = problems_of_each_length(*heads, dtype)
    with library.use_level(level):
        outputs = native_each(problems)
    for out, exactly in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert_close(out, exactly, dtype)


@for_each_level
@pytest.mark.parametrize(
    ("owners", "lengths", "causal", "dtype"),
    [
        (range(5), [31, 40, 22, 37, 20], True, jnp.float32),
        (range(8), [1, 4, 30, 2, 33, 31, 1, 1], False, jnp.float32),  # short ones
        (range(8), [1, 4, 30, 2, 33, 31, 1, 1], True, jnp.bfloat16),
        (range(3), [40, 560, 3], False, jnp.bfloat16),
        (range(2), [200, 1], True, jnp.float32),
        ([2, 0, 2, 1, 0], [50, 10, 20, 5, 35], True, jnp.bfloat16),  # a segment may continue after another
        ([2, 0, 2, 1, 0], [50, 10, 20, 5, 35], False, jnp.float32),
    ],
)
def test_a_query_sees_its_own_segment_only(level, owners, lengths, causal, dtype):
    q, k, v = arrays(2, sum(lengths), sum(lengths), 4, 2, 32, dtype)
    row = np.repeat(owners, lengths)
    segments = np.stack([row, row[::-1]])
    with library.use_level(level):
        out = native(q, k, v, causal=causal, segments=jnp.asarray(segments))
    assert_close(out, exact(q, k, v, causal, segments), dtype)


@for_each_level
@pytest.mark.parametrize(("window", "dtype"), [(1, jnp.bfloat16), (40, jnp.float32), (100, jnp.bfloat16)])
def test_a_query_sees_its_window_and_its_sink_only_and_scores_are_capped(level, dtype, window):
    options = {"scale": 0.4, "soft_cap": 3.0, "sinks": np.asarray([-9, 0, 2, 5], np.float32)}
    q, k, v = arrays(1, 150, 230, 4, 2, 32, dtype)
    seen = visible(150, 230, True) & ~np.tril(np.ones((150, 230), bool), 80 - window)
    with library.use_level(level):
        out = native(q, k, v, window=window, **options)
    assert_close(out[0], exact_attention(q[0], k[0], v[0], seen, **options), dtype)
    q, k, v = arrays(1, 150, 150, 4, 2, 32, dtype)
    segments = np.sort(np.random.default_rng(1).integers(0, 3, 150))
    seen = visible(150, 150, True) & ~np.tril(np.ones((150, 150), bool), -window)
    with library.use_level(level):
        out = native(q, k, v, segments=jnp.asarray(segments[None]), window=window)
    assert_close(out[0], exact_attention(q[0], k[0], v[0], seen & np.equal.outer(segments, segments)), dtype)


@for_each_level
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_query_does_not_depend_on_what_is_computed_with_it(level, dtype):
    q, k, v = arrays(3, 300, 700, 4, 2, 64, dtype)
    with library.use_level(level):
        whole = np.asarray(native(q, k, v))
        np.testing.assert_array_equal(native(q[1:2], k[1:2], v[1:2]), whole[1:2])
        for first in (1, 37, 150, 298):  # a lone query adds in another order
            np.testing.assert_array_equal(native(q[:, first:], k, v), whole[:, first:])
            # The first queries see fewer keys.
            end = 300 - first
            np.testing.assert_array_equal(native(q[:, :end], k[:, :-first], v[:, :-first]), whole[:, :end])


def test_empty_axes():
    assert native(*arrays(0, 3, 3, 2, 1, 8)).shape == (0, 3, 2, 8)
    assert native(*arrays(2, 0, 3, 2, 1, 8)).shape == (2, 0, 2, 8)
    np.testing.assert_array_equal(native(*arrays(1, 3, 0, 2, 1, 8), causal=False), np.zeros((1, 3, 2, 8)))


@for_each_level
def test_huge_scores_are_exact_and_finite(level):
    q, k, v = arrays(1, 70, 130, 2, 1, 16)
    with library.use_level(level):
        out = native(100 * q, 100 * k, v)
        assert np.isfinite(native(1e9 * q, 1e9 * k, v)).all()
    np.testing.assert_allclose(out, exact(100 * q, 100 * k, v, True), atol=5e-3)


@for_each_level
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_the_queries_that_see_them(level, dtype, value):
    q, k, v = arrays(1, 70, 70, 2, 1, 16, dtype)
    with library.use_level(level):
        before = np.asarray(native(q, k, v))
        with_key = np.asarray(native(q, k.at[0, 40, 0, 3].set(value), v))
        with_value = np.asarray(native(q, k, v.at[0, 66, 0, 3].set(value)))
    np.testing.assert_array_equal(with_key[:, :40], before[:, :40])
    assert np.isnan(value) <= np.isnan(with_key[:, 40:]).all()
    # The reference promises nothing of masked values within a block; blocks before it are untouched.
    np.testing.assert_array_equal(np.isfinite(with_value[:, 66:, :, 3]), False)
    np.testing.assert_array_equal(with_value[..., :3], before[..., :3])


def test_derivatives_are_the_references():
    q, k, v = arrays(2, 20, 20, 4, 2, 16)
    segments = jnp.asarray(np.repeat([0, 1], 10)[None].repeat(2, 0))

    def loss(q, k, v):
        return jnp.sum(jnp.sin(ops.attention(q, k, v, segments=segments)))

    with ops.use_implementations(attention="native"):
        ours = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
        tangent = jax.jvp(loss, (q, k, v), (k.repeat(2, 2), k, v))
        second = jax.jvp(jax.grad(loss), (q, k, v), (q, k, v))[1]
    with ops.use_implementations(attention="reference"):
        np.testing.assert_array_equal(tangent, jax.jvp(loss, (q, k, v), (k.repeat(2, 2), k, v)))
        np.testing.assert_array_equal(second, jax.jvp(jax.grad(loss), (q, k, v), (q, k, v))[1])
        theirs = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_memory_is_linear_in_the_sequence():
    shapes = [jax.ShapeDtypeStruct((1, 16384, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
    compiled = native.lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_many_queries_give_their_memory_to_the_results():
    q = jax.ShapeDtypeStruct((1, 32768, 2, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.float32)

    def attend(q, k, v):
        # A loop, whose result is an array of its own: sums would be fused with the copy of a parameter.
        q = jax.lax.fori_loop(0, 4, lambda i, q: q.at[:, i].add(1), q * 2)
        return ops.attention(q, k, v, causal=False).sum()

    assert q.size >= IN_PLACE
    memory = jax.jit(attend).lower(q, k, k).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * 4 * q.size


def test_results_in_place_equal_others_and_leave_queries_that_are_used_later():
    q, _, _ = arrays(1, 32768, 1, 2, 2, 64)
    k, v = q[:, :16], q[:, 16:32]
    doubled, out = jax.jit(lambda q: (q * 2, native(q * 2, q[:, :16], q[:, 16:32], causal=False)))(q)
    np.testing.assert_array_equal(doubled, q * 2)
    parts = [native(2 * part, k, v, causal=False) for part in jnp.split(q, 4, axis=1)]  # each below IN_PLACE
    np.testing.assert_array_equal(out, jnp.concatenate(parts, axis=1))


def test_one_array_may_be_queries_keys_and_values():
    q, _, _ = arrays(1, 32768, 1, 2, 2, 64)
    window = dict(causal=True, window=16)
    whole = jax.jit(lambda q: ops.attention(q + 0.5, q + 0.5, q + 0.5, **window))(q)
    part = q[:, :4096] + 0.5
    np.testing.assert_array_equal(whole[:, :4096], ops.attention(part, part, part, **window))


def test_it_is_chosen_except_where_queries_see_nothing():
    q, k, v = arrays(1, 8, 8, 2, 1, 16)
    assert ops.attention.select(q, k, v).name == "native"
    assert ops.attention.select(q, k, v, window=8, soft_cap=2.0).name == "native"
    assert ops.attention.select(q, k, v, window=8, causal=False).name == "reference"
    assert ops.attention.select(q, k[:, :4], v[:, :4]).name == "reference"
    assert ops.attention.select(q, k[:, :4], v[:, :4], causal=False).name == "native"
    assert ops.attention.select(q, k.astype(jnp.float16), v.astype(jnp.float16)).name == "reference"
