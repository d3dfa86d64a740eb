"""Every rule of the family by every implementation against float64, token by token; packed sequences; what is refused.

The C++ kernel runs at every level. A program of it serves all levels: the level is looked up when it runs.
"""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import NATIVE, at_level
from tests.support.delta import HARD_SHAPES, RULES, error, float32, hard_errors, inputs, options, oracle, rounded_inputs
from verax import ops
from verax.errors import InvalidParameterError


@cache
def program(rule, implementation, settings):
    choice = {} if implementation == "auto" else {"delta_recurrence": implementation}

    @jax.jit
    def call(x, more):
        with ops.use_implementations(**choice):
            return getattr(ops, rule)(**x, **more, **dict(settings), **options(rule), output_final_state=True)

    return call


def run(rule, x, by="auto", initial_state=None, cu_seqlens=None, **settings):
    """`rule` on float32 arrays, compiled; outputs and final states."""
    arrays = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    arrays = {name: jnp.asarray(a) for name, a in arrays.items() if a is not None}
    implementation, level = at_level(by)
    with level:
        return program(rule, implementation, tuple(sorted(settings.items())))(x, arrays)


def check(results, exact, tolerance=2e-6):
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype == jnp.float32
        assert error(result, expected).max() < tolerance


@pytest.mark.parametrize("by", ["reference", "chunk", *NATIVE])
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_equation(rule, by):
    for T in (1, 2, 5, 16, 37) if by in NATIVE else (37,):
        x = inputs(rule, T=T)
        state = np.random.default_rng(9).standard_normal(oracle(rule, x)[1].shape).astype(np.float32)
        check(run(rule, float32(x), by, initial_state=state), oracle(rule, x, state))


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


@pytest.mark.parametrize("by", ["chunk", *NATIVE])
@pytest.mark.parametrize(("rule", "T", "K", "V"), HARD_SHAPES)
def test_keys_that_break_inverses_and_gates_that_break_exponentials(rule, T, K, V, by):
    settings, repeated = ({"chunk_size": 64}, 2e-4) if by == "chunk" else ({}, 1e-4)
    assert not hard_errors(lambda x: run(rule, float32(x), by, **settings), rule, T, K, V, repeated=repeated)


@pytest.mark.parametrize("by", ["auto", *NATIVE])
def test_scale_normalisation_and_low_precision_inputs(by):
    low, exact = rounded_inputs(T=21, K=40)
    # One dtype, and then several, which become float32.
    for given in (low, low | {"v": low["v"].astype(jnp.float32)}):
        results = run("gated_delta_rule", given, by, scale=0.3, use_qk_l2norm=True)
        check(results, oracle("gated_delta_rule", exact, scale=0.3))


def test_what_may_be_left_out():
    x = inputs("comba")
    plain = {name: x[name] for name in ("q", "k", "v")}
    ones = np.ones_like(x["beta"])
    exact, _ = oracle("delta_rule", plain | {"beta": ones})
    for rule in ("delta_rule", "gated_delta_rule", "comba"):
        assert error(run(rule, float32(plain))[0], exact).max() < 2e-6
    exact, _ = oracle("comba", plain | {"p": x["k"], "g": x["g"], "beta": ones})
    assert error(run("comba", float32(plain | {"g": x["g"], "beta": ones}))[0], exact).max() < 2e-6
    assert jax.eval_shape(lambda x: ops.delta_rule(**x), float32(plain))[1] is None


def test_no_tokens_leave_the_state():
    x = float32({name: a[:, :0] for name, a in inputs("gated_delta_rule").items()})
    state = np.random.default_rng(0).standard_normal((2, 4, 12, 20)).astype(np.float32)
    for mode in ("recurrent", "chunk", "auto"):
        out, final = run("gated_delta_rule", x, mode=mode, initial_state=state)
        assert out.shape == (2, 0, 4, 20)
        np.testing.assert_array_equal(final, state)


def test_a_batch_of_no_sequences_has_no_results():
    x = float32({name: a[:0] for name, a in inputs("gated_delta_rule").items()})
    for mode in ("recurrent", "chunk", "auto"):
        out, final = run("gated_delta_rule", x, mode=mode)
        assert (out.shape, final.shape) == ((0, x["v"].shape[1], 4, 20), (0, 4, 12, 20))
    assert jax.grad(lambda x: jnp.sum(ops.gated_delta_rule(**x)[0]))(x)["v"].shape == x["v"].shape


