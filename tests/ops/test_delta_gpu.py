"""The GPU's kernels of the delta rule's scan over chunks and of its gradient, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta_scan import cotangents, exact_scan, exact_scan_backward, scan_problem
from verax import ops
from verax.ops import delta
from verax.ops.delta._scan import delta_chunk_scan, delta_chunk_scan_backward
from verax.ops.gpu.delta_scan import COLUMNS, chunk_scan, chunk_scan_backward

CASES = {
    "one chunk": ([0], {}),
    "five chunks from a state": ([0] * 5, {"C": 32}),
    "value heads of one key head": ([0, 0, 0], {"m": 1, "R": 3}),
    "packed sequences": ([0, 0, 1, 2, 2, 2], {"N": 3}),
    "a sequence without chunks": ([0, 2], {"N": 3}),
    "unused chunks": ([0, 1, 2, 2], {"N": 2}),
    "decay by channel": ([0, 0, 0], {"D": 64, "K": 64}),
    "keys in two parts": ([0, 0], {"K": 128, "V": 32, "D": 128}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_scan_is_that_in_float64(name):
    owner, sizes = CASES[name]
    arguments = scan_problem(len(name), owner, **sizes)
    expected = exact_scan(*arguments)
    found = chunk_scan(*arguments, columns=COLUMNS, keep_states=True, interpret=True)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    assert chunk_scan(*arguments, columns=COLUMNS, interpret=True)[2] is None


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_in_float64(name):
    owner, sizes = CASES[name]
    chunks, states, owner = scan_problem(len(name), owner, **sizes)
    d_final, d_out = cotangents(1, chunks, states, owner)
    expected = exact_scan_backward(chunks, d_final, owner, d_out)
    kernel = chunk_scan_backward(chunks, d_final, owner, d_out, columns=COLUMNS, interpret=True)
    for found in (kernel, delta_chunk_scan_backward.reference(chunks, d_final, owner, d_out)):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_nan_stays_in_its_sequence_and_head_and_in_earlier_chunks():
    chunks, states, owner = scan_problem(2, [0, 0, 1], N=2)
    d_final, d_out = cotangents(1, chunks, states, owner)
    d_out = d_out.at[0, 1, 0, 3, 5].set(jnp.nan)
    d_initial, d_next = chunk_scan_backward(chunks, d_final, owner, d_out, columns=COLUMNS, interpret=True)
    assert np.isnan(d_initial[0, 1]).any()
    for finite in (d_initial[0, 0], d_initial[1], d_next):
        assert np.isfinite(np.asarray(finite)).all()


def test_the_reference_is_the_scan_in_float64():
    arguments = scan_problem(0, [0, 0, 1, 2], N=2, R=2)
    for mine, theirs in zip(delta_chunk_scan(*arguments, keep_states=True), exact_scan(*arguments), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def rule(tokens=100, heads=2, size=32):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((1, tokens, heads, size)), jnp.float32) for _ in range(3))
    g, beta = (jnp.asarray(rng.uniform(0.1, 0.9, (1, tokens, heads)), jnp.float32) for _ in range(2))
    return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v, -g, beta


def test_it_runs_where_it_is_named_and_lowers_for_nvidia():
    arguments = rule()

    def program(*arrays):
        return delta.gated_delta_rule(*arrays)

    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert "triton_kernel_call" not in lowered(program, arguments)
        with ops.use_implementations(delta_recurrence="chunk", delta_chunk_scan="triton"):
            assert "delta_chunk_scan" in lowered(program, arguments)
        loss = jax.grad(lambda *arrays: jnp.sum(jax.tree.leaves(program(*arrays))[0] ** 2), argnums=(0, 1, 2))
        named = {"delta_chunk_scan": "triton", "delta_chunk_scan_backward": "triton"}
        with ops.use_implementations(delta_recurrence="chunk", **named):
            text = lowered(loss, arguments)
            assert text.count("delta_chunk_scan_backward") > 0
            assert text.replace("delta_chunk_scan_backward", "").count("delta_chunk_scan") > 0


def lowered(function, arguments):
    return jax.jit(lambda *arrays: function(*arrays)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
