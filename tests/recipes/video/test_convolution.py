"""The training implementation of convolutions against XLA's own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.video.convolution import own_gradient_conv2d, own_gradient_conv3d
from verax import ops

CASES = {
    "causal": ((2, 3, 6, 5, 4), (7, 4, 3, 3, 3), dict(padding=1)),
    "one frame": ((2, 1, 6, 5, 4), (7, 4, 3, 3, 3), dict(padding=1)),
    "pointwise": ((2, 3, 4, 5, 4), (3, 4, 1, 1, 1), {}),
    "earlier frames": ((1, 4, 6, 5, 4), (3, 4, 3, 3, 3), dict(padding=1, cache=(1, 2, 6, 5, 4))),
    "halved in time": ((2, 6, 3, 4, 4), (4, 4, 3, 1, 1), dict(stride=(2, 1, 1), cache=(2, 1, 3, 4, 4))),
    "image": ((3, 6, 5, 4), (7, 4, 3, 3), dict(padding=1)),
    "halved image": ((3, 6, 8, 4), (5, 4, 3, 3), dict(stride=2, padding=((0, 1), (0, 1)))),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_the_reference(case):
    x_shape, w_shape, options = CASES[case]
    keys = jax.random.split(jax.random.key(0), 5)
    x, weight = jax.random.normal(keys[0], x_shape), jax.random.normal(keys[1], w_shape)
    bias = jax.random.normal(keys[2], w_shape[:1])
    options = {**options, **({"cache": jax.random.normal(keys[3], options["cache"])} if "cache" in options else {})}
    operation, own = (ops.conv3d, own_gradient_conv3d) if len(w_shape) == 5 else (ops.conv2d, own_gradient_conv2d)

    def run(implementation):
        with ops.use_implementations(**{operation.name: implementation}):
            y, pull = jax.vjp(lambda *a: operation(*a, **options), x, weight, bias)
            return y, *pull(jax.random.normal(keys[4], y.shape))

    for got, expected in zip(run(own), run("reference"), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * float(jnp.abs(expected).max()))
