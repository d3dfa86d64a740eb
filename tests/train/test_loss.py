"""The losses: cross-entropy by its definition, over the tokens that may be predicted."""

import jax
import jax.numpy as jnp
import numpy as np

from verax import ops
from verax.train.loss import rounded_gradient_linear, weighted_next_token_loss


def test_rounded_gradients_match_the_plain_form_up_to_rounding():
    rng = np.random.default_rng(1)
    x, bias = (
        jnp.asarray(rng.standard_normal((3, 4, 33)), jnp.float32),
        jnp.asarray(rng.standard_normal(17), jnp.float32),
    )
    weight = jnp.asarray(rng.standard_normal((17, 33)), jnp.float32)

    def gradients(implementation, dtype):
        def loss(x, weight, bias):
            with ops.use_implementations(linear=implementation):
                return jnp.sum(jnp.sin(ops.linear(x, weight.astype(dtype), bias)))

        return jax.grad(loss, (0, 1, 2))(x, weight, bias)

    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)):
        for got, exact in zip(gradients(rounded_gradient_linear, dtype), gradients("reference", dtype), strict=True):
            assert np.linalg.norm(got - exact) < bound * np.linalg.norm(exact)


def test_weighted_loss_is_the_mean_over_what_is_trained_in_parts_or_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((2, 12, 6)), rng.standard_normal((9, 6))
    targets, weights = rng.integers(0, 9, (2, 12)), rng.random((2, 12)) * (rng.random((2, 12)) < 0.5)

    def compute(head):
        arrays = [jnp.asarray(x, jnp.float32) for x in (hidden, weights)]
        return weighted_next_token_loss(lambda h: h @ head.T, arrays[0], jnp.asarray(targets), arrays[1])

    scores = hidden @ head.T
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = -(np.take_along_axis(logprobs, targets[..., None], -1)[..., 0] * weights).sum()
    once, gradient = jax.value_and_grad(compute)(jnp.asarray(head, jnp.float32))
    np.testing.assert_allclose(once, expected, rtol=1e-5)
    monkeypatch.setattr("verax.train.loss.MAX_SCORES", 2 * 9 * 4)  # four tokens of each row
    parts, parted = jax.value_and_grad(compute)(jnp.asarray(head, jnp.float32))
    np.testing.assert_allclose(parts, expected, rtol=1e-5)
    np.testing.assert_allclose(parted, gradient, rtol=1e-4, atol=1e-6)
