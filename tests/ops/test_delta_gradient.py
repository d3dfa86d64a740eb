"""Gradients of the family: against finite differences in float64, finite on hard inputs, and what is kept for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import needs_library
from tests.support.delta import RULES, extremes, float32, inputs, options, oracle
from verax import ops


def loss_weights(rule, x):
    out, state = oracle(rule, x)
    rng = np.random.default_rng(5)
    return rng.standard_normal(out.shape), rng.standard_normal(state.shape)


def gradients(rule, x, weights, **more):
    """Gradients of `sum(out w) + sum(final w')` by every array, the initial state included."""

    def loss(x):
        out, final = getattr(ops, rule)(**x, **options(rule), **more, output_final_state=True)
        return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1])

    return jax.jit(jax.grad(loss))(x)


@pytest.mark.parametrize(("rule", "mode"), [*((rule, "chunk") for rule in RULES), ("gated_delta_rule", "recurrent")])
def test_gradients_equal_finite_differences(rule, mode):
    x = inputs(rule, B=1, T=21, K=6, V=5)
    weights = loss_weights(rule, x)
    rng = np.random.default_rng(7)
    x["initial_state"] = rng.standard_normal(weights[1].shape)
    with jax.enable_x64(True):
        computed = gradients(rule, {name: jnp.asarray(a) for name, a in x.items()}, weights, mode=mode)
        computed = {name: np.asarray(a) for name, a in computed.items()}

    def loss(x):
        out, final = oracle(rule, x, x["initial_state"])
        return (out * weights[0]).sum() + (final * weights[1]).sum()

    step = 1e-5
    for name, a in x.items():
        assert computed[name].dtype == np.float64
        for _ in range(3):
            way = rng.standard_normal(a.shape)
            up, down = (loss(x | {name: a + sign * step * way}) for sign in (1, -1))
            np.testing.assert_allclose((computed[name] * way).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
def test_gradients_stay_finite_and_right_on_zero_rows_and_strong_decay(rule):
    x, _ = extremes(rule, 33, 8, 6)
    weights = [jnp.asarray(w, jnp.float32) for w in loss_weights(rule, x)]
    x = float32(x)
    x["initial_state"] = jnp.ones(weights[1].shape)
    plain = gradients(rule, x, weights, mode="recurrent", use_qk_l2norm=True)
    chunk = gradients(rule, x, weights, mode="chunk", use_qk_l2norm=True)
    for name, exact in plain.items():
        assert np.isfinite(exact).all()
        scale = np.abs(exact).reshape(exact.shape[0], -1).max(-1).reshape(-1, *[1] * (exact.ndim - 1))
        # A zero row's gradient is 1,000 times the others' (the epsilon under its norm), hence row by row over T.
        assert np.abs((chunk[name] - exact) / np.maximum(scale, 1e-3)).max() < 2e-5, name


def test_a_decay_of_minus_infinity_forgets_everything():
    x = inputs("gated_delta_rule")
    x["g"][:, 20] = -np.inf
    weights = [jnp.asarray(w, jnp.float32) for w in loss_weights("gated_delta_rule", x)]
    x = float32(x)
    x["initial_state"] = jnp.ones(weights[1].shape)
    computed = gradients("gated_delta_rule", x, weights, mode="chunk")
    assert all(np.isfinite(a).all() for a in computed.values())
    early = {name: a.at[:, :20].add(1.0) for name, a in x.items() if name in "kv"}
    forward = jax.jit(lambda x: ops.gated_delta_rule(**x, mode="chunk")[0])
    out, changed = forward(x), forward(x | early)
    np.testing.assert_array_equal(out[:, 20:], changed[:, 20:])


@pytest.mark.parametrize("choice", ["chunk", pytest.param("native", marks=needs_library)])
def test_the_gradient_keeps_inputs_and_one_state_a_chunk(choice):
    x = float32(inputs("gated_delta_rule", T=256, K=16, V=16))

    def kept(**options):
        def out(x):
            with ops.use_implementations(delta_recurrence=choice if choice == "native" else "reference"):
                return ops.gated_delta_rule(**x, chunk_size=64, **options)[0]

        return sum(a.size for a in jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(out, x)[1], x)))

    given = sum(a.size for a in x.values())
    states = 4 * 2 * 4 * 16 * 16
    if choice == "native":
        assert kept() <= given + states + x["v"].size
    else:
        assert kept(mode="chunk") <= 1.5 * given + states
        assert kept(mode="recurrent") > 256 * 2 * 4 * 16 * 16


def slope(x, by="reference", **options):
    """Gradient by k of the square of a loss's gradient by k, with one implementation."""

    def loss(k):
        with ops.use_implementations(delta_recurrence=by):
            return jnp.sum(jnp.sin(ops.gated_delta_rule(**(x | {"k": k}), **options)[0]))

    return jax.jit(jax.grad(lambda k: jnp.sum(jax.grad(loss)(k) ** 2)))(x["k"])


def test_gradients_of_gradients():
    x = inputs("gated_delta_rule", B=1, T=18, H=1, HV=2, K=4, V=3)
    with jax.enable_x64(True):
        x = {name: jnp.asarray(a) for name, a in x.items()}
        np.testing.assert_allclose(slope(x, mode="chunk"), slope(x, mode="recurrent"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("choice", ["chunk", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_gradients_have_forward_derivatives(rule, choice):
    x = float32(inputs(rule, B=1, T=18, H=1, HV=2, K=4, V=3))
    products = []
    for implementation in (choice, "reference"):

        def loss(x):
            return jnp.sum(jnp.sin(getattr(ops, rule)(**x)[0]))

        with ops.use_implementations(delta_recurrence=implementation):
            products.append(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1])(x))
    for ours, theirs in zip(*map(jax.tree.leaves, products), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@needs_library
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
@pytest.mark.parametrize(("packing", "chunk_size"), [(None, None), (None, 32), ([0, 17, 17, 55, 60], None)])
def test_gradients_of_the_cpus_kernel_equal_the_token_walks(rule, packing, chunk_size):
    x = float32(inputs(rule, B=2 if packing is None else 1, T=61, K=12, V=8))
    N = x["q"].shape[0] if packing is None else len(packing) - 1
    rng = np.random.default_rng(3)
    x["initial_state"] = jnp.asarray(rng.standard_normal((N, x["v"].shape[2], 12, 8)), jnp.float32)
    weights = [rng.standard_normal(shape) for shape in (x["v"].shape, x["initial_state"].shape)]
    more = {"use_qk_l2norm": True, "chunk_size": chunk_size}
    more |= {} if packing is None else {"cu_seqlens": jnp.asarray(packing)}
    computed = []
    for implementation in ("native", "reference"):
        with ops.use_implementations(delta_recurrence=implementation):
            computed.append(gradients(rule, x, weights, **more))
    for ours, theirs in zip(*map(jax.tree.leaves, computed), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


@needs_library
def test_gradients_of_gradients_and_of_bfloat16_by_the_cpus_kernel():
    x = float32(inputs("gated_delta_rule", B=1, T=18, H=1, HV=2, K=4, V=3))
    np.testing.assert_allclose(slope(x, "native"), slope(x), rtol=1e-4, atol=1e-4)
    low = x | {"v": x["v"].astype(jnp.bfloat16)}
    with ops.use_implementations(delta_recurrence="native"):
        slopes = jax.jit(jax.grad(lambda x: jnp.sum(ops.gated_delta_rule(**x)[0])))(low)
    assert {name: a.dtype for name, a in slopes.items()} == {name: a.dtype for name, a in low.items()}
