"""Kernels of attention over pages, interpreted: memory of a TPU that nothing wrote is NaN, its copies are simulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention import (
    exact_paged_attention,
    paged_problem,
    quantized_problem,
    with_nan_where_no_query_sees,
    without_pages_before_the_window,
)
from verax import ops
from verax.ops.gpu import attention as gpu
from verax.ops.tpu import attention as tpu

INTERPRETED = pltpu.InterpretParams(uninitialized_memory="nan")
OPTIONS = {
    "gpu": {"decode": {"parts": 3, "interpret": True}, "ragged": {"interpret": True}},
    "tpu": {step: {"pages": 2, "interpret": INTERPRETED} for step in ("decode", "ragged")},
}
LENGTHS = {"gpu": [1, 130, 16, 0, 257], "tpu": [1, 40, 16, 0, 70]}
SIZES = {"gpu": {"H": 16, "p": 48}, "tpu": {"H": 8, "p": 32}}

each_device = pytest.mark.parametrize("device", OPTIONS)


def attend(device, step, arrays, table, lengths, starts, **options):
    q, k, v = arrays
    kernels, options = {"gpu": gpu, "tpu": tpu}[device], OPTIONS[device][step] | options
    if step == "decode":
        return kernels.decode_attention(q[: len(lengths)], k, v, jnp.asarray(table), lengths, **options)
    return kernels.ragged_attention(q, k, v, table, lengths, starts, **options)


def exact(step, arrays, table, lengths, starts, **options):
    """Attention in float64; a row of padding in a decode step is 0."""
    if step == "ragged":
        return exact_paged_attention(arrays, table, lengths, starts, **options)
    lengths, (q, *caches) = np.asarray(lengths), arrays
    out = exact_paged_attention((q[: len(lengths)], *caches), table, np.maximum(lengths, 1), starts, **options)
    return np.where(lengths[:, None, None] > 0, out, 0)


def unseen_is_nan(arrays, table, lengths, starts, window=None):
    q, *caches = arrays
    return q, *(with_nan_where_no_query_sees(x, table, lengths, starts, window) for x in caches)


@pytest.mark.parametrize(
    ("N", "K", "options"), [(6, 2, {}), (3, 3, {"window": 1}), (9, 1, {"window": 37, "scale": 0.3, "soft_cap": 3.0})]
)
@each_device
def test_a_decode_step_is_attention_in_float64_and_reads_nothing_that_a_query_does_not_see(device, N, K, options):
    arrays, table, *rest = paged_problem(1, LENGTHS[device], [1] * 5, N=N, K=K, H=SIZES[device]["H"], p=16)
    expected, window = exact("decode", arrays, table, *rest, **options), options.get("window")
    arrays = unseen_is_nan(arrays, table, *rest, window)
    table = table if window is None else without_pages_before_the_window(window, table, *rest, 16)
    np.testing.assert_allclose(attend(device, "decode", arrays, table, *rest, **options), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("device", "lengths", "counts", "N", "K", "options"),
    [
        ("gpu", [5, 300, 17, 40], [1, 1, 1, 40], 6, 2, {}),
        ("gpu", [130, 9], [37, 9], 3, 3, {"window": 1}),
        ("gpu", [7, 0, 0], [3, 0, 0], 6, 2, {"window": 37, "scale": 0.3}),
        ("gpu", [100, 65], [70, 65], 9, 1, {"soft_cap": 3.0}),  # longer than a tile
        ("tpu", [5, 70, 17, 40], [1, 1, 1, 40], 4, 1, {"window": 37}),
        ("tpu", [27, 0, 25, 0], [23, 0, 25, 0], 6, 2, {"soft_cap": 3.0}),
    ],
)
def test_a_ragged_step_is_attention_in_float64_and_reads_nothing_that_no_query_sees(
    device, lengths, counts, N, K, options
):
    arrays, *rest = paged_problem(0, lengths, counts, N=N, K=K, H=SIZES[device]["H"], p=16)
    expected = exact("ragged", arrays, *rest, **options)
    arrays = unseen_is_nan(arrays, *rest, options.get("window"))
    np.testing.assert_allclose(attend(device, "ragged", arrays, *rest, **options), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("step", ["decode", "ragged"])
@each_device
def test_pages_of_fewer_bits_lose_no_more_than_rounding_their_inputs(device, step, dtype):
    decode, chunks = (
        (LENGTHS[device], [1] * 5),
        ([100, 65], [70, 65]) if device == "gpu" else ([27, 0, 25], [23, 0, 25]),
    )
    problem, sizes = decode if step == "decode" else chunks, {"N": 6, "K": 2, **SIZES[device]}
    if dtype == "bfloat16":
        arrays, *rest = paged_problem(1, *problem, dtype=dtype, **sizes)
        expected = exact(step, arrays, *rest)
    else:
        arrays, floats, *rest = quantized_problem(1, *problem, cache_dtype=dtype, **sizes)
        expected = exact(step, floats, *rest)
    out = attend(device, step, unseen_is_nan(arrays, *rest), *rest)
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 1e-2


def test_a_decode_step_in_one_part_is_attention_in_float64():
    arrays, table, *rest = paged_problem(1, LENGTHS["gpu"], [1] * 5, N=6, K=2, H=16, p=16)
    expected = exact("decode", arrays, table, *rest)
    np.testing.assert_allclose(attend("gpu", "decode", arrays, table, *rest, parts=1), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_written_pages_are_the_references_to_the_bit(dtype):
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((5, 3, 64)) * np.exp(rng.standard_normal((5, 3, 1)) * 5), jnp.float32)
    x = x.at[1, 1, 2].set(jnp.inf).at[2, 2].set(0).at[3, 0].set(jnp.arange(64) / 63.5)  # halves in int8
    pages, offsets = jnp.asarray([5, 2, 6, 1, 0]), jnp.asarray([0, 3, 1, 2, 15])  # page 6 does not exist
    caches = [ops.new_pages((6, 3, 16, 64), dtype) for _ in range(2)]
    ours = jax.jit(lambda *arrays: gpu.write_tokens(*arrays, interpret=True))(*caches, x, -x, pages, offsets)
    theirs = ops.write_pages.reference(*caches, x, -x, pages, offsets)
    floats = lambda tree: [np.asarray(leaf).astype(np.float32) for leaf in jax.tree.leaves(tree)]
    for one, other in zip(floats(ours), floats(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_nan_makes_what_it_is_written_with_a_nan():
    x = jnp.ones((1, 1, 64)).at[0, 0, 3].set(jnp.nan)
    caches = [ops.new_pages((2, 1, 16, 64), "int8") for _ in range(2)]
    k, _ = gpu.write_tokens(*caches, x, x, jnp.asarray([1]), jnp.asarray([4]), interpret=True)
    held = np.asarray(k.values * k.scales[..., None])
    assert np.isnan(held[1, 0, 4]).all()
    assert np.isnan(held).sum() == 64


def test_every_float8_number_is_widened_exactly():
    bits = np.arange(256, dtype=np.uint8).reshape(8, 32)
    numbers = bits.view(jnp.float8_e4m3fn)

    def kernel(x, out):
        out[...] = tpu.sixteenths(x[...])

    shape = jax.ShapeDtypeStruct(bits.shape, jnp.bfloat16)
    out = pl.pallas_call(kernel, out_shape=shape, interpret=INTERPRETED)(jnp.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32) * tpu.FACTOR, numbers.astype(np.float32))
    assert np.isnan(out).sum() == 2


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_copies_may_arrive_at_once_or_when_they_are_waited_for(mode):
    (q, *caches), *rest = paged_problem(1, [33, 0, 20], [1, 0, 1], N=2, K=1, H=8, p=16)
    expected = exact("ragged", (q, *caches), *rest)
    interpret = pltpu.InterpretParams(dma_execution_mode=mode)
    out = attend("tpu", "decode", (q[jnp.asarray([0, 0, 1])], *caches), *rest, pages=1, interpret=interpret)
    np.testing.assert_allclose(out[jnp.asarray([0, 2])], expected[:2], atol=2e-5)


def test_a_batch_of_padding_gives_zeros():
    problem = paged_problem(1, [0, 0], [1, 1], N=2, K=1, H=8, p=16)
    np.testing.assert_array_equal(attend("tpu", "decode", *problem, pages=1), 0)


def chosen(operation, H=128, p=16, dtype="bfloat16", width=8, N=16, P=64, **options):
    cache = jax.eval_shape(lambda: ops.new_pages((P, 8, p, H), dtype))
    call = (jax.ShapeDtypeStruct((4, N, H), "float32"), cache, cache)
    shapes = ((4, width), (4,), (5,)) if operation is ops.paged_attention else ((4, width), (4,))
    return operation.select(*call, *(jax.ShapeDtypeStruct(shape, "int32") for shape in shapes), **options).name


BYTES = [{"dtype": "int8"}, {"dtype": "float8_e4m3fn"}]
FOUR_GIB = 1 << 18
"""Pages of bytes."""


@pytest.mark.parametrize(
    ("name", "platform", "kind", "taken", "refused"),
    [
        ("triton", "gpu", "NVIDIA H100", [{}, {"H": 64}, {"dtype": "float32"}, *BYTES], [{"H": 80}]),
        ("triton", "gpu", "NVIDIA A100", [BYTES[0]], [BYTES[1]]),  # Triton has no float8 for it
        ("triton", "gpu", "NVIDIA L4", [BYTES[1]], []),
        (
            *("triton", "gpu", "NVIDIA H200"),
            [{"P": FOUR_GIB}, *({"dtype": "int8", "P": P} for P in (FOUR_GIB // 2, FOUR_GIB + 1))],
            [{"dtype": "int8", "P": FOUR_GIB}, {"dtype": "float8_e4m3fn", "P": FOUR_GIB // 2 + 1}],
        ),
        ("triton", "gpu", "NVIDIA T4", [], [{}]),
        ("triton", "gpu", "AMD MI300X", [], [{}]),
        (
            *("pallas", "tpu", "TPU v5 lite", [{}, {"H": 256}, {"dtype": "float32", "p": 8}, *BYTES]),
            [{"H": 64}, {"p": 8}, {"p": 48}, {"width": 1 << 17}],
        ),
    ],
)
@pytest.mark.parametrize(
    ("operation", "otherwise"), [(ops.paged_attention, "tiled"), (ops.paged_decode_attention, "chunked")]
)
def test_they_run_where_they_take_the_call_and_on_tpus_are_named(
    operation, otherwise, name, platform, kind, taken, refused
):
    named = {operation.name: name} if platform == "tpu" else {}
    with ops.use_target(platform, kind):
        if named:
            assert chosen(operation) == otherwise
        with ops.use_implementations(**named):
            assert [chosen(operation, **call) for call in taken] == [name] * len(taken)
            numbers = [{name: jnp.ones(())} for name in ("scale", "window", "soft_cap")]  # traced ones are arrays too
            refused = [*refused, {"dtype": "float16"}, {"N": 1024}, *numbers]
            assert [chosen(operation, **call) for call in refused] == [otherwise] * len(refused)
    with ops.use_implementations(**named):
        assert chosen(operation) != name