@pytest.mark.parametrize("mode", ["recurrent", "chunk", "auto"])
def test_packed_sequences_may_be_numpys(mode, unchecked):
    x = float32({name: a[:1] for name, a in inputs("gated_delta_rule").items()})
    offsets = np.asarray([0, 2, x["v"].shape[1]])
    expected, _ = ops.gated_delta_rule(**x, cu_seqlens=jnp.asarray(offsets), mode="recurrent")
    out, _ = ops.gated_delta_rule(**{name: np.asarray(a) for name, a in x.items()}, cu_seqlens=offsets, mode=mode)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_states_in_slots_may_be_numpys(unchecked):
    x = float32({name: a[:, :1] for name, a in inputs("gated_delta_rule").items()})
    states = np.random.default_rng(0).standard_normal((5, 4, 12, 20)).astype(np.float32)
    slots = ops.StateSlots(jnp.asarray([3, 1]), jnp.asarray([False, False]))
    _, after = ops.gated_delta_rule(**x, initial_state=states, slots=slots, output_final_state=True)
    _, final = ops.gated_delta_rule(**x, initial_state=states[[3, 1]], output_final_state=True)
    np.testing.assert_allclose(after[jnp.asarray([3, 1])], final, rtol=1e-6, atol=1e-6)


TOKENS = 90
PACKINGS = ([0, 1, 16, 32, 65, 90], [0, 40, 40, 41, 80, 83], [0, 0, 0, 0, 90, 90])
"""Sequences that end inside, at and just after a chunk of 16; empty ones; tokens after the last sequence."""


def packed_arguments(rule, seed=0):
    x = float32(inputs(rule, B=1, T=TOKENS, K=8, V=6, seed=seed))
    states = np.random.default_rng(seed + 1).standard_normal((5, x["v"].shape[2], 8, 6))
    return x, jnp.asarray(states, jnp.float32)


def part(x, start, stop):
    return {name: a[:, start * a.shape[1] // TOKENS : stop * a.shape[1] // TOKENS] for name, a in x.items()}


def by_sequence(packing):
    """For each of five sequences and 90 places, the token that stands there (90 for none); for each token, where."""
    tokens, places = np.full((5, TOKENS), TOKENS), np.full((TOKENS, 2), TOKENS)
    for n, (start, stop) in enumerate(pairwise(packing)):
        for token in range(start, stop):
            tokens[n, token - start] = token
            places[token] = n, token - start
    return tokens, places


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "gated_delta_product"])
def test_packed_equals_separate_gradients_too(rule):
    x, states = packed_arguments(rule)
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((1, TOKENS, x["v"].shape[2], 6)), rng.standard_normal(states.shape)]
    more = options(rule) | {"output_final_state": True}
    compiled = 0

    def packed(x, states, cu_seqlens):
        nonlocal compiled
        compiled += 1
        return getattr(ops, rule)(**x, **more, initial_state=states, cu_seqlens=cu_seqlens, mode="chunk", chunk_size=16)

    def separate(x, states, tokens, places):
        # A batch of the sequences, filled up with zeros, which change no state.
        x = {name: a.reshape(TOKENS, -1, *a.shape[2:]) for name, a in x.items()}
        x = {name: a.at[tokens].get(mode="fill", fill_value=0) for name, a in x.items()}
        x = {name: a.reshape(5, -1, *a.shape[3:]) for name, a in x.items()}
        out, final = getattr(ops, rule)(**x, **more, initial_state=states, mode="recurrent")
        return out.at[places[:, 0], places[:, 1]].get(mode="fill", fill_value=0)[None], final

    def with_gradients(run):
        def loss(x, states, *more):
            result = run(x, states, *more)
            return sum(jnp.sum(a * w) for a, w in zip(result, weights, strict=True)), result

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    together, apart = with_gradients(packed), with_gradients(separate)
    for packing in PACKINGS:
        one, others = together(x, states, jnp.asarray(packing)), apart(x, states, *by_sequence(packing))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert compiled == 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "offsets", [[0, 5, 5, 80], np.asarray([0, 5, 5, 80], np.int8), jnp.asarray([0, 5, 5, 80], "u4")]
)
def test_offsets_of_packed_sequences_may_be_any_integers(offsets):
    rule = "gated_delta_product"  # whose steps are more than 8 bits count
    x = {name: jnp.asarray(a[:1], jnp.float32) for name, a in inputs(rule, T=100).items()}

    @jax.jit
    def call(x):
        return getattr(ops, rule)(**x, **options(rule), mode="chunk", cu_seqlens=offsets, output_final_state=True)

    check(call(x), run(rule, x, "chunk", cu_seqlens=np.asarray([0, 5, 5, 80])))


