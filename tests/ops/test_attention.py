"""The chunked implementation of attention against the reference, and when it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention import exact_attention, exact_paged_attention, paged_problem
from verax import ops
from verax.ops.attention import CHUNK, MAX_SCORES, join_heads, own_results, spread_queries
from verax.ops.tpu.paged import ragged_attention


def arrays(T, S, N=4, K=2, H=8, B=2):
    keys = jax.random.split(jax.random.key(T), 3)
    return [jax.random.normal(key, (B, n, heads, H)) for key, n, heads in zip(keys, (T, S, S), (N, K, K), strict=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(CHUNK, 300), (CHUNK + 1, CHUNK + 1), (600, 700), (700, 600)])
def test_chunks_give_the_references_result(T, S, causal):
    q, k, v = arrays(T, S)
    with ops.use_implementations(attention="chunked"):
        got = ops.attention(q, k, v, causal=causal, scale=0.3)
    np.testing.assert_allclose(got, ops.attention.reference(q, k, v, causal=causal, scale=0.3), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_sees_its_window_only_and_scores_are_capped(implementation, causal):
    T, S, window, soft_cap = CHUNK + 44, CHUNK + 60, 21, 1.5
    q, k, v = arrays(T, S)
    with ops.use_implementations(attention=implementation):
        got = ops.attention(q, k, v, causal=causal, window=window, soft_cap=soft_cap)
    distance = (np.arange(T) + S - T)[:, None] - np.arange(S)
    visible = (distance < window) & (distance >= 0 if causal else distance > -window)
    expected = [exact_attention(*rows, visible, soft_cap=soft_cap) for rows in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_chunks_keep_packed_sequences_apart():
    q, k, v = arrays(600, 600)
    segments = jnp.asarray(np.repeat([[0, 1, 2], [3, 3, 4]], 200, axis=1))
    with ops.use_implementations(attention="chunked"):
        got = ops.attention(q, k, v, segments=segments)
    np.testing.assert_allclose(got, ops.attention.reference(q, k, v, segments=segments), atol=2e-6)


def test_chunks_have_the_references_gradient():
    q, k, v = arrays(CHUNK + 20, CHUNK + 20)

    def gradients(implementation):
        def loss(q, k, v):
            with ops.use_implementations(attention=implementation):
                return jnp.sum(jnp.sin(ops.attention(q, k, v)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for got, expected in zip(gradients("chunked"), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_scores_beyond_the_limit_are_never_written_out_at_once():
    def chosen(T):
        q = jax.ShapeDtypeStruct((1, T, 16, 64), jnp.float32)
        return ops.attention.select(q, q, q)  # pyright: ignore[reportArgumentType]

    T = int((MAX_SCORES / 16) ** 0.5)
    with ops.use_target("tpu"):
        assert chosen(T).name == "reference"
        assert chosen(T + 1).name == "chunked"
    assert "flash" in chosen(T + 1).traits


@pytest.mark.parametrize(("N", "K", "m"), [(4, 4, 2), (12, 4, 4), (6, 2, 2)])
@pytest.mark.parametrize("implementation", ["tiled", "pallas"])
def test_results_are_those_of_the_heads_apart(N, K, m, implementation):
    lengths, counts, H, options = [5, 70, 17, 40], [1, 1, 1, 40], 8, {"window": 37, "scale": 0.3}
    (q, k, v), table, lengths, starts = paged_problem(0, lengths, counts, N=N, K=K, H=H, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts, **options)
    k, v = (jnp.swapaxes(join_heads(jnp.swapaxes(x, 1, 2), m), 1, 2) for x in (k, v))  # [P, K/m, p, m H]
    arguments = spread_queries(q, K, m), k, v, table, lengths, starts
    if implementation == "pallas":
        interpreted = pltpu.InterpretParams(uninitialized_memory="nan")
        out = ragged_attention(*arguments, pages=2, interpret=interpreted, **options)
    else:
        out = ops.paged_attention.implementations[implementation].function(*arguments, **options)
    np.testing.assert_allclose(own_results(out, K, m), exact, atol=2e-5)
