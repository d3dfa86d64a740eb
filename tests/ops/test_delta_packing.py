"""Several sequences in one row: each as if it were alone, at every boundary, without compiling again."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.delta import float32, inputs, options
from verax import ops

TOKENS = 90
PACKINGS = ([0, 1, 16, 32, 65, 90], [0, 40, 40, 41, 80, 83], [0, 0, 0, 0, 90, 90])
"""Sequences that end inside, at and just after a chunk of 16; empty ones; tokens after the last sequence."""


def arguments(rule, seed=0):
    x = float32(inputs(rule, B=1, T=TOKENS, K=8, V=6, seed=seed))
    rng = np.random.default_rng(seed + 1)
    heads = x["v"].shape[2]
    return x, jnp.asarray(rng.standard_normal((5, heads, 8, 6)), jnp.float32)


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
    x, states = arguments(rule)
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


def test_the_plain_form_packs_too():
    x, states = arguments("gated_delta_rule")

    def run(cu_seqlens, mode):
        return ops.gated_delta_rule(
            **x, initial_state=states, cu_seqlens=cu_seqlens, output_final_state=True, mode=mode
        )

    run = jax.jit(run, static_argnames="mode")
    for packing in PACKINGS:
        for a, b in zip(run(jnp.asarray(packing), "recurrent"), run(jnp.asarray(packing), "chunk"), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["recurrent", "chunk"])
def test_nothing_leaks_from_one_sequence_to_another(mode):
    x, _ = arguments("gated_delta_rule")
    other, _ = arguments("gated_delta_rule", seed=5)
    cu_seqlens = jnp.asarray([0, 37, 90])

    @jax.jit
    def run(x):
        return ops.gated_delta_rule(**x, cu_seqlens=cu_seqlens, output_final_state=True, mode=mode)

    out, final = run(x)
    changed = {name: jnp.concatenate([other[name][:, :37], a[:, 37:]], 1) for name, a in x.items()}
    out2, final2 = run(changed)
    np.testing.assert_array_equal(out[:, 37:], out2[:, 37:])
    np.testing.assert_array_equal(final[1], final2[1])
    assert not np.array_equal(final[0], final2[0])


@pytest.mark.parametrize(("rule", "split"), [("gated_delta_rule", 41), ("kda", 16), ("comba", 89)])
def test_a_sequence_may_be_cut_anywhere(rule, split):
    x, states = arguments(rule)
    call = jax.jit(
        lambda x, state: getattr(ops, rule)(**x, **options(rule), initial_state=state, output_final_state=True)
    )
    out, final = call(x, states[:1])
    first, state = call(part(x, 0, split), states[:1])
    second, state = call(part(x, split, TOKENS), state)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), out, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(state, final, rtol=1e-5, atol=2e-6)
