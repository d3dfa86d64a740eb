"""The delta rule's C++ kernel where it differs from the other implementations: bits, memory, and when it is chosen.

Its values at every level are in tests/ops/test_delta.py, its gradients in tests/ops/test_delta_gradient.py.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from tests.ops.test_delta import PACKINGS, packed_arguments, part, run
from tests.support.cpu import needs_library
from tests.support.delta import error, float32, inputs, oracle
from verax import ops

pytestmark = needs_library


def test_packed_sequences_equal_separate_ones_bit_for_bit():
    x, states = packed_arguments("gated_delta_rule")
    for packing in PACKINGS:
        out, final = run("gated_delta_rule", x, "native", states, np.asarray(packing))
        for n, (start, stop) in enumerate(pairwise(packing)):
            alone = run("gated_delta_rule", part(x, start, stop), "native", states[n : n + 1])
            np.testing.assert_array_equal(out[:, start:stop], alone[0])
            np.testing.assert_array_equal(final[n : n + 1], alone[1])
        assert not np.any(out[:, packing[-1] :])


def test_later_tokens_do_not_reach_earlier_ones():
    x = float32(inputs("gated_delta_rule", T=40))
    before, _ = run("gated_delta_rule", x, "native")
    after, _ = run("gated_delta_rule", x | {"v": x["v"].at[:, 21].set(jnp.nan)}, "native")
    np.testing.assert_array_equal(after[:, :21], before[:, :21])
    assert np.isnan(after[:, 21:]).any()


def test_decoding_continues_a_prompt_in_place():
    x = inputs("gated_delta_rule", T=24, K=16, V=32)
    exact_out, exact_final = oracle("gated_delta_rule", x)
    x = float32(x)

    def tokens(start, stop):
        return {name: a[:, start:stop] for name, a in x.items()}

    step = jax.jit(
        lambda x, state: ops.gated_delta_rule(**x, initial_state=state, output_final_state=True), donate_argnums=1
    )
    _, state = run("gated_delta_rule", tokens(0, 17), "native")
    with ops.use_implementations(delta_recurrence="native"):
        memory = step.lower(tokens(17, 18), state).compile().memory_analysis()
        assert memory.alias_size_in_bytes == state.nbytes
        assert memory.temp_size_in_bytes < state.nbytes
        for t in range(17, 24):
            where = state.unsafe_buffer_pointer()
            out, state = step(tokens(t, t + 1), state)
            assert state.unsafe_buffer_pointer() == where
            assert error(out, exact_out[:, t : t + 1]).max() < 5e-6
    assert error(state, exact_final).max() < 2e-6


def test_it_is_chosen_for_what_it_takes():
    x = float32(inputs("gated_delta_rule"))
    assert "verax_delta" in jax.jit(lambda x: ops.gated_delta_rule(**x)).lower(x).as_text()
    loss = lambda x: ops.gated_delta_rule(**x)[0].sum()
    assert "verax_delta" in jax.jit(jax.grad(loss)).lower(x).as_text()
    with jax.enable_x64(True):
        wide = {name: a.astype(jnp.float64) for name, a in x.items()}
        assert "verax_delta" not in jax.jit(lambda x: ops.gated_delta_rule(**x)).lower(wide).as_text()
    assert "verax_delta" not in jax.jit(lambda x: ops.gated_delta_rule(**x, mode="chunk")).lower(x).as_text()
