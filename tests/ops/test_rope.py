"""Rotary frequencies, whose last bits count, as positions of a hundred thousand multiply them; heads that rotate."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import NATIVE, at_level, needs_library
from verax import ops
from verax.ops.gpu.rope import rotated
from verax.ops.rope import RotaryConfig


@pytest.mark.parametrize("theta", [1e4, 1.5e5, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_within_two_roundings_of_float64(theta, head_dim):
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    exact = theta**-exponents
    frequencies, _ = RotaryConfig(theta).frequencies(head_dim)
    assert np.abs(frequencies / exact - 1).max() < 1e-7
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "rope_theta": theta}
    frequencies, factor = RotaryConfig.from_hf({"rope_parameters": yarn}).frequencies(head_dim)
    assert frequencies[0] == 1
    assert frequencies[-1] == pytest.approx(exact[-1] / 8, rel=1e-7)
    assert factor == pytest.approx(0.1 * np.log(8) + 1)


def exact_norm_rotary(x, weight, cos, sin, eps):
    x, weight, cos, sin = (np.asarray(array, np.float64) for array in (x, weight, cos[:, None], sin[:, None]))
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    first, second, rest = np.split(y, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def heads(N, K, H, fraction=1.0):
    rng = np.random.default_rng(N)
    q, k = (jnp.asarray(rng.standard_normal((5, count, H)) * 30, jnp.float32) for count in (N, K))
    weights = [jnp.asarray(rng.standard_normal(H), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    tables = ops.rotary_tables(jnp.asarray([0, 1, 7, 400, 30_000]), RotaryConfig(fraction=fraction), H)
    expected = [exact_norm_rotary(x, weight, *tables, 1e-6) for x, weight in zip((q, k), weights, strict=True)]
    return (q, k, *weights, *tables), expected


@pytest.mark.parametrize("by", ["reference", *NATIVE])
@pytest.mark.parametrize("sizes", [(16, 8, 128), (9, 3, 32), (1, 1, 64), (3, 2, 50, 0.3), (200, 40, 128, 0.25)])
def test_heads_are_normalised_and_rotated_as_in_float64(by, sizes):
    implementation, level = at_level(by)
    arguments, expected = heads(*sizes)
    with level, ops.use_implementations(norm_rotary=implementation):
        outs = ops.norm_rotary(*arguments, 1e-6)
    for out, exact in zip(outs, expected, strict=True):
        np.testing.assert_allclose(out, exact, atol=3e-6)


@pytest.mark.parametrize("sizes", [(16, 8, 128), (9, 3, 32), (1, 1, 64)])
def test_the_kernel_for_a_gpu_normalises_and_rotates_as_in_float64(sizes):
    arguments, expected = heads(*sizes)
    for out, exact in zip(rotated(*arguments, eps=1e-6, interpret=True), expected, strict=True):
        np.testing.assert_allclose(out, exact, atol=3e-6)


@needs_library
def test_the_cpu_kernel_can_be_mapped_and_differentiated():
    (q, *others), _ = heads(4, 2, 32)

    def total(implementation, q):
        with ops.use_implementations(norm_rotary=implementation):
            return sum(jnp.sum(jnp.sin(out)) for out in ops.norm_rotary(q, *others, 1e-6))

    ours, theirs = (jax.grad(partial(total, by))(q) for by in ("native", "reference"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    mapped = jax.vmap(partial(total, "native"))(jnp.stack([q, q + 1]))
    np.testing.assert_allclose(mapped, [total("reference", q), total("reference", q + 1)], rtol=1e-5)


def test_one_kernel_rotates_whole_heads_on_an_nvidia_gpu():
    def chosen(fraction, eps=1e-6):
        q, k = (jnp.zeros((2, heads, 128)) for heads in (16, 8))
        tables = [jnp.zeros((2, int(64 * fraction)))] * 2
        return ops.norm_rotary.select(q, k, jnp.ones(128), jnp.ones(128), *tables, eps).name

    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert [chosen(1.0), chosen(0.25), chosen(1.0, eps=jnp.ones(()))] == ["triton", "reference", "reference"]
    with ops.use_target("gpu", "AMD MI300X"):
        assert chosen(1.0) == "reference"
