"""Kernels of the delta rule's scan over chunks and of its gradient, interpreted: on TPUs unwritten memory is NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from verax import ops
from verax.ops import delta
from verax.ops.delta._scan import Chunk, delta_chunk_scan, delta_chunk_scan_backward, scan_backward_by, scan_by
from verax.ops.gpu import delta as gpu
from verax.ops.tpu import delta as tpu


def scan_problem(seed, owner, *, m=2, R=1, C=16, K=32, V=64, D=1, N=1):
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


def exact(operation, *arrays, **options):
    """Results of an operation's reference in float64, which the tests of the rules compare with their equations."""

    def wide(x):
        return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, operation.reference(*jax.tree.map(wide, arrays), **options))


def cotangents(seed, chunks, states, owner):
    """Random cotangents of the final states, and of the outputs, zeros where nobody owns a chunk."""
    rng = np.random.default_rng(seed)
    used = np.asarray(owner)[:, None, None, None, None] < len(states)
    d_out = np.where(used, rng.standard_normal(chunks.value.shape), 0)
    return jnp.asarray(rng.standard_normal(states.shape), jnp.float32), jnp.asarray(d_out, jnp.float32)


WALKS = {
    "gpu": partial(gpu.walk, interpret=True),
    "tpu": partial(tpu.walk, interpret=pltpu.InterpretParams(uninitialized_memory="nan")),
}
SCANS = {device: partial(scan_by, walk) for device, walk in WALKS.items()}
GRADIENTS = {device: partial(scan_backward_by, walk) for device, walk in WALKS.items()}

SHARED = {
    "one chunk": ([0], {}),
    "five chunks from a state": ([0] * 5, {"C": 32}),
    "packed sequences": ([0, 0, 1, 2, 2, 2], {"N": 3}),
    "a sequence without chunks": ([0, 2], {"N": 3}),
    "unused chunks": ([0, 1, 2, 2], {"N": 2}),
}
CASES = {
    "gpu": SHARED
    | {
        "value heads of one key head": ([0, 0, 0], {"m": 1, "R": 3}),
        "decay by channel": ([0, 0, 0], {"D": 64, "K": 64}),
        "keys in two parts": ([0, 0], {"K": 128, "V": 32, "D": 128}),
    },
    "tpu": SHARED
    | {
        "heads that fill no step": ([0, 0], {"m": 3, "R": 3, "C": 8}),
        "sequences without chunks at both ends": ([1, 3], {"N": 5, "m": 1}),
        "unused chunks alone": ([2, 2], {"N": 2}),
        "decay by channel": ([0, 0, 0], {"D": 24, "K": 24, "V": 40}),
    },
}
each_case = pytest.mark.parametrize(("device", "name"), [(device, name) for device in CASES for name in CASES[device]])
each_device = pytest.mark.parametrize("device", SCANS)


def check(arrays, expected):
    for mine, theirs in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


@each_case
def test_the_scan_equals_float64(device, name):
    owner, sizes = CASES[device][name]
    arguments = scan_problem(len(name), owner, **sizes)
    check(SCANS[device](*arguments, keep_states=True), exact(delta_chunk_scan, *arguments, keep_states=True))


@each_case
def test_the_gradient_equals_float64(device, name):
    owner, sizes = CASES[device][name]
    chunks, states, owner = scan_problem(len(name), owner, **sizes)
    d_final, d_out = cotangents(1, chunks, states, owner)
    arguments = chunks, d_final, owner, d_out
    check(GRADIENTS[device](*arguments), exact(delta_chunk_scan_backward, *arguments))


@each_device
def test_states_before_chunks_are_not_written_where_nobody_needs_them(device):
    arguments = scan_problem(1, [0, 0])
    out, final, before = SCANS[device](*arguments)
    assert before is None
    check((out, final), exact(delta_chunk_scan, *arguments)[:2])


@each_device
def test_nan_stays_in_its_head_and_sequence(device):
    chunks, states, owner = scan_problem(2, [0, 0, 1], N=2)
    chunks = chunks._replace(write=chunks.write.at[0, 1, 0, 3, 5].set(jnp.nan))
    out, final, _ = SCANS[device](chunks, states, owner)
    assert np.isnan(final[0, 1]).any()
    for finite in (final[0, 0], final[1], out[:, 0], out[2]):
        assert np.isfinite(np.asarray(finite)).all()


def test_derivatives_equal_the_references(monkeypatch):
    chunks, states, owner = scan_problem(3, [0, 0])
    monkeypatch.setattr("verax.ops.delta._scan.scan_by", lambda walk, *arrays, **_: delta_chunk_scan.reference(*arrays))

    def gradient(scan):
        return jax.grad(lambda states: jnp.sum(scan(chunks, states, owner)[0] ** 2))(states)

    kernel = delta_chunk_scan.implementations["pallas"].function
    np.testing.assert_allclose(gradient(kernel), gradient(delta_chunk_scan.reference), rtol=1e-5)


def test_the_rule_lowers_to_kernels_for_nvidia_and_its_gradient_where_it_is_named():
    def array(*shape):
        return jax.ShapeDtypeStruct((1, 100, 2, *shape), jnp.float32)

    def lowered(function):
        arguments = array(32), array(32), array(32), array(), array()
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    def loss(*arrays):
        return jnp.sum(jax.tree.leaves(delta.gated_delta_rule(*arrays))[0] ** 2)

    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        forward, backward = "@delta_chunk_scan_kernel(", "@delta_chunk_scan_backward_kernel("
        assert forward in lowered(delta.gated_delta_rule)
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        assert backward not in lowered(gradient)
        with ops.use_implementations(delta_chunk_scan_backward="triton"):
            assert all(kernel in lowered(gradient) for kernel in (forward, backward))


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


def test_it_runs_on_a_tpu_where_it_is_named_and_takes_the_call():
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
