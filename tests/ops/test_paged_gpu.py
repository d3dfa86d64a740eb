"""The GPU's kernels of attention over pages, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention import (
    exact_paged_attention,
    paged_problem,
    quantized_problem,
    with_nan_where_no_query_sees,
    without_pages_behind,
)
from verax import ops
from verax.ops.gpu.paged import decode_attention, num_parts, ragged_attention

LENGTHS = [1, 130, 16, 0, 257]

RAGGED = {
    "decodes and a chunk": ([5, 300, 17, 40], [1, 1, 1, 40]),
    "chunk in the middle of a prompt": ([130, 9], [37, 9]),
    "padding rows": ([7, 0, 0], [3, 0, 0]),
    "chunks longer than a tile": ([100, 65], [70, 65]),
}

OPTIONS = [(6, 2, {}), (3, 3, {"window": 1}), (6, 2, {"window": 37, "scale": 0.3}), (9, 1, {"soft_cap": 3.0})]


@pytest.mark.parametrize(("N", "K", "options"), [(6, 2, {}), (9, 1, {"window": 37, "scale": 0.3, "soft_cap": 3.0})])
def test_a_decode_step_is_attention_in_float64_and_reads_nothing_that_a_query_does_not_see(N, K, options):
    (q, k, v), table, lengths, starts = paged_problem(1, LENGTHS, [1] * 5, N=N, K=K, H=16, p=16)
    exact = exact_paged_attention((q[:5], k, v), table, [max(x, 1) for x in LENGTHS], starts, **options)
    exact[3] = 0  # the padding row
    window = options.get("window")
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts, window) for x in (k, v))
    if window is not None:
        table = without_pages_behind(window, table, lengths, starts, 16)
    out = decode_attention(q[:5], k, v, jnp.asarray(table), lengths, parts=3, interpret=True, **options)
    np.testing.assert_allclose(out, exact, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "N", "K", "options"), [(name, *rest) for name, rest in zip(RAGGED, OPTIONS, strict=True)]
)
def test_a_ragged_step_is_attention_in_float64_and_reads_nothing_that_no_query_sees(name, N, K, options):
    (q, k, v), table, lengths, starts = paged_problem(0, *RAGGED[name], N=N, K=K, H=16, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts, **options)
    window = options.get("window")
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts, window) for x in (k, v))
    out = ragged_attention(q, k, v, table, lengths, starts, interpret=True, **options)
    np.testing.assert_allclose(out, exact, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_pages_of_fewer_bits_lose_no_more_than_rounding_their_inputs(dtype):
    problem = [100, 65], [70, 65]
    sizes = {"N": 6, "K": 2, "H": 16, "p": 48}
    if dtype != "bfloat16":
        (q, k, v), floats, table, lengths, starts = quantized_problem(1, *problem, cache_dtype=dtype, **sizes)
        exact = exact_paged_attention(floats, table, lengths, starts)
    else:
        (q, k, v), table, lengths, starts = paged_problem(1, *problem, dtype=dtype, **sizes)
        exact = exact_paged_attention((q, k, v), table, lengths, starts)
    k, v = (with_nan_where_no_query_sees(x, table, lengths, starts) for x in (k, v))
    out = ragged_attention(q, k, v, table, lengths, starts, interpret=True)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


def test_contexts_are_split_where_there_are_too_few_sequences_and_keys_enough():
    assert [num_parts(rows, 8, 4096) for rows in (1, 4, 32, 64, 256)] == [16, 16, 2, 1, 1]
    assert num_parts(1, 8, 100) == 1


def test_float8_pages_give_a_decode_step_of_the_numbers_that_they_stand_for():
    sizes = {"N": 6, "K": 2, "H": 16, "p": 16, "cache_dtype": "float8_e4m3fn"}
    (q, k, v), (_, *floats), table, lengths, starts = quantized_problem(1, LENGTHS, [1] * 5, **sizes)
    exact = exact_paged_attention((q[:5], *floats), table, [max(x, 1) for x in LENGTHS], starts)
    exact[3] = 0  # the padding row
    out = decode_attention(q[:5], k, v, table, lengths, parts=3, interpret=True)
    assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 1e-2


def chosen(operation, H=128, N=16, dtype="bfloat16"):
    cache = jax.eval_shape(lambda: ops.new_pages((64, 8, 16, H), dtype))
    call = (jax.ShapeDtypeStruct((4, N, H), "float32"), cache, cache)
    shapes = ((4, 8), (4,), (5,)) if operation is ops.paged_attention else ((4, 8), (4,))
    return operation.select(*call, *(jax.ShapeDtypeStruct(shape, "int32") for shape in shapes)).name


@pytest.mark.parametrize(
    ("operation", "otherwise"), [(ops.paged_attention, "tiled"), (ops.paged_decode_attention, "chunked")]
)
def test_they_run_where_they_are_named_and_take_the_call(operation, otherwise):
    named = {operation.name: "triton"}
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert chosen(operation) == otherwise
        with ops.use_implementations(**named):
            assert chosen(operation) == chosen(operation, H=64) == chosen(operation, dtype="float32") == "triton"
            others = [chosen(operation, H=80), chosen(operation, dtype="float16"), chosen(operation, N=1024)]
            assert others == [otherwise] * 3
    for device, taken in (("NVIDIA A100-SXM4-80GB", "int8"), ("NVIDIA L4", "float8_e4m3fn")):
        with ops.use_target("gpu", device), ops.use_implementations(**named):
            assert chosen(operation, dtype=taken) == "triton"
    with ops.use_target("gpu", "NVIDIA A100-SXM4-80GB"), ops.use_implementations(**named):
        assert chosen(operation, dtype="float8_e4m3fn") == otherwise  # Triton has no float8 for it
    for device in ("NVIDIA T4", "AMD MI300X"):
        with ops.use_target("gpu", device), ops.use_implementations(**named):
            assert chosen(operation) == otherwise
    with ops.use_implementations(**named):
        assert chosen(operation) != "triton"
