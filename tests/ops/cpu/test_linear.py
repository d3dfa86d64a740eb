"""The C++ products of few rows at every level and with every kind of weight, against float64."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.gguf import random_blocks
from verax import ops
from verax.ops.block_quantized import BLOCK_KINDS
from verax.ops.cpu import library

pytestmark = needs_library

FLOATS = ["float32", "bfloat16"]
SCHEMES = {
    "int8": (8, None),
    "int8 by 32": (8, 32),
    "int8 by 64": (8, 64),
    "int8 by 128": (8, 128),
    "int4 by 32": (4, 32),
    "int4 by 64": (4, 64),
    "int4 by 128": (4, 128),
}
# As checkpoints have them: of 8-bit floats, or with a zero point for each scale.
STORED = {
    "float8": None,
    "float8 by 32": 32,
    "float8 by 128": 128,
    "zeros by 32": 32,
    "zeros by 64": 64,
    "zeros by 128": 128,
}
KINDS = [*FLOATS, *SCHEMES, *STORED, *BLOCK_KINDS]
QUANTIZED = [kind for kind in KINDS if kind not in FLOATS]

each_kind = pytest.mark.parametrize("kind", KINDS)


def group_of(kind):
    return SCHEMES[kind][1] if kind in SCHEMES else STORED.get(kind)


quantize = jax.jit(ops.quantize, static_argnums=(1, 2))
dequantize = jax.jit(lambda weight: weight.dequantize())


@jax.jit
def with_zeros(q, zeros):
    return ops.QuantizedWeight.from_integers(q.integers(), q.row_scales(), 4, q.group_size, zeros)


def block_weight(kind, blocks):
    return jax.tree.map(jnp.asarray, ops.BlockQuantizedWeight.from_blocks(kind, blocks))


def weight_of(kind, n, k, seed=0):
    """A random weight `[n, k]`."""
    if kind in BLOCK_KINDS:
        return block_weight(kind, random_blocks(kind, n, k))
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    if kind in FLOATS:
        return jnp.asarray(w, kind)
    if kind in SCHEMES:
        return quantize(w, *SCHEMES[kind])
    if kind.startswith("float8"):
        return replace(quantize(w, 8, group_of(kind)), values=jnp.asarray(30 * w, jnp.float8_e4m3fn))
    zeros = np.random.default_rng(1).integers(-8, 8, (n, k // group_of(kind)))
    return with_zeros(quantize(w, 4, group_of(kind)), zeros)


def inputs(m, k, seed=2):
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def plain(w):
    return np.asarray(w if isinstance(w, jax.Array) else dequantize(w), np.float64)


def taken(x, kind):
    """x in float64 as the kernels take it with a kind of weight: rounded to it, or to integers of parts of a row."""
    if kind in FLOATS or kind.startswith("float8"):
        return x.astype(jnp.dtype("bfloat16" if kind.startswith("float8") else kind)).astype(np.float64)
    together, largest = group_of(kind) or 32, 32639 if kind in BLOCK_KINDS else 127
    if kind.startswith("int8"):
        together, largest = 1024, 32639
    parts = []
    for begin in range(0, x.shape[1], together):
        part = x[:, begin : begin + together]
        scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(largest)
        factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 1e-37)
        parts.append(np.rint(part * factor) * scale.astype(np.float64))
    return np.concatenate(parts, axis=1)


@jax.jit
def native_each(xs, w):
    """Products of inputs of several sizes in one program, which serves every level: compiling takes longer."""
    with ops.use_implementations(linear="native"):
        return [ops.linear(x, w) for x in xs]


@jax.jit
def _native(x, w, bias):
    with ops.use_implementations(linear="native"):
        return ops.linear(x, w, bias)


def native(x, w, bias=None):
    return np.asarray(_native(x, w, bias))


SIZES = (0, 1, 4, 7, 17, 33)
"""Rows of x; of further numbers, `test_a_row_does_not_depend_on_its_batch` compares each row with the whole's."""

ROWS = (1, 3, 7, 64, 129)


