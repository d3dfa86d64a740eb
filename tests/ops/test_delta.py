"""Every rule of the family in every mode against float64, token by token; gradients against finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta import RULES, extremes, inputs, options, oracle
from verax import ops


def run(rule, x, **more):
    """`rule` on float32 arrays, compiled; outputs and final states."""

    @jax.jit
    def call(x, more):
        static = {name: more.pop(name) for name in list(more) if name in arrays}
        return getattr(ops, rule)(**x, **static, **settings, **options(rule), output_final_state=True)

    arrays = {name for name in ("initial_state", "cu_seqlens") if name in more}
    settings = {name: value for name, value in more.items() if name not in arrays}
    f32 = {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}
    return call(f32, {name: jnp.asarray(more[name]) for name in arrays})


def error(result, exact):
    """Largest error of each batch row, over the row's largest value."""
    B = exact.shape[0]
    difference = np.abs(np.asarray(result, np.float64) - exact).reshape(B, -1).max(-1)
    return difference / np.maximum(np.abs(exact).reshape(B, -1).max(-1), 1e-30)


@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_equation(rule, mode):
    x = inputs(rule)
    state = np.random.default_rng(9).standard_normal(oracle(rule, x)[1].shape)
    state = state.astype(np.float32)
    out, final = run(rule, x, mode=mode, initial_state=state)
    exact_out, exact_final = oracle(rule, x, state)
    assert out.dtype == final.dtype == jnp.float32
    assert error(out, exact_out).max() < 2e-6
    assert error(final, exact_final).max() < 2e-6


@pytest.mark.parametrize("rule", RULES)
def test_decoding_token_by_token_continues_a_prompt(rule):
    x, prompt = inputs(rule), 33
    exact_out, exact_final = oracle(rule, x)
    T, calls = x["q"].shape[1], 0

    def tokens(start, stop):
        return {name: a[:, start * a.shape[1] // T : stop * a.shape[1] // T] for name, a in x.items()}

    @jax.jit
    def step(x, state):
        nonlocal calls
        calls += 1
        return getattr(ops, rule)(**x, **options(rule), mode="step", initial_state=state, output_final_state=True)

    state = jnp.asarray(oracle(rule, tokens(0, prompt))[1], jnp.float32)
    for t in range(prompt, T):
        out, state = step({name: jnp.asarray(a, jnp.float32) for name, a in tokens(t, t + 1).items()}, state)
        assert error(out, exact_out[:, t : t + 1]).max() < 5e-6
    assert error(state, exact_final).max() < 2e-6
    assert calls == 1


# T: one token, around a chunk's end, several chunks and none full, many; K != V, and neither a power of two.
@pytest.mark.parametrize(
    ("rule", "T", "K", "V"),
    [
        ("gated_delta_rule", 1, 60, 100),
        ("gated_delta_rule", 15, 100, 60),
        ("gated_delta_rule", 63, 16, 60),
        ("gated_delta_rule", 1000, 24, 16),
        ("kda", 65, 60, 100),
        ("kda", 1000, 24, 16),
        ("gated_delta_product", 65, 20, 12),
        ("comba", 65, 20, 12),
        ("dplr_delta_rule", 65, 20, 12),
    ],
)
def test_keys_that_break_inverses_and_gates_that_break_exponentials(rule, T, K, V):
    x, kinds = extremes(rule, T, K, V)
    exact_out, exact_final = oracle(rule, x)
    out, final = run(rule, x, mode="chunk", chunk_size=64)
    errors = dict(zip(kinds, np.maximum(error(out, exact_out), error(final, exact_final)), strict=True))
    # At beta = 2 a repeated key is a reflection: nothing is ever forgotten, rounding errors included.
    assert not {kind: e for kind, e in errors.items() if not e < (2e-4 if kind[1] == 2 else 1e-5)}


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_the_chunk_size_changes_nothing(rule):
    x = inputs(rule, T=150)
    small, large = (run(rule, x, mode="chunk", chunk_size=chunk_size) for chunk_size in (16, 128))
    for other, one in zip(large, small, strict=True):
        assert error(other, np.asarray(one, np.float64)).max() < 3e-6


def test_scale_normalisation_and_low_precision_inputs():
    x = inputs("gated_delta_rule")
    x["k"] = x["k"] * 5.0
    x["k"][0, 3] = 0.0
    low = {name: jnp.asarray(a, jnp.bfloat16) for name, a in x.items()}
    exact = {name: np.asarray(a, np.float64) for name, a in low.items()}
    for name in "qk":
        exact[name] = exact[name] / np.sqrt((exact[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    call = partial(ops.gated_delta_rule, scale=0.3, use_qk_l2norm=True, output_final_state=True)
    out, final = jax.jit(lambda x: call(**x))(low)
    exact_out, exact_final = oracle("gated_delta_rule", exact, scale=0.3)
    assert out.dtype == final.dtype == jnp.float32
    assert error(out, exact_out).max() < 2e-6
    assert error(final, exact_final).max() < 2e-6


def test_what_may_be_left_out():
    x = inputs("comba")
    plain = {name: x[name] for name in ("q", "k", "v")}
    ones = np.ones_like(x["beta"])
    exact, _ = oracle("delta_rule", plain | {"beta": ones})
    for rule in ("delta_rule", "gated_delta_rule", "comba"):
        assert error(run(rule, plain)[0], exact).max() < 2e-6
    exact, _ = oracle("comba", plain | {"p": x["k"], "g": x["g"], "beta": ones})
    assert error(run("comba", plain | {"g": x["g"], "beta": ones})[0], exact).max() < 2e-6
    f32 = {name: jnp.asarray(a, jnp.float32) for name, a in plain.items()}
    assert jax.eval_shape(lambda x: ops.delta_rule(**x), f32)[1] is None


def test_no_tokens_leave_the_state():
    x = {name: a[:, :0] for name, a in inputs("gated_delta_rule").items()}
    state = np.random.default_rng(0).standard_normal((2, 4, 12, 20)).astype(np.float32)
    for mode in ("recurrent", "chunk", "auto"):
        out, final = run("gated_delta_rule", x, mode=mode, initial_state=state)
        assert out.shape == (2, 0, 4, 20)
        np.testing.assert_array_equal(final, state)
