"""The native paged kernels at every level where they differ from others: what they promise about bits, and memory.

Their values are tested with other implementations' in tests/ops/test_paged.py.
"""

import hashlib
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.test_paged import assert_close, problem
from tests.support.attention import (
    dequantized,
    exact_paged_attention,
    paged_problem,
    quantized_tokens,
)
from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax._compat import compiler_options
from verax.ops.cpu import library
from verax.ops.paged import QuantizedPages

pytestmark = needs_library

options = ("scale", "window", "soft_cap")
ragged = jax.jit(ops.paged_attention.implementations["native"].function, static_argnames=options)
decode = jax.jit(ops.paged_decode_attention.implementations["native"].function, static_argnames=options)
write = jax.jit(ops.write_pages.implementations["native"].function)


DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@for_each_level
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_its_batch(level, dtype):
    lengths = [700, 3, 1030, 64]
    (q, k, v), table, kv, _ = paged_problem(2, lengths, [1] * 4, N=4, K=2, H=32, p=16, dtype=dtype)
    with library.use_level(level):
        whole = np.asarray(decode(q[:4], k, v, table, kv))
        for b in range(4):
            np.testing.assert_array_equal(decode(q[b : b + 1], k, v, table[b : b + 1], kv[b : b + 1]), whole[b : b + 1])


@for_each_level
@pytest.mark.parametrize(("window", "dtype"), [(None, "float32"), (50, "bfloat16"), (520, "float32")])
def test_a_token_does_not_depend_on_how_its_prompt_was_cut(level, dtype, window):
    length, by = 600, f"native {level}"
    (q, k, v), table, _, _ = paged_problem(3, [length], [length], N=4, K=2, H=32, p=16, dtype=dtype)
    q = np.asarray(q)

    def chunk(begin, end):
        queries = np.zeros((256, 4, 32), q.dtype)
        queries[: end - begin] = q[begin:end]
        sizes = jnp.asarray([end]), jnp.asarray([0, end - begin])
        return np.asarray(ragged(queries, k, v, table, *sizes, window=window))

    with library.use_level(level):
        whole = np.asarray(ragged(q, k, v, table, jnp.asarray([length]), jnp.asarray([0, length]), window=window))
        for cuts in ([0, 256, 512, 600], [0, 2, 64, 66, 200, 455, 512, 514, 600]):
            for begin, end in itertools.pairwise(cuts):
                np.testing.assert_array_equal(chunk(begin, end)[: end - begin], whole[begin:end])
        # A lone query adds the same products in another order: always the same one.
        for position in (0, 15, 16, 511, 512, 599):
            newest = decode(q[position : position + 1], k, v, table, jnp.asarray([position + 1]), window=window)
            np.testing.assert_array_equal(newest, chunk(position, position + 1)[:1])
            assert_close(by, newest, whole[position : position + 1], dtype)


@for_each_level
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_recycled_pages_hold_does_not_leak(level, value, dtype):
    lengths, counts, p = [37, 600, 9], [20, 1, 9], 16
    (q, k, v), _, table, kv, starts = problem(4, lengths, counts, dtype, (4, 2, 20), p=p, table_width=60)
    owned = np.zeros((k.shape[0], 1, p), bool)
    for b, length in enumerate(lengths):
        for s in range(length):
            owned[table[b, s // p], 0, s % p] = True

    def dirty(x):  # integers are never NaN, their scales may be
        if isinstance(x, QuantizedPages):
            return x._replace(scales=jnp.where(owned, x.scales, value))
        return jnp.where(owned[..., None], x, value)

    with library.use_level(level):
        clean = np.asarray(ragged(q, k, v, table, kv, starts))
        np.testing.assert_array_equal(ragged(q, dirty(k), dirty(v), table, kv, starts), clean)


def test_page_numbers_that_do_not_exist_are_harmless():
    (q, k, v), table, kv, starts = paged_problem(5, [20, 7], [20, 1], N=2, K=1, H=16, p=8, table_width=9)
    clean = ragged(q, k, v, table, kv, starts)
    unused = np.arange(9)[None] >= np.asarray([3, 1])[:, None]
    np.testing.assert_array_equal(ragged(q, k, v, jnp.where(unused, 2**30, table), kv, starts), clean)
    wild = ragged(q, k, v, jnp.full_like(table, -7), kv + 10**6, starts)
    assert wild.shape == q.shape


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_tables_and_lengths(data):
    level = data.draw(st.sampled_from(library.levels()))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=5))
    # Shapes are few, so that few programs are compiled; what varies is in the arrays.
    rows = rows + [(0, 0)] * (5 - len(rows))
    counts = [count if cached + count else 0 for cached, count in rows]
    lengths = [cached + count if count else 0 for cached, count in rows]
    p = data.draw(st.sampled_from([1, 3, 16]))
    arrays, table, kv, starts = paged_problem(
        data.draw(st.integers(0, 2**16)), lengths, counts, N=4, K=2, H=24, p=p, table_width=130
    )
    q, k, v = arrays
    q = np.pad(q, ((0, 210 - q.shape[0]), (0, 0), (0, 0)))
    k, v = (np.pad(x, ((0, 700 - x.shape[0]), (0, 0), (0, 0), (0, 0)), constant_values=np.nan) for x in (k, v))
    with library.use_level(level):
        out = ragged(q, k, v, table, kv, starts)
        k8, v8 = (QuantizedPages(*quantized_tokens(x)) for x in (k, v))
        out8 = ragged(q, k8, v8, table, kv, starts)
    by = f"native {level}"
    assert_close(by, out, exact_paged_attention((q, k, v), table, kv, starts), "float32")
    assert_close(by, out8, exact_paged_attention((q, *map(dequantized, (k8, v8))), table, kv, starts), "int8")