def zeros(**changes):
    shapes = {"q": (2, 5, 2, 4), "k": (2, 5, 2, 4), "v": (2, 5, 4, 3), "g": (2, 5, 4), "beta": (2, 5, 4)} | changes
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


Q, K, V, G, BETA = zeros().values()


gated = partial(ops.gated_delta_rule, Q, K, V, G, BETA)
one_row = partial(ops.gated_delta_rule, *(a[:1] for a in (Q, K, V, G, BETA)))


# Annotations are not checked here: users have no checker either.
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "begins"),
    [
        (partial(ops.gated_delta_rule, **zeros(q=(5, 2, 4))), "q: expected shape"),
        (partial(ops.gated_delta_rule, **zeros(k=(2, 5, 2, 6))), r"k: expected shape \[2, 5, 2, 4\]"),
        (partial(ops.gated_delta_rule, **zeros(v=(2, 5, 3, 3), g=(2, 5, 3))), "v: expected a multiple of the 2 heads"),
        (partial(ops.gated_delta_rule, **zeros(v=(2, 6, 4, 3), g=(2, 6, 4))), "v: expected shape"),
        (partial(ops.gated_delta_rule, **zeros(beta=(2, 5, 2))), r"beta: expected shape \[2, 5, 4\]"),
        (partial(gated, initial_state=jnp.zeros((2, 4, 3, 4))), r"initial_state: expected shape \[2, 4, 4, 3\]"),
        (partial(gated, mode="fast"), "mode: expected auto, recurrent, chunk, step, got 'fast'"),
        (partial(gated, mode="step"), "mode: step takes one token"),
        (partial(gated, chunk_size=48), "chunk_size: expected a power of two"),
        (partial(gated, chunk_size=8), "chunk_size: expected a power of two"),
        (partial(gated, chunk_size=16.0), "chunk_size: expected a power of two"),
        (partial(gated, cu_seqlens=jnp.asarray([0, 5])), "cu_seqlens: .* batch of 2"),
        (partial(one_row, cu_seqlens=jnp.asarray([0.0, 5.0])), "cu_seqlens: expected integers, got float32"),
        (partial(one_row, cu_seqlens=[0, 5, 3]), "cu_seqlens: expected ascending"),
        (partial(one_row, cu_seqlens=[1, 5]), "cu_seqlens: expected ascending"),
        (partial(one_row, cu_seqlens=np.asarray([0, 6])), "cu_seqlens: expected ascending"),
        (partial(gated, initial_state=[0.0]), "initial_state: .* a list"),
        (partial(ops.delta_rule, Q.tolist(), K, V), "q: .* a list"),
        (partial(ops.kda, Q, K, V, G, BETA), r"g: expected shape \[2, 5, 4, 4\]"),
        (partial(ops.comba, Q, K, V, K[:, :1]), "p: expected shape"),
        (partial(ops.gated_delta_product, Q, K, V, G, BETA, 0), "num_householder: expected at least 1"),
        (partial(ops.gated_delta_product, Q, K, V, G, BETA, 1.0), "num_householder: expected at least 1"),
        (partial(ops.gated_delta_product, Q, K, V, G, BETA, 2), r"k: expected shape \[2, 10, 2, 4\]"),
        (partial(ops.dplr_delta_rule, Q, K, V[:, :, :2], K, K[..., :2]), "b: expected shape"),
        (partial(ops.dplr_delta_rule, Q, K, V, K, K), "v: expected shape"),
        (
            partial(ops.delta.sequence_parallel(ops.delta_rule, "t"), Q, K, V, cu_seqlens=jnp.asarray([0, 5])),
            "cu_seqlens: packed sequences cannot be split",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(call, begins):
    with pytest.raises(InvalidParameterError, match=r"^" + begins):
        call()