def rows(q, n):
    """A quantised weight of the first rows of one."""
    if q.bits == 8:
        return replace(q, values=q.values[:n], scales=q.scales[:n], size_out=n)
    zeros = q.row_zeros()
    integers, scales, zeros = q.integers()[:n], q.row_scales()[:n], None if zeros is None else zeros[:n]
    return ops.QuantizedWeight.from_integers(integers, scales, 4, q.group_size, zeros)


@jax.jit
def first_rows(w):
    """Weights of `ROWS` rows, in one program."""
    return [w[:n] if isinstance(w, jax.Array) else rows(w, n) for n in ROWS]


def weights_of(kind):
    """The first rows of weights, at last all, by inputs: less than a unit, parts, more than are scaled at a time."""
    if kind in BLOCK_KINDS:
        lengths = (256, 768, 2304) if BLOCK_KINDS[kind].super_blocks else (32, 96, 640, 2048)
        counts = {k: (1, 16, 37, 129) if k < 1000 else (37,) for k in lengths}
        stored = {k: random_blocks(kind, max(ns), k) for k, ns in counts.items()}
        return {k: [block_weight(kind, stored[k][:n]) for n in ns] for k, ns in counts.items()}
    group = group_of(kind)
    whole = (1, 2, 31, 32, 33, 100, 257) if kind in FLOATS else (1, 31, 33, 257, 1088)
    lengths = whole if group is None else (group, 3 * group, 4224)
    return {k: first_rows(weight_of(kind, max(ROWS), k)) for k in lengths}


@lru_cache(maxsize=1)
def products(kind):
    """Inputs, weights and their exact products with bounds on the error: for all levels in turn."""
    problems = []
    for k, weights in weights_of(kind).items():
        x, results, columns = inputs(max(SIZES), k), [], plain(weights[-1]).T
        whole, sizes = taken(x, kind) @ columns, np.abs(x) @ np.abs(columns)
        for w in weights:
            exact, size = whole[:, : w.shape[0]], sizes[:, : w.shape[0]]
            absolute = 1e-4 if kind in SCHEMES else 2e-6 * k
            results.append((exact, 1e-5 * size if kind in BLOCK_KINDS else 1e-5 * np.abs(exact) + absolute))
        problems.append((x, weights, results))
    return problems


def half(i):
    """Every other size, so that weights in turn meet all of them."""
    return SIZES[i % 2 :: 2]


@partial(jax.jit, static_argnums=2)
def native_grid(x, weights, number):
    """Products of the first rows of an input with each weight, in one program."""
    with ops.use_implementations(linear="native"):
        return [[ops.linear(x[:m], w) for m in half(i + number)] for i, w in enumerate(weights)]


@for_each_level
@each_kind
def test_every_shape_is_exact_to_rounding(level, kind):
    for number, (x, weights, results) in enumerate(products(kind)):
        with library.use_level(level):
            grid = native_grid(x, weights, number)
        for i, (outputs, (exact, bound)) in enumerate(zip(grid, results, strict=True)):
            for m, y in zip(half(i + number), outputs, strict=True):
                assert np.all(np.abs(y - exact[:m]) <= bound[:m]), (x.shape, exact.shape, m)


@for_each_level
@each_kind
def test_a_row_does_not_depend_on_its_batch(level, kind):
    k = 257 if kind in FLOATS else 768
    x, w = inputs(17, k), weight_of(kind, 129, k)
    cuts = [slice(m) for m in (1, 2, 3, 4, 5, 8, 9, 16)] + [slice(m, None) for m in (1, 4, 9, 14, 16)]
    with library.use_level(level):
        whole = native(x, w)
        for cut, y in zip(cuts, native_each([x[cut] for cut in cuts], w), strict=True):
            np.testing.assert_array_equal(y, whole[cut])


@for_each_level
@pytest.mark.parametrize("kind", FLOATS)
def test_nan_and_infinity_come_through_as_in_the_reference(level, kind):
    for value in (np.nan, np.inf, -np.inf):
        x, w = jnp.asarray(inputs(3, 70)), weight_of(kind, 9, 70)
        x = x.at[1, 69].set(value)
        w = w.at[4, 3].set(value).at[5].set(0)
        with library.use_level(level):
            y = native(x, w)
        reference = np.asarray(ops.linear.reference(x, w))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(reference))
        np.testing.assert_array_equal(np.where(np.isinf(reference), reference, 0), np.where(np.isinf(y), y, 0))


