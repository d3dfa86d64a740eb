"""The delta rule's C++ kernel at every level: float64, hard inputs, packing, decoding in place, gradients."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.delta import HARD_SHAPES, RULES, error, float32, hard_errors, inputs, options, oracle, rounded_inputs
from verax import ops
from verax.ops.cpu import library

pytestmark = needs_library


def native(rule, **settings):
    """`rule` by the kernel alone, compiled: a program serves every level. Outputs and final states."""

    @jax.jit
    def run(x, more):
        with ops.use_implementations(delta_recurrence="native"):
            return getattr(ops, rule)(**x, **more, **options(rule), **settings, output_final_state=True)

    return lambda x, **more: run(x, more)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_equation(rule):
    run = native(rule)
    for T in (1, 2, 5, 16, 37):
        x = inputs(rule, T=T)
        state = np.random.default_rng(9).standard_normal(oracle(rule, x)[1].shape).astype(np.float32)
        exact = oracle(rule, x, state)
        for level in library.levels():
            with library.use_level(level):
                out, final = run(float32(x), initial_state=state)
            assert out.dtype == final.dtype == jnp.float32
            assert error(out, exact[0]).max() < 2e-6, (level, T)
            assert error(final, exact[1]).max() < 2e-6, (level, T)


@pytest.mark.parametrize(("rule", "T", "K", "V"), HARD_SHAPES)
def test_keys_that_break_inverses_and_gates_that_break_exponentials(rule, T, K, V):
    run = native(rule)
    for level in library.levels():
        with library.use_level(level):
            assert not hard_errors(lambda x: run(float32(x)), rule, T, K, V, repeated=1e-4), level


@for_each_level
def test_normalisation_scale_and_bfloat16(level):
    low, exact = rounded_inputs(T=21, K=40)
    exact_out, exact_final = oracle("gated_delta_rule", exact, scale=0.3)
    run = native("gated_delta_rule", scale=0.3, use_qk_l2norm=True)
    with library.use_level(level):
        # One dtype, and then several, which become float32.
        for given in (low, low | {"v": low["v"].astype(jnp.float32)}):
            out, final = run(given)
            assert error(out, exact_out).max() < 2e-6
            assert error(final, exact_final).max() < 2e-6


def test_packed_sequences_are_those_apart_bit_for_bit():
    x, rng = float32(inputs("gated_delta_rule", B=1, T=90, K=8, V=6)), np.random.default_rng(1)
    states = rng.standard_normal((5, 4, 8, 6)).astype(np.float32)
    run = native("gated_delta_rule")
    for packing in ([0, 1, 16, 32, 65, 90], [0, 40, 40, 41, 80, 83], [0, 0, 0, 0, 90, 90]):
        out, final = run(x, initial_state=states, cu_seqlens=jnp.asarray(packing))
        for n, (start, stop) in enumerate(pairwise(packing)):
            alone = run({name: a[:, start:stop] for name, a in x.items()}, initial_state=states[n : n + 1])
            np.testing.assert_array_equal(out[:, start:stop], alone[0])
            np.testing.assert_array_equal(final[n : n + 1], alone[1])
        assert not np.any(out[:, packing[-1] :])


def test_later_tokens_do_not_reach_earlier_ones():
    x = float32(inputs("gated_delta_rule", T=40))
    run = native("gated_delta_rule")
    before, _ = run(x)
    after, _ = run(x | {"v": x["v"].at[:, 21].set(jnp.nan)})
    np.testing.assert_array_equal(after[:, :21], before[:, :21])
    assert np.isnan(after[:, 21:]).any()


def test_decoding_goes_on_from_a_prompt_in_place():
    x = inputs("gated_delta_rule", T=24, K=16, V=32)
    exact_out, exact_final = oracle("gated_delta_rule", x)
    x = float32(x)

    def part(start, stop):
        return {name: a[:, start:stop] for name, a in x.items()}

    @jax.jit
    def prompt(x):
        return ops.gated_delta_rule(**x, output_final_state=True)

    step = jax.jit(
        lambda x, state: ops.gated_delta_rule(**x, initial_state=state, output_final_state=True), donate_argnums=1
    )
    with ops.use_implementations(delta_recurrence="native"):
        _, state = prompt(part(0, 17))
        memory = step.lower(part(17, 18), state).compile().memory_analysis()
        assert memory.alias_size_in_bytes == state.nbytes
        assert memory.temp_size_in_bytes < state.nbytes
        for t in range(17, 24):
            where = state.unsafe_buffer_pointer()
            out, state = step(part(t, t + 1), state)
            assert state.unsafe_buffer_pointer() == where
            assert error(out, exact_out[:, t : t + 1]).max() < 5e-6
    assert error(state, exact_final).max() < 2e-6


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "comba"])
@pytest.mark.parametrize(("packing", "chunk_size"), [(None, None), (None, 32), ([0, 17, 17, 55, 60], None)])
def test_gradients_are_those_of_the_token_walk(rule, packing, chunk_size):
    x = float32(inputs(rule, B=2 if packing is None else 1, T=61, K=12, V=8))
    N = x["q"].shape[0] if packing is None else len(packing) - 1
    rng = np.random.default_rng(3)
    x["initial_state"] = jnp.asarray(rng.standard_normal((N, x["v"].shape[2], 12, 8)), jnp.float32)
    weights = [rng.standard_normal(shape) for shape in (x["v"].shape, x["initial_state"].shape)]

    def gradients(implementation):
        def loss(x):
            more = {} if packing is None else {"cu_seqlens": jnp.asarray(packing)}
            with ops.use_implementations(delta_recurrence=implementation):
                result = getattr(ops, rule)(
                    **x, **more, use_qk_l2norm=True, output_final_state=True, chunk_size=chunk_size
                )
            return sum(jnp.sum(a * w) for a, w in zip(result, weights, strict=True))

        return jax.jit(jax.value_and_grad(loss))(x)

    for ours, theirs in zip(jax.tree.leaves(gradients("native")), jax.tree.leaves(gradients("reference")), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())


def test_gradients_of_gradients_and_of_bfloat16():
    x = float32(inputs("gated_delta_rule", B=1, T=18, H=1, HV=2, K=4, V=3))

    def slope(implementation):
        def loss(k):
            with ops.use_implementations(delta_recurrence=implementation):
                return jnp.sum(jnp.sin(ops.gated_delta_rule(**(x | {"k": k}))[0]))

        return jax.jit(jax.grad(lambda k: jnp.sum(jax.grad(loss)(k) ** 2)))(x["k"])

    np.testing.assert_allclose(slope("native"), slope("reference"), rtol=1e-4, atol=1e-4)
    low = x | {"v": x["v"].astype(jnp.bfloat16)}
    with ops.use_implementations(delta_recurrence="native"):
        found = jax.jit(jax.grad(lambda x: jnp.sum(ops.gated_delta_rule(**x)[0])))(low)
    assert {name: a.dtype for name, a in found.items()} == {name: a.dtype for name, a in low.items()}


def test_a_training_step_runs_the_kernel_and_keeps_one_state_a_chunk():
    x = float32(inputs("gated_delta_rule", T=256, K=16, V=16))
    with ops.use_implementations(delta_recurrence="native"):

        def out(x):
            return ops.gated_delta_rule(**x, chunk_size=64)[0]

        assert "verax_delta" in jax.jit(jax.grad(lambda x: out(x).sum())).lower(x).as_text()
        kept = sum(a.size for a in jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(out, x)[1], x)))
    assert kept <= sum(a.size for a in x.values()) + 4 * 2 * 4 * 16 * 16 + x["v"].size


def test_it_is_chosen_for_what_it_takes():
    x = float32(inputs("gated_delta_rule"))
    text = jax.jit(lambda x: ops.gated_delta_rule(**x)).lower(x).as_text()
    assert "verax_delta" in text
    with jax.enable_x64(True):
        wide = {name: a.astype(jnp.float64) for name, a in x.items()}
        assert "verax_delta" not in jax.jit(lambda x: ops.gated_delta_rule(**x)).lower(wide).as_text()
    assert "verax_delta" not in jax.jit(lambda x: ops.gated_delta_rule(**x, mode="chunk")).lower(x).as_text()


def test_it_can_be_mapped():
    x = float32(inputs("gated_delta_rule", B=3, T=20))
    with ops.use_implementations(delta_recurrence="native"):
        together, _ = ops.gated_delta_rule(**x)
        mapped = jax.vmap(lambda x: ops.gated_delta_rule(**{name: a[None] for name, a in x.items()})[0][0])(x)
    np.testing.assert_array_equal(mapped, together)
