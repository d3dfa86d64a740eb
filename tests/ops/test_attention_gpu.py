"""Where cuDNN's attention is chosen, whose results need a GPU (tests/gpu), and the kernel in Triton, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.ops.gpu.attention_kernel import Tile, flash_attention

BF16 = jnp.bfloat16


@pytest.fixture
def gpu():
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        yield


def chosen(T=40, S=40, H=128, K=2, dtype=BF16, **options):
    q = jax.ShapeDtypeStruct((1, T, 4, H), jnp.float32)
    k = jax.ShapeDtypeStruct((1, S, K, H), dtype)
    return ops.attention.select(q, k, k, **options).name  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("gpu")
def test_half_precision_without_masks_runs_on_cudnn():
    assert chosen(causal=False) == chosen(causal=True) == chosen(S=700, causal=False) == "cudnn"
    assert chosen(H=64, dtype=jnp.float16) == "cudnn"


@pytest.mark.usefixtures("gpu")
def test_what_cudnn_would_do_otherwise_or_not_at_all_is_left_to_other_implementations():
    others = [
        chosen(dtype=jnp.float32),
        chosen(H=12),
        chosen(H=256),
        chosen(T=3, causal=True),  # keys are counted from the other end
        chosen(segments=jax.ShapeDtypeStruct((1, 40), jnp.int32)),
        chosen(S=0, causal=False),
        chosen(window=8),
        chosen(soft_cap=50.0),
    ]
    assert "cudnn" not in others


@pytest.mark.parametrize("capability", ["7.5", "gfx942", ""])
def test_other_devices_do_without(capability):
    with ops.use_target("gpu", "some GPU", compute_capability=capability):
        assert chosen() == "reference"


def test_a_cpu_does_without():
    assert chosen() != "cudnn"


@pytest.mark.usefixtures("gpu")
def test_without_a_gpu_products_of_the_same_result_stand_for_cudnns():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 40, 2, 64), BF16) for key in keys)
    got = jax.jit(lambda *arrays: ops.attention(*arrays, causal=True))(q, k, v)
    assert got.dtype == jnp.float32
    assert jnp.allclose(got, ops.attention.reference(q, k, v, causal=True), atol=2e-2)


interpreted = partial(flash_attention, tile=Tile(32, 16, 4), interpret=True)


def arrays(T, S, N=2, K=1, H=16, B=1, dtype="float32"):
    rng = np.random.default_rng(T + S)
    return [jnp.asarray(rng.standard_normal((B, n, heads, H)), dtype) for n, heads in ((T, N), (S, K), (S, K))]


@pytest.mark.parametrize(
    ("T", "S", "sizes", "options"),
    [
        (1, 1, {}, {}),
        (50, 50, {"N": 6, "K": 2}, {}),
        (64, 64, {"H": 8}, {"causal": False}),
        (33, 75, {"H": 24}, {"causal": False, "scale": 0.3}),
        (75, 20, {"B": 2}, {"causal": False}),
        (40, 97, {"B": 2, "K": 2, "H": 256}, {"soft_cap": 1.5}),
        (75, 75, {}, {"window": 1}),
        (67, 75, {}, {"window": 33}),
        (75, 75, {}, {"window": 5, "causal": False}),
        (130, 130, {}, {"window": 33, "causal": False}),
    ],
)
def test_results_are_those_of_the_reference(T, S, sizes, options):
    q, k, v = arrays(T, S, **sizes)
    np.testing.assert_allclose(interpreted(q, k, v, **options), ops.attention.reference(q, k, v, **options), atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 9}])
def test_packed_sequences_are_kept_apart(options):
    q, k, v = arrays(75, 75, B=2)
    segments = jnp.asarray(np.repeat([[7, 1, 2, 9], [3, 3, -1, 0]], [37, 1, 25, 12], axis=1))
    expected = ops.attention.reference(q, k, v, segments=segments, **options)
    np.testing.assert_allclose(interpreted(q, k, v, segments, **options), expected, atol=2e-5)


def test_blocks_that_no_query_of_a_tile_sees_are_not_read():
    q, k, v = arrays(96, 96)
    segments = jnp.asarray(np.repeat([[0, 1, 2]], 32, axis=1))
    nan = v.at[0, :32].set(jnp.nan)  # a weight of 0 would not hide it
    windowed = interpreted(q, k, nan, window=16)[:, 64:]
    packed = interpreted(q, k, nan, segments, causal=False)[:, 32:]
    assert np.isfinite(windowed).all()
    assert np.isfinite(packed).all()


def test_bfloat16_loses_no_more_than_rounding_its_inputs():
    q, k, v = arrays(75, 75, dtype="bfloat16")
    expected = ops.attention.reference(*(x.astype(jnp.float32) for x in (q, k, v)))
    found = interpreted(q, k, v)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 9, "causal": False}])
def test_nan_in_a_query_and_in_a_key_stays_where_it_is_seen(options):
    q, k, v = arrays(75, 75)
    k, q = k.at[0, 40].set(jnp.nan), q.at[0, 5, 1].set(jnp.nan)
    np.testing.assert_array_equal(
        np.isnan(interpreted(q, k, v, **options)), np.isnan(ops.attention.reference(q, k, v, **options))
    )


def test_nan_in_a_key_stays_in_its_segment():
    q, k, v = arrays(75, 75)
    segments = jnp.asarray(np.repeat([[0, 1]], [37, 38], axis=1))
    found = np.isnan(interpreted(q, k.at[0, 40].set(jnp.nan), v, segments, causal=False))
    assert not found[:, :37].any()
    assert found[:, 37:].all()


@pytest.mark.usefixtures("gpu")
def test_the_kernel_in_triton_runs_where_it_is_named_and_takes_the_call():
    segments = jax.ShapeDtypeStruct((1, 40), jnp.int32)
    assert chosen(H=256) == "reference"
    with ops.use_implementations(attention="triton"):
        taken = [{"H": 256}, {"window": 8}, {"soft_cap": 50.0}, {"segments": segments}, {"T": 3}, {"H": 12}]
        assert [chosen(**change) for change in taken] == ["triton"] * len(taken)
        refused = [{"H": 320}, {"K": 3}, {"S": 20}, {"S": 20, "causal": False, "window": 9}]
        assert "triton" not in [chosen(**change) for change in refused]
