"""The TPU's kernel of attention over pages, interpreted: memory that nothing wrote is NaN, and copies are simulated."""

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
    without_pages_behind,
)
from verax import ops
from verax.ops.tpu.paged import FACTOR, decode_attention, pages_of_chunk, ragged_attention, sixteenths

LENGTHS = [1, 40, 16, 0, 70]
INTERPRETED = pltpu.InterpretParams(uninitialized_memory="nan")


def expected(arrays, table, starts, **options):
    """The result for `LENGTHS`, whose row of padding is 0."""
    out = exact_paged_attention(arrays, table, [max(length, 1) for length in LENGTHS], starts, **options)
    return np.where(np.asarray(LENGTHS)[:, None, None] > 0, out, 0)


@pytest.mark.parametrize(
    ("N", "K", "options"),
    [(6, 2, {}), (3, 3, {"window": 1}), (9, 1, {"window": 37, "scale": 0.3, "soft_cap": 3.0})],
)
def test_a_decode_step_is_attention_in_float64_and_reads_nothing_that_a_query_does_not_see(N, K, options):
    (q, k, v), table, lengths, starts = paged_problem(1, LENGTHS, [1] * 5, N=N, K=K, H=8, p=16)
    exact = expected((q[:5], k, v), table, starts, **options)
    window = options.get("window")
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts, window) for x in (k, v))
    if window is not None:
        table = without_pages_behind(window, table, lengths, starts, 16)
    out = decode_attention(q[:5], k, v, jnp.asarray(table), lengths, pages=2, interpret=INTERPRETED, **options)
    np.testing.assert_allclose(out, exact, atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "counts", "N", "K", "options"),
    [
        ([5, 70, 17, 40], [1, 1, 1, 40], 4, 1, {"window": 37}),
        ([27, 0, 25, 0], [23, 0, 25, 0], 6, 2, {"soft_cap": 3.0}),
    ],
)
def test_a_ragged_step_is_attention_in_float64_and_reads_nothing_that_no_query_sees(lengths, counts, N, K, options):
    (q, k, v), table, lengths, starts = paged_problem(0, lengths, counts, N=N, K=K, H=8, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts, **options)
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts, options.get("window")) for x in (k, v))
    out = ragged_attention(q, k, v, table, lengths, starts, pages=2, interpret=INTERPRETED, **options)
    np.testing.assert_allclose(out, exact, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_fewer_bits_lose_no_more_than_rounding_their_inputs(dtype):
    sizes = {"N": 3, "K": 1, "H": 8, "p": 32}
    if dtype != "bfloat16":
        (q, k, v), floats, table, lengths, starts = quantized_problem(1, LENGTHS, [1] * 5, cache_dtype=dtype, **sizes)
        exact = expected((q[:5], *floats[1:]), table, starts)
    else:
        (q, k, v), table, lengths, starts = paged_problem(1, LENGTHS, [1] * 5, dtype=dtype, **sizes)
        exact = expected((q[:5], k, v), table, starts)
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts) for x in (k, v))
    out = decode_attention(q[:5], k, v, table, lengths, pages=1, interpret=INTERPRETED)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


@pytest.mark.parametrize(
    ("lengths", "counts", "N", "K", "options"),
    [([5, 70, 17, 40], [1, 1, 1, 40], 4, 1, {"window": 37}), ([27, 0, 25], [23, 0, 25], 6, 2, {"soft_cap": 3.0})],
)
def test_float8_pages_give_a_ragged_step_of_the_numbers_that_they_stand_for(lengths, counts, N, K, options):
    sizes = {"N": N, "K": K, "H": 8, "p": 16, "cache_dtype": "float8_e4m3fn"}
    (q, k, v), floats, table, lengths, starts = quantized_problem(0, lengths, counts, **sizes)
    exact = exact_paged_attention(floats, table, lengths, starts, **options)
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts, options.get("window")) for x in (k, v))
    out = ragged_attention(q, k, v, table, lengths, starts, pages=2, interpret=INTERPRETED, **options)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


def test_every_float8_number_is_widened_exactly():
    bits = np.arange(256, dtype=np.uint8).reshape(8, 32)
    numbers = bits.view(jnp.float8_e4m3fn)

    def kernel(x, out):
        out[...] = sixteenths(x[...])

    shape = jax.ShapeDtypeStruct(bits.shape, jnp.bfloat16)
    out = pl.pallas_call(kernel, out_shape=shape, interpret=INTERPRETED)(jnp.asarray(numbers))
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32) * FACTOR, numbers.astype(np.float32))
    assert np.isnan(out).sum() == 2


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_copies_may_arrive_at_once_or_when_they_are_waited_for(mode):
    (q, k, v), table, lengths, starts = paged_problem(1, [33, 0, 20], [1, 0, 1], N=2, K=1, H=8, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts)
    params = pltpu.InterpretParams(dma_execution_mode=mode)
    out = decode_attention(q[jnp.asarray([0, 0, 1])], k, v, table, lengths, pages=1, interpret=params)
    np.testing.assert_allclose(out[jnp.asarray([0, 2])], exact[:2], atol=2e-5)


def test_a_batch_of_padding_gives_zeros():
    (q, k, v), table, lengths, _ = paged_problem(1, [0, 0], [1, 1], N=2, K=1, H=8, p=16)
    np.testing.assert_array_equal(decode_attention(q[:2], k, v, table, lengths, pages=1, interpret=INTERPRETED), 0)


def test_a_chunk_is_whole_registers_of_scores_and_at_most_a_mebibyte_of_keys():
    chunks = {p: pages_of_chunk(jnp.zeros((1, 8, p, 128), jnp.bfloat16)) * p for p in (8, 16, 128, 256)}
    assert chunks == {8: 512, 16: 512, 128: 512, 256: 512}
    assert pages_of_chunk(jnp.zeros((1, 64, 16, 256), jnp.bfloat16)) == 8  # no less than one register


def chosen(operation, H=128, p=16, dtype="bfloat16", width=8, N=16):
    cache = jax.eval_shape(lambda: ops.new_pages((64, 8, p, H), dtype))
    call = (jax.ShapeDtypeStruct((4, N, H), "float32"), cache, cache)
    shapes = ((4, width), (4,), (5,)) if operation is ops.paged_attention else ((4, width), (4,))
    return operation.select(*call, *(jax.ShapeDtypeStruct(shape, "int32") for shape in shapes)).name


@pytest.mark.parametrize(
    ("operation", "otherwise"), [(ops.paged_attention, "tiled"), (ops.paged_decode_attention, "chunked")]
)
def test_it_runs_where_it_is_named_and_takes_the_call(operation, otherwise):
    named = {operation.name: "pallas"}
    with ops.use_target("tpu", "TPU v5 lite"):
        assert chosen(operation) == otherwise
        with ops.use_implementations(**named):
            assert chosen(operation) == chosen(operation, H=256) == chosen(operation, dtype="float32", p=8) == "pallas"
            assert chosen(operation, dtype="int8") == chosen(operation, dtype="float8_e4m3fn") == "pallas"
            refused = [{"H": 64}, {"p": 8}, {"p": 48}, {"dtype": "float16"}, {"width": 1 << 17}, {"N": 1024}]
            assert [chosen(operation, **change) for change in refused] == [otherwise] * 6
    with ops.use_implementations(**named):
        assert chosen(operation) != "pallas"
