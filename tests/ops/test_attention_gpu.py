"""Where cuDNN's attention is chosen. Its results need a GPU: tests/gpu."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from verax import ops

BF16 = jnp.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    def become(capability="9.0"):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])

    become()
    return become


def chosen(T=40, S=40, H=128, dtype=BF16, **options):
    q = jax.ShapeDtypeStruct((1, T, 4, H), jnp.float32)
    k = jax.ShapeDtypeStruct((1, S, 2, H), dtype)
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
    ]
    assert "cudnn" not in others


def test_other_devices_do_without(gpu):
    for capability in ("7.5", "gfx942", ""):
        gpu(capability)
        assert chosen() == "reference"


def test_a_cpu_does_without():
    assert chosen() != "cudnn"
