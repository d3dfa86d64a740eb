"""cuDNN's attention against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S", "H"), [(300, 300, 128), (130, 77, 64)])
def test_cudnn_is_the_plain_form_but_for_rounding(causal, T, S, H):
    if causal and T != S:
        pytest.skip("not one of its cases")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 4, H)), jnp.bfloat16) for n in (T, S, S))
    assert ops.attention.select(q, k, v, causal=causal).name == "cudnn"
    plain = ops.attention.reference(*(x.astype(jnp.float32) for x in (q, k, v)), causal=causal)
    np.testing.assert_allclose(ops.attention(q, k, v, causal=causal), plain, atol=0.03)
