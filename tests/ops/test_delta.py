"""Every rule of the family in every mode against float64, token by token; gradients against finite differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta import HARD_SHAPES, RULES, error, float32, hard_errors, inputs, options, oracle, rounded_inputs
from verax import ops


def run(rule, x, **more):
    """`rule` on float32 arrays, compiled; outputs and final states."""

    @jax.jit
    def call(x, more):
        static = {name: more.pop(name) for name in list(more) if name in arrays}
        return getattr(ops, rule)(**x, **static, **settings, **options(rule), output_final_state=True)

    arrays = {name for name in ("initial_state", "cu_seqlens") if name in more}
    settings = {name: value for name, value in more.items() if name not in arrays}
    return call(float32(x), {name: jnp.asarray(more[name]) for name in arrays})


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
        out, state = step(float32(tokens(t, t + 1)), state)
        assert error(out, exact_out[:, t : t + 1]).max() < 5e-6
    assert error(state, exact_final).max() < 2e-6
    assert calls == 1


@pytest.mark.parametrize(("rule", "T", "K", "V"), HARD_SHAPES)
def test_keys_that_break_inverses_and_gates_that_break_exponentials(rule, T, K, V):
    assert not hard_errors(partial(run, rule, mode="chunk", chunk_size=64), rule, T, K, V, repeated=2e-4)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_the_chunk_size_changes_nothing(rule):
    x = inputs(rule, T=150)
    small, large = (run(rule, x, mode="chunk", chunk_size=chunk_size) for chunk_size in (16, 128))
    for other, one in zip(large, small, strict=True):
        assert error(other, np.asarray(one, np.float64)).max() < 3e-6


def test_scale_normalisation_and_low_precision_inputs():
    low, exact = rounded_inputs()
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
    assert jax.eval_shape(lambda x: ops.delta_rule(**x), float32(plain))[1] is None


def test_no_tokens_leave_the_state():
    x = {name: a[:, :0] for name, a in inputs("gated_delta_rule").items()}
    state = np.random.default_rng(0).standard_normal((2, 4, 12, 20)).astype(np.float32)
    for mode in ("recurrent", "chunk", "auto"):
        out, final = run("gated_delta_rule", x, mode=mode, initial_state=state)
        assert out.shape == (2, 0, 4, 20)
        np.testing.assert_array_equal(final, state)
