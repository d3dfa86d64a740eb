"""The GPU's kernel of the delta rules' decode step, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta import RULES, extremes, inputs, options, oracle
from verax import ops
from verax.ops.delta import delta_recurrence
from verax.ops.gpu import delta_step_kernel
from verax.ops.gpu.delta import _delta_step_triton
from verax.ops.gpu.delta_step_kernel import columns_of_program

interpreted = partial(delta_step_kernel.delta_step, interpret=True)


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    monkeypatch.setattr(delta_step_kernel, "delta_step", interpreted)


def run(rule, x, **settings):
    """`rule` by the kernel alone; outputs and final states."""
    with ops.use_implementations(delta_recurrence=_delta_step_triton):
        return getattr(ops, rule)(**x, **settings, **options(rule), output_final_state=True)


def problem(rule, dtype=jnp.float32, **sizes):
    """Arguments of one token and their values in float64, initial states included."""
    x = inputs(rule, T=1, **sizes)
    x["initial_state"] = np.random.default_rng(9).standard_normal(oracle(rule, x)[1].shape).astype(np.float32)
    given = {name: jnp.asarray(a, jnp.float32 if name == "initial_state" else dtype) for name, a in x.items()}
    return given, {name: np.asarray(a, np.float64) for name, a in given.items()}


def check(found, exact, tolerance=2e-6):
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, theirs, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_equation(rule):
    given, exact = problem(rule)
    check(run(rule, given), oracle(rule, exact, exact.pop("initial_state")))


# Columns and keys that fill no program, several programs a state, one column.
@pytest.mark.parametrize(("K", "V"), [(60, 100), (128, 33), (3, 1), (256, 8)])
def test_sizes_that_fill_no_program(K, V):
    given, exact = problem("kda", B=3, H=1, HV=3, K=K, V=V)
    check(run("kda", given), oracle("kda", exact, exact.pop("initial_state")))


def test_normalisation_scale_and_bfloat16():
    given, exact = problem("gated_delta_rule", jnp.bfloat16)
    given["k"], exact["k"] = given["k"].at[0, 0, 1].set(0.0), exact["k"].copy()
    exact["k"][0, 0, 1] = 0.0
    for name in "qk":
        exact[name] = exact[name] / np.sqrt((exact[name] ** 2).sum(-1, keepdims=True) + 1e-6)
    expected = oracle("gated_delta_rule", exact, exact.pop("initial_state"), scale=0.3)
    check(run("gated_delta_rule", given, scale=0.3, use_qk_l2norm=True), expected)


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
def test_keys_and_gates_that_break_exponentials(rule):
    x, _ = extremes(rule, 1, 20, 12)
    x["g"][0] = -np.inf
    check(run(rule, {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}), oracle(rule, x))


def test_nan_stays_in_its_state_and_changes_no_bit_of_the_others():
    given, _ = problem("gated_delta_rule", V=40)
    clean = run("gated_delta_rule", given)
    given["initial_state"] = given["initial_state"].at[1, 2, 5, 33].set(jnp.nan)
    for mine, theirs in zip(run("gated_delta_rule", given), clean, strict=True):
        changed = np.argwhere(np.asarray(mine) != np.asarray(theirs))
        assert len(changed)
        assert set(changed[:, 0]) == {1}
        assert set(changed[:, -1]) == {33}
    v = given["v"].at[0, 0, 3].set(jnp.nan)
    out, states = run("gated_delta_rule", given | {"v": v, "initial_state": jnp.zeros_like(given["initial_state"])})
    np.testing.assert_array_equal(np.isnan(out).all(-1)[:, 0], [[False] * 3 + [True], [False] * 4])
    np.testing.assert_array_equal(np.isnan(states).all((-1, -2)), [[False] * 3 + [True], [False] * 4])


def test_a_state_is_divided_where_there_are_few():
    assert [columns_of_program(heads, 128) for heads in (16, 64, 128, 4096)] == [8, 8, 16, 32]
    assert columns_of_program(64, 20) == 8


def test_gradients_are_those_of_the_step():
    given, _ = problem("gated_delta_rule")

    def gradients(call):
        return jax.jit(jax.grad(lambda x: sum(jnp.sum(jnp.sin(a)) for a in call(x))))(given)

    mine = gradients(partial(run, "gated_delta_rule", use_qk_l2norm=True))
    step = partial(ops.gated_delta_rule, use_qk_l2norm=True, mode="step", output_final_state=True)
    theirs = gradients(lambda x: step(**x))
    for name, expected in theirs.items():
        np.testing.assert_allclose(mine[name], expected, atol=1e-5, err_msg=name)


def chosen(B=2, T=1, K=128, V=128, dtype="float32", state="float32", **settings):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    key, gate = array(B, T, 2, K), array(B, T, 4)
    x = ops.delta.DeltaInputs(key, key, key, array(B, T, 4, V), gate, gate)
    return delta_recurrence.select(x, jax.ShapeDtypeStruct((B, 4, K, V), state), **settings).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert chosen() == "step"
        with ops.use_implementations(delta_recurrence="triton"):
            taken = [{}, {"T": 4}, {"K": 60, "V": 33}, {"dtype": "bfloat16"}, {"scale": 0.3}]
            assert [chosen(**change) for change in taken] == ["triton"] * len(taken)
            refused = [{"K": 320}, {"state": "float64"}, {"scale": jnp.ones(())}, {"B": 0}]
            assert [chosen(**change) for change in refused] == ["step"] * len(refused)
            packed = jax.ShapeDtypeStruct((3,), "int32")
            assert chosen(T=64) == chosen(cu_seqlens=packed) == "chunk"
    with ops.use_implementations(delta_recurrence="triton"):
        assert chosen() != "triton"