@for_each_level
@pytest.mark.parametrize("kind", [*SCHEMES, *BLOCK_KINDS])
def test_a_row_with_a_nan_or_infinity_is_not_finite_and_leaves_the_others_alone(level, kind):
    for m, n, value in ((3, 9, np.nan), (11, 16, np.nan), (3, 9, np.inf)):
        x, w = inputs(m, 768), weight_of(kind, n, 768)
        spoilt = x.copy()
        spoilt[1, 767] = value
        with library.use_level(level):
            alone, y = native(x, w), native(spoilt, w)
        assert not np.isfinite(y[1]).any()
        np.testing.assert_array_equal(y[::2], alone[::2])


@for_each_level
@pytest.mark.parametrize("kind", QUANTIZED)
def test_inputs_of_any_size_meet_quantised_weights(level, kind):
    w = weight_of(kind, 33, 768)
    for size in (0, 1e-42, 1e-36, 1e-20, 1e30):
        x = size * inputs(3, 768)
        x[0], x[1, 7] = 0, 300 * x[1, 7]  # a row of nothing, a row with an outlier
        with library.use_level(level):
            y = native(x, w)
        exact = x.astype(np.float64) @ plain(w).T
        np.testing.assert_array_equal(y[0], 0)
        largest = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1e-30)
        bound = 1e-2 if kind.startswith("int8") or kind in BLOCK_KINDS else 0.1
        assert np.max(np.abs(y - exact) / largest) < bound, size


def adversarial_inputs(k):
    """Rows with outliers among small values, single values, signs that cancel, large, small and denormal values."""
    x = inputs(17, k)
    x[0, ::32] *= 1000
    x[1, 5::64] = -3e4
    x[2, np.arange(k) % 40 != 0] = 0
    x[3] = np.where(np.arange(k) % 2, 1, -1)
    x[4] *= 1e30
    x[5] *= 1e-20
    x[6, ::3] = 1e-42
    x[7] = np.ldexp(np.sign(x[7]), -(np.arange(k) % 24))
    return x


@for_each_level
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_error_is_that_of_inputs_in_sixteen_bits(level, kind):
    # An input is off by half a step of its group's peak over 32,639 at most, which is as good as independent.
    x, w = adversarial_inputs(1024), weight_of(kind, 48, 1024)
    step = np.abs(x.reshape(len(x), -1, 32)).max(axis=2).repeat(32, axis=1) / 32639
    weights, x64 = plain(w), x.astype(np.float64)
    with library.use_level(level):
        error = np.abs(native(x, w) - x64 @ weights.T)
    assert np.all(error <= step / 2 @ np.abs(weights).T + 2e-6 * (np.abs(x64) @ np.abs(weights).T))
    deviation = np.sqrt((step**2 / 12) @ (weights**2).T)[8:]
    assert np.sqrt(np.mean((error[8:] / deviation) ** 2)) < 1.2


@for_each_level
@pytest.mark.parametrize("kind", ["int8", *BLOCK_KINDS])
def test_the_largest_integers_do_not_overflow(level, kind):
    w = quantize(jnp.ones((16, 4096)), 8, None)
    if kind in BLOCK_KINDS:
        blocks = ops.BlockQuantizedWeight.from_blocks(kind, random_blocks(kind, 16, 512, scales=np.float16([1])))
        words = jnp.asarray(blocks.words).at[:, :, : BLOCK_KINDS[kind].parts[0]].set(0xFFFFFFFF)
        w = ops.BlockQuantizedWeight(words, *blocks.shape, kind)
    x = np.ones((8, w.shape[1]), np.float32)
    with library.use_level(level):
        for sign in (1, -1):
            exact, size = sign * plain(w).sum(axis=1), np.abs(plain(w)).sum(axis=1)
            bound = 1e-5 * np.abs(exact) if kind == "int8" else 1e-4 * size
            assert np.all(np.abs(native(sign * x, w) - exact) <= bound)


def test_every_8_bit_float_is_multiplied_exactly():
    codes = np.arange(256, dtype=np.uint8)
    values = jnp.asarray(codes[codes & 127 != 127].view(jnp.float8_e4m3fn))[:, None]
    q = ops.QuantizedWeight(values, jnp.ones((len(values), 1)), len(values), 1, None, 8)
    np.testing.assert_array_equal(native(jnp.ones((1, 1)), q)[0], values[:, 0].astype(jnp.float32))


