"""JAX's splash attention for TPUs as an implementation of `ops.attention`, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from verax import ops
from verax.ops.tpu import attention as tpu


def arrays(T, S, N=2, K=1, H=64, B=1):
    rng = np.random.default_rng(T + S)
    shapes = ((T, N, jnp.float32), (S, K, jnp.bfloat16), (S, K, jnp.bfloat16))
    return [jnp.asarray(rng.standard_normal((B, n, heads, H)), dtype) for n, heads, dtype in shapes]


@pytest.mark.parametrize(
    ("T", "S", "sizes", "options"),
    [
        (1, 1, {}, {}),
        (200, 200, {"N": 6, "K": 2, "B": 2}, {}),
        (130, 300, {"H": 128}, {"causal": False, "scale": 0.3}),
        (150, 390, {"K": 2}, {"soft_cap": 1.5}),
        (300, 300, {}, {"window": 1}),
        (270, 300, {}, {"window": 130}),
        (300, 300, {}, {"window": 20, "causal": False}),
    ],
)
def test_results_are_the_references_but_for_rounding(T, S, sizes, options):
    q, k, v = arrays(T, S, **sizes)
    found = tpu.splash_attention(q, k, v, **options, interpret=True)
    np.testing.assert_allclose(found, ops.attention.reference(q, k, v, **options), atol=0.02)


def test_packed_sequences_see_their_own_keys(monkeypatch):
    monkeypatch.setattr(tpu, "QUERIES", 128)  # several tiles and blocks
    monkeypatch.setattr(tpu, "KEYS", 128)
    q, k, v = arrays(300, 300, B=2)
    segments = jnp.asarray([np.repeat([0, 1, 2], [120, 50, 130]), np.repeat([0, 1], [7, 293])])
    options = {"segments": segments, "window": 70}
    found = tpu.splash_attention(q, k, v, **options, interpret=True)
    np.testing.assert_allclose(found, ops.attention.reference(q, k, v, **options), atol=0.02)


def test_gradients_are_those_of_the_reference(monkeypatch):
    monkeypatch.setattr(tpu, "splash_attention", lambda q, *_, **__: q * 0.0)
    q, k, v = arrays(40, 40)
    options = {"segments": jnp.asarray(np.repeat([[0, 1]], 20, axis=1)), "scale": 0.2, "window": 7, "soft_cap": 2.0}

    def gradients(attend):
        return jax.grad(lambda *rows: jnp.sum(jnp.sin(attend(*rows, **options))), (0, 1, 2))(q, k, v)

    mine = gradients(ops.attention.implementations["splash"].function)
    for found, expected in zip(mine, gradients(ops.attention.reference), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def chosen(T=40, S=40, H=128, dtype=jnp.bfloat16, **options):
    q, k = jax.ShapeDtypeStruct((1, T, 4, H), jnp.float32), jax.ShapeDtypeStruct((1, S, 2, H), dtype)
    with ops.use_target("tpu"), ops.use_implementations(attention="splash"):
        return ops.attention.select(q, k, k, **options).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    assert chosen() == chosen(H=64) == chosen(T=300, S=40, causal=False) == "splash"
    for others in (dict(dtype=jnp.float32), dict(H=96), dict(T=60), dict(S=0, causal=False)):
        assert chosen(**others) != "splash"
