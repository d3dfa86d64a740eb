"""Where cuDNN's attention is chosen; its results need a GPU (tests/gpu)."""

import jax
import jax.numpy as jnp
import pytest

from verax import ops

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