@for_each_level
@pytest.mark.parametrize("group", [None, 64])
def test_zero_points_of_8_bits_are_taken_off_as_exactly_as_products_are_added(level, group):
    rng = np.random.default_rng(0)
    groups = 256 // (group or 256)
    zeros = np.full((48, groups), 100, np.int8)
    integers = np.clip(np.rint(rng.normal(100, 20, (48, 256))), -128, 127).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (48, groups)).astype(np.float32)
    weight = ops.QuantizedWeight.from_integers(*map(jnp.asarray, (integers, scales)), 8, group, jnp.asarray(zeros))
    x = inputs(5, 256)
    with library.use_level(level):
        assert ops.linear.select(jnp.asarray(x), weight).name == "native_zero_points"
        y = ops.linear(jnp.asarray(x), weight)
    exact = x.astype(np.float64) @ plain(weight).T
    assert np.abs(y - exact).max() < 1e-3 * np.sqrt(np.mean(exact**2))


def test_bias_leading_axes_and_other_input_dtypes():
    x, w = jnp.asarray(inputs(6, 40)), weight_of("bfloat16", 10, 40)
    bias = jnp.arange(10, dtype=jnp.bfloat16)
    reference = ops.linear.reference(x, w, bias)
    y = native(x.reshape(2, 3, 40), w, bias)
    np.testing.assert_allclose(y, reference.reshape(2, 3, 10), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(native(x.astype(jnp.bfloat16), w, bias), y.reshape(6, 10))


@pytest.mark.parametrize("kind", ["float32", "Q5_K"])
def test_it_can_be_mapped_and_differentiated(kind):
    x, w = jnp.asarray(inputs(3, 256)), weight_of(kind, 10, 256)
    slopes = {}
    for implementation in ("native", "reference"):
        with ops.use_implementations(linear=implementation):
            many = jax.vmap(ops.linear, (0, None))(jnp.stack([x, 2 * x]), w)
            by = (0, 1) if kind == "float32" else 0
            slopes[implementation] = jax.grad(lambda x, w: jnp.sum(ops.linear(x, w) * jnp.arange(10.0)), by)(x, w)
        np.testing.assert_array_equal(many[1], 2 * many[0])
    for ours, theirs in zip(*map(jax.tree.leaves, slopes.values()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bfloat16", "Q4_K"])
def test_few_rows_run_natively_and_many_do_not(kind):
    w = weight_of(kind, 64, 256)
    assert ops.linear.select(jnp.ones((1, 256)), w).name == "native"
    assert ops.linear.select(jnp.ones((2, 2, 256)), w).name == "native"
    assert ops.linear.select(jnp.ones((512, 256)), w).name != "native"
    assert ops.linear.select(jnp.ones((512, 256)), weight_of("float32", 64, 256)).name == "reference"


@jax.jit
def together_and_alone(xs, weights, biases):
    """Products of each input with several weights as one operation, and with each by itself."""
    with ops.use_implementations(linear="native", multi_linear="native"):
        return [
            (ops.multi_linear(x, weights, biases), [ops.linear(x, w, b) for w, b in zip(weights, biases, strict=True)])
            for x in xs
        ]


@for_each_level
@pytest.mark.parametrize(
    "kinds",
    [
        *([kind] * 4 for kind in (*FLOATS, "int8", "int8 by 32", "int4 by 32", "float8 by 32", "zeros by 32")),
        ["Q4_K", "Q6_K", "Q8_0", "Q5_0"],  # queries, keys and values of a file are often of two kinds
    ],
)
def test_several_weights_give_what_each_gives_alone(level, kinds):
    sizes = (1, 16, 17, 300)  # less than a piece of work, a whole one, two with a rest, many
    weights = [weight_of(kind, n, 256) for kind, n in zip(kinds, sizes, strict=True)]
    biases = [None, np.arange(16, dtype=np.float32), None, np.arange(300, dtype=np.float32)]
    with library.use_level(level):
        for together, alone in together_and_alone([inputs(m, 256) for m in (0, 1, 3, 5, 17)], weights, biases):
            for y, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(y, expected)


def test_weights_of_two_kinds_are_multiplied_one_by_one():
    x, w = jnp.asarray(inputs(2, 64)), weight_of("bfloat16", 32, 64)
    other = w.astype(jnp.float32)
    assert ops.multi_linear.select(x, [w, w]).name == "native"
    assert ops.multi_linear.select(x, [w, other]).name == "reference"
    for y, weight in zip(ops.multi_linear(x, [w, other]), (w, other), strict=True):
        np.testing.assert_array_equal(y, ops.linear(x, weight))


def _padded_calls():
    """Operations on rows by name, with their weights."""
    w, wide = weight_of("bfloat16", 64, 96), weight_of("bfloat16", 96, 64)
    experts = jnp.stack([weight_of("bfloat16", 64, 96, seed) for seed in range(4)])
    choices = jnp.asarray(np.random.default_rng(4).integers(0, 4, (9, 2)), jnp.int32)
    packed = [ops.PackedWeight.from_weight(one.astype(jnp.float32), 4) for one in (w, wide)]
    rounded = replace(quantize(np.asarray(w, np.float32), 8), rounds_inputs=True)
    one = lambda x, w: ops.linear(x, w)
    return {
        **{f"linear, {kind}": (one, weight_of(kind, 64, 256)) for kind in ("float32", "int8", "int4 by 32", "Q4_K")},
        "many rows, bfloat16": (lambda x, w: by_name(x, w, linear="native_gemm"), w),
        "many rows, Q4_K": (lambda x, w: by_name(x, w, linear="native_gemm"), weight_of("Q4_K", 64, 256)),
        "rounded": (one, rounded),
        "several": (lambda x, w: jnp.concatenate(ops.multi_linear(x, [w, w]), -1), w),
        "packed": (one, packed[0]),
        "swiglu": (lambda x, w: ops.swiglu(x, w, w), w),
        "swiglu, packed": (lambda x, w: ops.swiglu(x, w, w), packed[0]),
        "mlp": (lambda x, w: ops.gelu_mlp(x, *w), (w, wide)),
        "mlp, packed": (lambda x, w: ops.gelu_mlp(x, *w), tuple(packed)),
        "experts": (lambda x, w: ops.grouped_linear(x[:, None], w, choices), experts),
        "experts of each": (lambda x, w: ops.grouped_linear(jnp.stack([x, -x], 1), w, choices), experts),
    }


def by_name(x, w, **choices):
    with ops.use_implementations(**choices):
        return ops.linear(x, w)


@pytest.mark.parametrize("name", _padded_calls() if library.available() else ())
def test_padding_is_left_out_and_the_other_rows_are_unchanged(name):
    call, w = _padded_calls()[name]
    width = 256 if "linear" in name or "Q4_K" in name else 96

    @jax.jit
    def padded(x, w, used):
        with ops.skip_padding(x.shape[:1], used):
            return call(x, w)

    x = jnp.asarray(inputs(9, width))
    whole = np.asarray(jax.jit(call)(x, w))
    for used in (0, 1, 5, 9):
        y = np.asarray(padded(x.at[used:].set(jnp.nan), w, jnp.int32(used)))
        np.testing.assert_array_equal(y[:used], whole[:used])
        np.testing.assert_array_equal(y[used:], 0)


def test_two_numbers_of_rows_share_no_program_of_a_function_within():
    w = weight_of("bfloat16", 32, 64)
    inner = jax.jit(lambda x: ops.linear(x, w))

    def outer(scale):
        def call(x, used):
            with ops.skip_padding(x.shape[:1], used):
                return inner(scale * x)

        return jax.jit(call)

    x = jnp.asarray(inputs(4, 64))
    for scale, used in ((1, 3), (2, 1)):
        y = outer(scale)(x, jnp.int32(used))
        np.testing.assert_array_equal(y[:used], scale * inner(x)[:used])
        np.testing.assert_array_equal(y[used:], 0)
    # Arrays of other axes have no padding, such as tables of positions, of as many rows as there are tokens.
    for rows in ((8,), (1, 4)):
        with ops.skip_padding(rows, jnp.int32(2)):
            np.testing.assert_array_equal(ops.linear(x, w), inner(x))
