"""The kernels of attention over whole sequences have no derivative of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops


@pytest.mark.parametrize(("platform", "name"), [("gpu", "triton"), ("tpu", "pallas")])
def test_gradients_are_those_of_the_reference(platform, name, monkeypatch):
    rng = np.random.default_rng(80)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 40, heads, 8)), jnp.float32) for heads in (2, 1, 1))
    kernel = f"verax.ops.{platform}.attention_kernel.flash_attention"
    monkeypatch.setattr(kernel, lambda q, *_, **__: q * 0.0)
    segments = jnp.asarray(np.repeat([[0, 1]], 20, axis=1))
    options = {"segments": segments, "scale": 0.2, "window": 7, "soft_cap": 2.0}

    def gradients(attend):
        return jax.grad(lambda *rows: jnp.sum(jnp.sin(attend(*rows, **options))), (0, 1, 2))(q, k, v)

    mine = gradients(ops.attention.implementations[name].function)
    theirs = gradients(ops.attention.reference)
    for found, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
