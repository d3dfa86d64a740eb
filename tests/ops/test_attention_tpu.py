"""The TPU's kernel of attention over whole sequences, interpreted: numbers past the end of an array are NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention import exact_attention
from verax import ops
from verax.ops.tpu.attention_kernel import flash_attention

INTERPRETED = pltpu.InterpretParams(uninitialized_memory="nan")
TILES = {"queries": 128, "keys": 128, "interpret": INTERPRETED}


def arrays(T, S, N=2, K=1, H=8, B=1, dtype="float32"):
    rng = np.random.default_rng(T + S)
    return [jnp.asarray(rng.standard_normal((B, n, heads, H)), dtype) for n, heads in ((T, N), (S, K), (S, K))]


def exact(q, k, v, *, causal=True, segments=None, scale=None, window=None, soft_cap=None):
    T, S = q.shape[1], k.shape[1]
    behind = (np.arange(T) + S - T)[:, None] - np.arange(S)
    visible = np.ones((T, S), bool) if window is None else np.abs(behind) < window
    if causal:
        visible &= behind >= 0
    owners = np.zeros((q.shape[0], T), int) if segments is None else np.asarray(segments)
    seen = [visible & (o[:, None] == o) if segments is not None else visible for o in owners]
    return np.stack([exact_attention(*rows, scale, soft_cap) for rows in zip(q, k, v, seen, strict=True)])


@pytest.mark.parametrize(
    ("T", "S", "sizes", "options"),
    [
        (1, 1, {}, {}),
        (200, 200, {"N": 6, "K": 2}, {}),
        (130, 300, {}, {"causal": False, "scale": 0.3}),
        (300, 77, {"B": 2}, {"causal": False}),
        (150, 390, {"B": 2, "K": 2}, {"soft_cap": 1.5}),
        (300, 300, {}, {"window": 1}),
        (270, 300, {}, {"window": 130}),
        (300, 300, {}, {"window": 20, "causal": False}),
        (520, 520, {}, {"window": 130, "causal": False}),
    ],
)
def test_results_are_those_in_float64(T, S, sizes, options):
    q, k, v = arrays(T, S, **sizes)
    np.testing.assert_allclose(flash_attention(q, k, v, **options, **TILES), exact(q, k, v, **options), atol=2e-5)


@pytest.mark.parametrize(
    ("H", "N", "K", "options"),
    [
        (64, 2, 2, {"causal": False}),
        (64, 6, 3, {"window": 70}),
        (64, 4, 1, {"soft_cap": 1.5}),
        (32, 8, 4, {"scale": 0.3}),
    ],
)
def test_small_heads_share_a_tile(H, N, K, options):
    q, k, v = arrays(150, 170, N=N, K=K, H=H)
    np.testing.assert_allclose(flash_attention(q, k, v, **options, **TILES), exact(q, k, v, **options), atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 30}])
@pytest.mark.parametrize("H", [8, 64])
def test_packed_sequences_are_kept_apart(options, H):
    q, k, v = arrays(300, 300, B=2, H=H)
    segments = jnp.asarray(np.repeat([[7, 1, 2, 9], [3, 3, -1, 0]], [150, 1, 99, 50], axis=1))
    found = flash_attention(q, k, v, segments, **options, **TILES)
    np.testing.assert_allclose(found, exact(q, k, v, segments=segments, **options), atol=2e-5)


def test_blocks_are_no_longer_than_needed():
    q, k, v = arrays(140, 1100)
    np.testing.assert_allclose(flash_attention(q, k, v, interpret=INTERPRETED), exact(q, k, v), atol=2e-5)


@pytest.mark.parametrize("sizes", [{}, {"K": 2, "H": 64}])
def test_bfloat16_loses_no_more_than_rounding_its_inputs(sizes):
    q, k, v = arrays(300, 300, dtype="bfloat16", **sizes)
    expected = exact(q, k, v)
    found = flash_attention(q, k, v, **TILES)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_in_one_head_of_a_tile_leaves_the_other_as_it_is(place):
    q, k, v = arrays(200, 200, K=2, H=64)
    expected = exact(q, k, v)[:, :, 0]
    changed = {"query": q, "key": k, "value": v}
    changed[place] = changed[place].at[0, 5, 1, 3].set(jnp.nan)
    found = np.asarray(flash_attention(*changed.values(), **TILES))
    np.testing.assert_allclose(found[:, :, 0], expected, atol=2e-5)
    assert np.isnan(found[0, 5, 1]).any()


def test_nan_in_a_query_and_in_a_key_stays_where_it_is_seen():
    q, k, v = arrays(300, 300)
    k = k.at[0, 290].set(jnp.nan)
    found = np.asarray(flash_attention(q.at[0, 5, 1].set(jnp.nan), k, v, **TILES))
    expected = np.zeros(found.shape, bool)
    expected[0, 5, 1] = True
    expected[0, 290:] = True
    np.testing.assert_array_equal(np.isnan(found), expected)


def chosen(T=4096, S=4096, H=128, K=4, dtype="bfloat16", **options):
    q, k = jax.ShapeDtypeStruct((1, T, 12, H), "float32"), jax.ShapeDtypeStruct((1, S, K, H), dtype)
    return ops.attention.select(q, k, k, **options).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    segments = jax.ShapeDtypeStruct((1, 4096), "int32")
    with ops.use_target("tpu", "TPU v5 lite"):
        assert chosen() == "chunked"
        with ops.use_implementations(attention="pallas"):
            taken = [
                {},
                {"S": 77, "causal": False},
                {"H": 256, "window": 512},
                {"H": 64},
                {"H": 32, "K": 3},
                {"segments": segments},
                {"soft_cap": 9.0},
            ]
            assert [chosen(**change) for change in taken] == ["pallas"] * len(taken)
            refused = [
                {"H": 80},
                {"H": 384},
                {"K": 5},
                {"dtype": "float16"},
                {"S": 4000},
                {"S": 4000, "causal": False, "window": 9},
            ]
            assert [chosen(**change) for change in refused] == ["chunked"] * len(refused)
    with ops.use_implementations(attention="pallas"):
        assert chosen() != "pallas"
