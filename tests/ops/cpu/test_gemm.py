"""The native matmul of many rows at every level, against float64."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.gguf import random_blocks
from verax import ops
from verax.ops.cpu import library
from verax.ops.cpu.linear import MOST_INTEGERS
from verax.ops.quantized import QuantizedWeight, round_inputs

pytestmark = needs_library


KINDS = ("float32", "bfloat16", "int8")


def arrays(m, k, n, kind="bfloat16"):
    rng = np.random.default_rng(0)
    x, w, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((m, k), (n, k), (n,)))
    if kind == "int8":
        return x.astype(jnp.bfloat16), ops.quantize(w, 8), bias
    return x.astype(kind), w.astype(kind), bias.astype(kind)


@jax.jit
def native(x, w, bias=None):
    with ops.use_implementations(linear="native_gemm"):
        return ops.linear(x, w, bias)


def exact(x, w, bias: Any = 0.0):
    if isinstance(w, ops.QuantizedWeight):
        w = np.asarray(w.integers(), np.float64) * np.asarray(w.row_scales(), np.float64)
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)


@for_each_level
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 32, 16), (7, 64, 48), (70, 1056, 80), (200, 32, 80), (33, 800, 496), (0, 32, 16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_is_exact_to_rounding(level, kind, m, k, n):
    # More than one piece of K (384, of tiles 1,024), block of rows (192) and of columns (384); tiles, strips and pieces
    # that end early.
    x, w, bias = arrays(m, k, n, kind)
    with library.use_level(level):
        np.testing.assert_allclose(native(x, w, bias), exact(x, w, bias), rtol=1e-5, atol=3e-6 * k)
        np.testing.assert_allclose(native(x, w), exact(x, w), rtol=1e-5, atol=3e-6 * k)


@for_each_level
@pytest.mark.parametrize("kind", ops.BLOCK_KINDS)
def test_blocks_of_gguf_files_are_unpacked_on_the_way(level, kind):
    # Pieces of K (384 or 192) end within super-blocks of 256.
    w = ops.BlockQuantizedWeight.from_blocks(kind, random_blocks(kind, 80, 768))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 768)), jnp.float32)
    with library.use_level(level):
        rounded = jnp.bfloat16 if library.has("bf16_dot") else jnp.float32
        inputs, weights = np.asarray(x.astype(rounded), np.float64), np.asarray(w.dequantize(rounded), np.float64)
        size = np.abs(inputs) @ np.abs(weights).T
        assert np.all(np.abs(native(x, w) - inputs @ weights.T) <= 1e-5 * size)
        # A value that is not finite spoils its row alone.
        spoiled, others = np.asarray(native(x.at[1, 700].set(jnp.inf), w)), np.arange(40) != 1
        assert not np.isfinite(spoiled[1]).any()
        np.testing.assert_array_equal(spoiled[others], np.asarray(native(x, w))[others])


@for_each_level
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(level, kind):
    x, w, bias = arrays(200, 416, 64, kind)
    with library.use_level(level):
        whole = np.asarray(native(x, w, bias))
        np.testing.assert_array_equal(native(x[100:140], w, bias), whole[100:140])


def chosen(*sizes):
    return ops.linear.select(*arrays(*sizes)).name


# Capabilities of a level, and the implementation for numbers of rows of a kind, with a weight that the kernel takes.
CHOICES = {
    "amx": (
        {"bf16_dot", "bf16_tiles", "fma", "half_dot"},
        {
            "native": [(4, "bfloat16"), (11, "float32"), (128, "int8")],
            "native_gemm": [(5, "bfloat16"), (127, "bfloat16"), (24, "float32")],
            "reference": [(128, "bfloat16")],
        },
    ),
    "avx512_bf16": (
        {"bf16_dot", "fma", "half_dot"},
        {
            "native": [(23, "bfloat16"), (11, "float32"), (128, "int8")],
            "native_gemm": [(24, "bfloat16"), (511, "bfloat16"), (12, "float32"), (129, "int8")],
            "reference": [(512, "bfloat16")],
        },
    ),
    "neon_bf16": (
        {"bf16_dot", "fma"},
        {
            "native": [(23, "bfloat16"), (11, "float32"), (128, "int8")],
            "native_gemm": [(24, "bfloat16"), (5000, "bfloat16"), (12, "float32"), (129, "int8")],
            "reference": [(33, "float32")],
        },
    ),
    # XLA would convert bfloat16 and integers.
    "avx2": (
        {"fma", "half_dot"},
        {
            "native": [(11, "bfloat16"), (128, "int8")],
            "native_gemm": [
                *((rows, kind) for rows, kind in ((12, "bfloat16"), (5000, "bfloat16"), (129, "int8"), (5000, "int8"))),
                *((rows, "float32") for rows in (12, 32)),
            ],
            "reference": [(33, "float32")],
        },
    ),
    "portable": (set(), {"reference": [(33, "bfloat16")], "dequantized": [(200, "int8")]}),
}


@pytest.mark.parametrize("level", CHOICES)
def test_it_runs_where_it_is_faster(level, monkeypatch):
    capabilities, choices = CHOICES[level]
    monkeypatch.setattr(library, "has", lambda capability: capability in capabilities)
    with library.use_level("portable"):
        for name, calls in choices.items():
            assert [chosen(rows, 64, 48, kind) for rows, kind in calls] == [name] * len(calls)
        assert chosen(33, 65, 48) == chosen(33, 64, 47) == "reference"
        x, w, _ = arrays(33, 64, 48, "float32")
        assert ops.linear.select(x, w.astype(jnp.float16)).name == "reference"
        assert ops.linear.select(x, ops.quantize(w, 8, 32)).name == "native"


@pytest.mark.parametrize(("level", "least"), {"amx": 33, "avx512_bf16": 129, "neon_bf16": 129, "avx2": 33}.items())
def test_blocks_of_gguf_files_go_to_it_from_more_rows_on(level, least, monkeypatch):
    monkeypatch.setattr(library, "has", lambda capability: capability in CHOICES[level][0])
    w = ops.BlockQuantizedWeight.from_blocks("Q4_0", random_blocks("Q4_0", 48, 64))
    x = jnp.zeros((least, 64))
    assert [ops.linear.select(x[:rows], w).name for rows in (least - 1, least)] == ["native", "native_gemm"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_differentiated(kind):
    x, w, bias = arrays(40, 64, 48, kind)

    def loss(implementation, x, bias, w):
        with ops.use_implementations(linear=implementation):
            return jnp.sum(jnp.tanh(ops.linear(x.reshape(2, 20, 64), w, bias)))

    by = (0, 1) if kind == "int8" else (0, 1, 2)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=implementation: loss(f, *a), by))(x, bias, w)
        for implementation in IMPLEMENTATIONS
    ]
    for got, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=0.02, atol=0.02)


IMPLEMENTATIONS = ("native_gemm", "reference")


def rounding(m, k, n):
    """Inputs of rows of very different sizes, a weight that rounds them, and what their product then is, in float64."""
    x, w, bias = arrays(m, k, n, "int8")
    x = x.astype(jnp.float32) * jnp.exp(3 * jnp.arange(m, dtype=jnp.float32) % 7)[:, None]
    w = replace(w, rounds_inputs=True)
    integers, scale = map(np.asarray, round_inputs(x))
    return x, w, bias, exact(integers.astype(np.float64) * scale, w, bias)


@for_each_level
@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 16), (7, 64, 48), (200, 32, 80), (33, 800, 496), (0, 32, 16)])
def test_products_of_integers_are_exact_but_for_their_scales(level, m, k, n):
    x, w, bias, expected = rounding(m, k, n)
    with library.use_level(level):
        assert ops.linear.select(x, w, bias).name == "native_integers"
        got = np.asarray(jax.jit(ops.linear)(x, w, bias))
        # A row's sums are exact; scales and the bias are multiplied and added in float32.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(jax.jit(ops.linear)(x[m // 2 :], w, bias), got[m // 2 :])


@for_each_level
def test_a_row_that_is_not_finite_gives_nan_and_zeros_give_the_bias(level):
    x, w, bias, _ = rounding(4, 64, 48)
    x = x.at[0, 3].set(jnp.inf).at[1, 0].set(jnp.nan).at[2].set(0.0)
    with library.use_level(level):
        y = np.asarray(jax.jit(ops.linear)(x, w, bias))
    assert np.isnan(y[:2]).all()
    np.testing.assert_array_equal(y[2], bias)
    assert np.isfinite(y[3]).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_that_32_bits_hold_are_exact(sign):
    k = MOST_INTEGERS
    x = jnp.stack([jnp.full(k, 2.0), jnp.full(k, -3.0)])  # integers 127 and -127
    integers = jnp.full((16, k), 127 * sign, jnp.int8).at[1].set(-128)
    w = replace(QuantizedWeight.from_integers(integers, jnp.ones((16, 1)), 8), rounds_inputs=True)
    expected = np.array([[2.0], [-3.0]]) * np.where(np.arange(16) == 1, -128.0, 127.0 * sign) * k
    assert ops.linear.select(x, w).name == "native_integers"
    np.testing.assert_allclose(np.asarray(jax.jit(ops.linear)(x, w)), expected, rtol=1e-6)
