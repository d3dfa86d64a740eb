"""The TPU's kernels of the delta rule's scan and of its gradient, interpreted: memory that nothing wrote is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.delta_scan import cotangents, exact_scan, exact_scan_backward, scan_problem
from verax import ops
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward
from verax.ops.tpu.delta_scan import MAX_HEADS, _delta_chunk_scan_pallas, chunk_scan, chunk_scan_backward, heads_of_step

INTERPRETED = pltpu.InterpretParams(uninitialized_memory="nan")

CASES = {
    "one chunk": ([0], {}),
    "four chunks from a state": ([0] * 4, {"C": 24}),
    "heads that fill no step": ([0, 0], {"m": 3, "R": 3, "C": 8}),
    "packed sequences": ([0, 0, 1, 2, 2], {"N": 3}),
    "sequences without chunks": ([1, 3], {"N": 5, "m": 1}),
    "unused chunks": ([0, 1, 2, 2], {"N": 2}),
    "unused chunks alone": ([2, 2], {"N": 2}),
    "decay by channel": ([0, 0, 0], {"D": 24, "K": 24, "V": 40}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_scan_is_that_in_float64(name):
    owner, sizes = CASES[name]
    arguments = scan_problem(len(name), owner, **sizes)
    found = chunk_scan(*arguments, keep_states=True, interpret=INTERPRETED)
    for mine, theirs in zip(found, exact_scan(*arguments), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_in_float64(name):
    owner, sizes = CASES[name]
    chunks, states, owner = scan_problem(len(name), owner, **sizes)
    d_final, d_out = cotangents(1, chunks, states, owner)
    found = chunk_scan_backward(chunks, d_final, owner, d_out, interpret=INTERPRETED)
    for mine, theirs in zip(found, exact_scan_backward(chunks, d_final, owner, d_out), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_nan_in_a_cotangent_stays_in_its_sequence_and_head_and_in_earlier_chunks():
    chunks, states, owner = scan_problem(2, [0, 0, 1], N=2)
    d_final, d_out = cotangents(1, chunks, states, owner)
    d_out = d_out.at[0, 1, 0, 3, 5].set(jnp.nan)
    d_initial, d_next = chunk_scan_backward(chunks, d_final, owner, d_out, interpret=INTERPRETED)
    assert np.isnan(d_initial[0, 1]).any()
    for finite in (d_initial[0, 0], d_initial[1], d_next):
        assert np.isfinite(np.asarray(finite)).all()


def test_states_before_chunks_are_not_written_where_nobody_needs_them():
    arguments = scan_problem(1, [0, 0])
    out, final, before = chunk_scan(*arguments, interpret=INTERPRETED)
    assert before is None
    for mine, theirs in zip((out, final), exact_scan(*arguments), strict=False):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_nan_stays_in_its_head_and_sequence():
    chunks, states, owner = scan_problem(2, [0, 0, 1], N=2)
    chunks = chunks._replace(write=chunks.write.at[0, 1, 0, 3, 5].set(jnp.nan))
    out, final, _ = chunk_scan(chunks, states, owner, interpret=INTERPRETED)
    assert np.isnan(final[0, 1]).any()
    for finite in (final[0, 0], final[1], out[:, 0], out[2]):
        assert np.isfinite(np.asarray(finite)).all()


def test_heads_are_multiplied_together_as_far_as_there_is_memory():
    assert heads_of_step(16, 64, 128, 128) == MAX_HEADS
    assert heads_of_step(3, 64, 128, 128) == 3
    assert heads_of_step(16, 64, 256, 256) == 4


def test_derivatives_are_those_of_the_reference(monkeypatch):
    arguments = scan_problem(3, [0, 0])
    monkeypatch.setattr("verax.ops.tpu.delta_scan.chunk_scan", delta_chunk_scan.reference)

    def loss(scan):
        return jax.grad(lambda states: jnp.sum(scan(arguments[0], states, arguments[2])[0] ** 2))(arguments[1])

    expected = loss(lambda *arrays: delta_chunk_scan.reference(*arrays, keep_states=False))
    np.testing.assert_allclose(loss(_delta_chunk_scan_pallas), expected, rtol=1e-5)


def chosen(C=64, K=128, V=128, dtype="float32", backward=False):
    def array(*shape):
        return jax.ShapeDtypeStruct((2, 4, 1, *shape), dtype)

    key = array(C, K)
    chunks = Chunk(array(C, V), key, key, array(1), key, array(C, C))
    states = jax.ShapeDtypeStruct((1, 4, 1, K, V), dtype)
    owner = jax.ShapeDtypeStruct((2,), "int32")
    if backward:
        return delta_chunk_scan_backward.select(chunks, states, owner, chunks.value).name
    return delta_chunk_scan.select(chunks, states, owner).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    with ops.use_target("tpu", "TPU v5 lite"):
        assert chosen() == "reference"
        with ops.use_implementations(delta_chunk_scan="pallas"):
            assert chosen() == chosen(K=256, V=256) == chosen(C=16) == "pallas"
            refused = [{"K": 64}, {"V": 192}, {"C": 128}, {"K": 512, "V": 256}, {"dtype": "bfloat16"}]
            assert [chosen(**change) for change in refused] == ["reference"] * len(refused)
            assert chosen(backward=True) == "reference"
        with ops.use_implementations(delta_chunk_scan_backward="pallas"):
            assert chosen(backward=True) == "pallas"
            assert chosen(backward=True, K=64) == "reference"
    with ops.use_implementations(delta_chunk_scan="pallas"):
        assert chosen() != "pallas"