def digest():
    """Hash of the bits that decode and ragged attention give for one problem."""
    (q, k, v), table, kv, starts = paged_problem(6, [1500, 40, 300], [1, 7, 300], N=4, K=2, H=64, p=16)
    out = ragged(q, k, v, table, kv, starts), decode(q[:3], k, v, table, kv)
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in out)).hexdigest()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are as many as the cores one may use")
def test_bits_do_not_depend_on_the_number_of_threads():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from tests.ops.cpu import test_paged; print(test_paged.digest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == digest()


@for_each_level
@each_dtype
@pytest.mark.parametrize("T", [0, 1, 4, 300])
def test_written_pages_are_the_references_to_the_bit(level, dtype, T):
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((T, 3, 20)) * np.exp(rng.standard_normal((T, 3, 1)) * 5), jnp.float32)
    x = x.at[:1, 0, :4].set(jnp.asarray([np.nan, np.inf, 1e-40, -0.0])).at[:1, 1].set(0).at[:1, 2, 4].set(-np.inf)
    places = rng.permutation(40 * 8)[:T]
    pages, offsets = jnp.asarray(places // 8, jnp.int32), jnp.asarray(places % 8, jnp.int32)
    filled = jnp.asarray(rng.standard_normal((40, 3, 8, 20)), dtype)
    cache = QuantizedPages(filled, jnp.full((40, 3, 8), 2.0)) if dtype == jnp.int8 else filled
    floats = lambda pages: jax.tree.map(lambda x: np.array(x, np.float32), pages)  # which NumPy compares NaN of
    before = floats(cache)
    with library.use_level(level):
        ours = write(cache, cache, x, -x, pages, offsets)
    reference = jax.jit(ops.write_pages.reference, compiler_options=compiler_options("cpu"))
    theirs = reference(cache, cache, x, -x, pages, offsets)
    jax.tree.map(np.testing.assert_array_equal, floats(ours), floats(theirs))
    jax.tree.map(np.testing.assert_array_equal, floats(cache), before)  # it was not donated


def test_tokens_without_a_place_are_left_out():
    cache = jnp.zeros((4, 1, 8, 2))
    ones, places = jnp.ones((4, 1, 2)), (jnp.asarray([4, -1, 1, 2]), jnp.asarray([0, 0, 8, 3]))
    for out in write(cache, cache, ones, ones, *places):
        np.testing.assert_array_equal(out, cache.at[2, :, 3].set(1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_donated_cache_is_written_in_place(dtype):
    caches = [ops.new_pages((512, 2, 16, 32), dtype) for _ in range(4)]
    size = caches[0].nbytes

    def step(caches, x, table, kv):
        """Two layers: write keys and values, then attend to them."""
        for i in (0, 2):
            caches[i : i + 2] = ops.write_pages(*caches[i : i + 2], x, x, table[:, 0], kv % 16)
            x = x + ops.paged_decode_attention(x, caches[i], caches[i + 1], table, kv)
        return caches, x

    with ops.use_implementations(write_pages="native", paged_decode_attention="native"):
        jitted = jax.jit(step, donate_argnums=0)
        arguments = caches, jnp.ones((3, 2, 32)), jnp.ones((3, 8), jnp.int32), jnp.ones(3, jnp.int32)
        compiled = jitted.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size
    assert memory.temp_size_in_bytes < size
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and "512,2,16,32" in line]
    assert not copies
    where = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(caches)]
    out, _ = compiled(*arguments)
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(out)] == where
