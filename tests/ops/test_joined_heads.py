"""Attention over pages with joined heads is attention with the heads apart."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.support.attention import exact_paged_attention, paged_problem
from verax import ops
from verax.ops.attention import join_heads, own_results, spread_queries
from verax.ops.tpu.paged import ragged_attention


@pytest.mark.parametrize(("N", "K", "m"), [(4, 4, 2), (12, 4, 4), (6, 2, 2)])
@pytest.mark.parametrize("implementation", ["tiled", "pallas"])
def test_results_are_those_of_the_heads_apart(N, K, m, implementation):
    lengths, counts, H, options = [5, 70, 17, 40], [1, 1, 1, 40], 8, {"window": 37, "scale": 0.3}
    (q, k, v), table, lengths, starts = paged_problem(0, lengths, counts, N=N, K=K, H=H, p=16)
    exact = exact_paged_attention((q, k, v), table, lengths, starts, **options)
    k, v = (jnp.swapaxes(join_heads(jnp.swapaxes(x, 1, 2), m), 1, 2) for x in (k, v))  # [P, K/m, p, m H]
    arguments = spread_queries(q, K, m), k, v, table, lengths, starts
    if implementation == "pallas":
        interpreted = pltpu.InterpretParams(uninitialized_memory="nan")
        out = ragged_attention(*arguments, pages=2, interpret=interpreted, **options)
    else:
        out = ops.paged_attention.implementations[implementation].function(*arguments, **options)
    np.testing.assert_allclose(own_results(out, K, m), exact, atol=2e-5)
