"""The count of a program's work: products, turns of loops, bytes of arguments and results."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from verax import ops
from verax.plan.stand_ins import Span
from verax.plan.work import count, trace


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def work(function, *arguments, spans=()):
    with ops.use_target("gpu"):
        return count(trace(function, *arguments), spans)


def test_a_product_counts_two_operations_for_each_number_that_is_added_up():
    found = work(lambda x, w: x.astype(jnp.bfloat16) @ w, shape(3, 5), shape(5, 7, dtype=jnp.bfloat16))
    assert found.flops == {"bfloat16": 2 * 3 * 5 * 7}
    assert found.reads == (3 * 5 * 4, 5 * 7 * 2)
    assert found.results == 3 * 7 * 2


def test_a_batched_product_and_a_ragged_one():
    assert work(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), shape(4, 3, 5), shape(4, 7, 5)).total_flops == 840
    groups = shape(6, dtype=jnp.int32)
    assert work(lax.ragged_dot, shape(10, 5), shape(6, 5, 7), groups).total_flops == 2 * 10 * 5 * 7


def test_a_convolution_counts_its_kernel_for_each_result():
    x, kernel = shape(1, 3, 8, 8, 4), shape(6, 4, 3, 3, 3)
    assert work(lambda x, w: ops.conv3d(x, w, padding=1), x, kernel).total_flops == 2 * (3 * 8 * 8 * 6) * (4 * 27)


def test_products_in_loops_count_once_for_each_turn():
    def nested(x, w):
        inner = lambda carry, _: (carry @ w, None)
        return lax.fori_loop(0, 3, lambda i, y: lax.scan(inner, y, None, length=5)[0], x)

    found = work(jax.jit(nested), shape(2, 4), shape(4, 4))
    assert found.total_flops == 3 * 5 * 2 * 2 * 4 * 4
    assert found.reads == (2 * 4 * 4, 4 * 4 * 4)  # the weight once: it can stay on the chip


def test_a_scan_over_weights_reads_each_of_them():
    found = work(lambda x, ws: lax.scan(lambda y, w: (y @ w, None), x, ws)[0], shape(2, 4), shape(6, 4, 4))
    assert (found.total_flops, found.reads[1]) == (6 * 2 * 2 * 4 * 4, 6 * 4 * 4 * 4)


@pytest.mark.parametrize("rows", [2, 9])
def test_rows_that_are_looked_up_are_among_those_that_a_product_reads(rows):
    def tied(table, tokens, x):
        return jax.jit(lambda: table[tokens])(), x @ table[:7].T

    found = work(tied, shape(10, 4), shape(rows, dtype=jnp.int32), shape(3, 4))
    assert found.reads[0] == max(rows, 7) * 4 * 4


def test_of_a_branch_the_cheapest_side_counts():
    def branch(flag, x, w):
        return lax.cond(flag, lambda: x @ w @ w, lambda: x @ w)

    assert work(branch, shape(dtype=jnp.bool), shape(2, 4), shape(4, 4)).total_flops == 2 * 2 * 4 * 4


def test_what_no_result_needs_does_not_count():
    assert work(lambda x, w: (x @ w, x @ w @ w)[0], shape(2, 4), shape(4, 4)).total_flops == 2 * 2 * 4 * 4


def test_collectives_send_what_a_ring_sends_on_the_shards_of_a_device():
    def share(x):
        every = lax.all_gather(x, "b", tiled=True)
        swapped = lax.all_to_all(every, "a", 1, 0, tiled=True)
        return lax.psum(swapped @ swapped.T, ("a", "b"))

    mesh = AbstractMesh((2, 4), ("a", "b"))
    divided = jax.shard_map(share, mesh=mesh, in_specs=P("b"), out_specs=P(), check_vma=False)
    found = work(divided, shape(16, 6))
    assert found.reads == (4 * 6 * 4,)
    assert found.total_flops == 2 * 32 * 3 * 32
    assert found.sent == 16 * 6 * 4 * 3 // 4 + 32 * 3 * 4 // 2 + 2 * 32 * 32 * 4 * 7 // 8
    assert found.results == 32 * 32 * 4


def test_a_loop_of_unknown_length_is_named():
    def until(x, w):
        return lax.while_loop(lambda y: jnp.sum(y) < 1, lambda y: y @ w, x)

    assert work(until, shape(2, 4), shape(4, 4)).uncounted == ("while loop with products",)
    assert work(lambda x: lax.while_loop(lambda y: y < 1, lambda y: y + 1, x), shape()).uncounted == ()


def test_a_lookup_reads_its_rows_and_an_update_in_place_writes_its_changes():
    def step(table, cache, ids, x):
        return table[ids], cache.at[ids].set(x)

    table, cache = shape(1000, 8), shape(500, 8)
    found = work(jax.jit(step), table, cache, shape(3, dtype=jnp.int32), shape(3, 8))
    assert found.reads[:2] == (3 * 8 * 4, 0)
    assert found.writes == (0, 3 * 8 * 4, 0, 0)
    assert found.results == 3 * 8 * 4


@pytest.mark.parametrize(
    ("options", "scores"),
    [({}, 6 * 7 // 2), ({"causal": False}, 36), ({"window": 2}, 11), ({"window": 2, "causal": False}, 16)],
)
def test_attention_counts_the_scores_that_are_seen(options, scores):
    q, k = shape(2, 6, 4, 16), shape(2, 6, 2, 16)
    found = work(lambda q, k, v: ops.attention(q, k, v, **options), q, k, k)
    assert found.flops == {"float32": 2 * 4 * 4 * 16 * scores}


def test_attention_over_a_cache_reads_the_keys_before_the_step():
    pages = shape(40, 2, 16, 32, dtype=jnp.bfloat16)
    table, lengths = shape(2, 8, dtype=jnp.int32), shape(2, dtype=jnp.int32)

    def attend(window):
        function = lambda q, k, v, t, n: ops.paged_decode_attention(q, k, v, t, n, window=window)
        spans = [Span(99, 1), Span(9, 1)]
        return work(function, shape(2, 4, 32), pages, pages, table, lengths, spans=spans)

    token = 2 * 32 * 2  # bytes of keys
    assert attend(None).flops == {"bfloat16": 4 * 4 * 32 * (100 + 10)}
    assert attend(None).reads[1:3] == ((99 + 9) * token, (99 + 9) * token)
    assert attend(16).flops == {"bfloat16": 4 * 4 * 32 * (16 + 10)}
    assert attend(16).reads[1:3] == ((15 + 9) * token, (15 + 9) * token)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pages_are_read_with_their_scales(dtype):
    pages = ops.QuantizedPages(shape(40, 2, 16, 32, dtype=dtype), shape(40, 2, 16))
    table, lengths = shape(1, 8, dtype=jnp.int32), shape(1, dtype=jnp.int32)
    found = work(ops.paged_decode_attention, shape(1, 4, 32), pages, pages, table, lengths, spans=[Span(100, 1)])
    assert found.reads[1:5] == (100 * 2 * 32, 100 * 2 * 4) * 2


def test_a_mixture_of_experts_multiplies_and_reads_the_experts_that_are_chosen():
    experts = shape(64, 24, 16, dtype=jnp.bfloat16)
    found = work(ops.grouped_linear, shape(1, 1, 16), experts, shape(1, 4, dtype=jnp.int32))
    assert found.flops == {"bfloat16": 4 * 2 * 24 * 16}
    assert found.reads[1] == 4 * 24 * 16 * 2
    many = work(ops.grouped_linear, shape(500, 1, 16), experts, shape(500, 4, dtype=jnp.int32))
    assert many.reads[1] == pytest.approx(64 * 24 * 16 * 2, rel=1e-6)


@pytest.mark.parametrize(("bits", "group", "nbytes"), [(8, None, 32 * 64 + 4 * 32), (4, 32, 32 * 64 // 2 + 2 * 32 * 2)])
def test_quantised_weights_are_read_as_stored_and_multiplied_in_bfloat16(bits, group, nbytes):
    weight = jax.eval_shape(lambda: ops.quantize(jnp.zeros((32, 64)), bits, group))
    found = work(ops.linear, shape(3, 64), weight)
    assert found.flops == {"bfloat16": 2 * 3 * 32 * 64}
    assert sum(found.reads[1:]) == nbytes


def test_stand_ins_are_gone_after_a_trace():
    q = jnp.ones((1, 3, 2, 4))
    work(lambda q: ops.attention(q, q, q), q)
    assert jnp.allclose(ops.attention(q, q, q), 1)
    assert jnp.allclose(jax.jit(lambda q: ops.attention(q, q, q))(q), 1)


def test_spans_count_like_a_loop_over_their_queries():
    for span in (Span(0, 5), Span(7, 3), Span(2, 40)):
        for window in (None, 1, 4, 100):
            seen = [range(max(0, i - (window or 999) + 1), i + 1) for i in range(span.before, span.before + span.count)]
            assert span.scores(window) == sum(map(len, seen))
            assert span.cached(window) == len({j for keys in seen for j in keys if j < span.before})
