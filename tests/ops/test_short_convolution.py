"""The short convolution: PyTorch's depthwise one, packed and in pieces as if each sequence were whole and alone."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops

RNG = np.random.default_rng(0)
T, C = 23, 5


def arguments(width, sequences=1):
    shapes = (1, T, C), (C, 1, width), (sequences, width - 1, C)
    return [jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in shapes]


def exact(x, weight, state):
    """The definition, in float64: outputs, and the last inputs."""
    whole, taps = np.concatenate([state, x]).astype(np.float64), np.asarray(weight[:, 0].T, np.float64)
    out = [(whole[t : t + len(taps)] * taps).sum(0) for t in range(len(x))]
    return np.asarray(out).reshape(x.shape), whole[len(x) :]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_is_the_definition(width):
    x, weight, state = arguments(width)
    out, last = ops.short_convolution(x, weight, initial_state=state)
    for got, expected in zip((out[0], last[0]), exact(x[0], weight, state[0]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    fresh, _ = ops.short_convolution(x, weight)
    np.testing.assert_allclose(fresh[0], exact(x[0], weight, 0 * state[0])[0], atol=1e-6)


@pytest.mark.parametrize("packing", [[0, 1, 3, 3, 10, 23], [0, 0, 2, 17, 18, 20], [0, 4, 4, 4, 4, 4]])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_packed_equals_separate(packing, width):
    # Empty sequences, sequences shorter than the filter, and tokens after the last of them.
    x, weight, states = arguments(width, sequences=5)
    packed = jax.jit(lambda cu_seqlens: ops.short_convolution(x, weight, initial_state=states, cu_seqlens=cu_seqlens))
    out, last = packed(jnp.asarray(packing))
    for n, (start, stop) in enumerate(pairwise(packing)):
        expected, left = exact(x[0, start:stop], weight, states[n])
        np.testing.assert_allclose(out[0, start:stop], expected, atol=1e-6)
        np.testing.assert_array_equal(last[n], left.astype(np.float32))


@pytest.mark.parametrize("cut", [1, 2, 9, 22])
def test_it_goes_on_from_where_it_stopped(cut):
    x, weight, state = arguments(4)
    whole, last = ops.short_convolution(x, weight, initial_state=state)
    first, middle = ops.short_convolution(x[:, :cut], weight, initial_state=state)
    second, end = ops.short_convolution(x[:, cut:], weight, initial_state=middle)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(end, last)
