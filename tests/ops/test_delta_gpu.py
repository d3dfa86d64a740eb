"""The GPU's kernel of the delta rule's scan over chunks, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta_scan import exact_scan, scan_problem
from verax import ops
from verax.ops import delta
from verax.ops.delta._scan import delta_chunk_scan
from verax.ops.gpu.delta import COLUMNS
from verax.ops.gpu.delta_kernel import chunk_scan

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
            assert "delta_chunk_scan" in lowered(loss, arguments)


def lowered(function, arguments):
    return jax.jit(lambda *arrays: function(*arrays)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
