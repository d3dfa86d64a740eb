"""The GPU's kernel of the delta rule's scan over chunks, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.ops import delta
from verax.ops.delta._scan import Chunk, delta_chunk_scan
from verax.ops.gpu.delta import COLUMNS
from verax.ops.gpu.delta_kernel import chunk_scan


def problem(seed, owner, *, m=2, R=1, C=16, K=32, V=64, D=1, N=1):
    """Chunks of random numbers, zeros where nobody owns them; initial states; owners."""
    rng = np.random.default_rng(seed)
    lead, used = (len(owner), m, R), (np.asarray(owner) < N)[:, None, None, None, None]

    def array(*shape, scale=1.0):
        return jnp.asarray(np.where(used, scale * rng.standard_normal((*lead, *shape)), 0), jnp.float32)

    keep = jnp.asarray(np.where(used[..., 0], rng.uniform(0.2, 1, (*lead, D)), 1), jnp.float32)
    key = K**-0.5
    chunks = Chunk(
        array(C, V),
        array(C, K, scale=key),
        array(C, K, scale=key),
        keep,
        array(C, K, scale=key),
        array(C, C, scale=0.3),
    )
    states = jnp.asarray(rng.standard_normal((N, m, R, K, V)), jnp.float32)
    return chunks, states, jnp.asarray(owner, jnp.int32)


def exact(chunks, states, owner):
    """The scan in float64: outputs, final states, and the state before each chunk."""
    chunks, states = Chunk(*(np.asarray(x, np.float64) for x in chunks)), np.array(states, np.float64)
    out, before = np.zeros(chunks.value.shape), []
    for i, n in enumerate(np.minimum(owner, len(states) - 1)):
        state = states[n]
        before.append(state.copy())
        written = chunks.value[i] - chunks.found[i] @ state
        out[i] = chunks.read[i] @ state + chunks.inner[i] @ written
        states[n] = chunks.keep[i][..., None] * state + chunks.write[i].swapaxes(-1, -2) @ written
    return out, states, np.stack(before)


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
    arguments = problem(len(name), owner, **sizes)
    expected = exact(*arguments)
    found = chunk_scan(*arguments, columns=COLUMNS, keep_states=True, interpret=True)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    assert chunk_scan(*arguments, columns=COLUMNS, interpret=True)[2] is None


def test_the_reference_is_the_scan_in_float64():
    arguments = problem(0, [0, 0, 1, 2], N=2, R=2)
    for mine, theirs in zip(delta_chunk_scan(*arguments, keep_states=True), exact(*arguments), strict=True):
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
