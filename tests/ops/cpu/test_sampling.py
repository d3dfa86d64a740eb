"""The native sampler at every level: it draws what the sorting implementation draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from verax import ops
from verax.ops.cpu import library
from verax.ops.sampling import SamplingArrays, sample

pytestmark = needs_library

OPTIONS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_p": 0.9},
    {"top_p": 1e-4},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 0.3, "top_p": 0.8},
    {"temperature": 4.0, "top_k": 7},
    {"temperature": 0.0},
]


def params(options):
    """A row for each of the options."""
    column = lambda name, off, dtype: jnp.asarray([o.get(name, off) for o in options], dtype)
    return SamplingArrays(
        column("temperature", 1.0, jnp.float32),
        column("top_k", 0, jnp.int32),
        column("top_p", 1.0, jnp.float32),
        column("min_p", 0.0, jnp.float32),
    )


def drawing(implementation):
    @jax.jit
    def run(logits, how, u):
        with ops.use_implementations(sample=implementation):
            return sample(logits, how, u)

    return lambda *args: np.asarray(run(*args))


native, reference = drawing("native"), drawing("reference")


@for_each_level
@pytest.mark.parametrize("V", [1, 2, 15, 513, 2500])
def test_it_draws_what_the_sorting_form_draws(level, V):
    rng = np.random.default_rng(V)
    how = params(OPTIONS)
    with library.use_level(level):
        for spread in (0.1, 3.0, 30.0):
            logits = jnp.asarray(rng.standard_normal((len(OPTIONS), V)) * spread, jnp.float32)
            u = jnp.asarray(rng.random(len(OPTIONS)), jnp.float32)
            got, expected = native(logits, how, u), reference(logits, how, u)
            # A draw that falls on a boundary may go to the neighbour: then the weights up to them differ by rounding.
            for row in np.flatnonzero(got != expected):
                scores = np.asarray(logits[row], np.float64) / (OPTIONS[row].get("temperature") or 1)
                weights = np.exp(scores - scores.max())
                between = slice(min(got[row], expected[row]) + 1, max(got[row], expected[row]))
                assert weights[between].sum() < 1e-4 * weights.sum()


@for_each_level
@pytest.mark.parametrize("how", OPTIONS[1:-1])
def test_only_what_truncation_keeps_is_drawn(level, how):
    logits = jnp.asarray(np.random.default_rng(3).integers(-4, 4, 600), jnp.float32)  # many ties
    u = jnp.linspace(0, 1, 300, endpoint=False)
    with library.use_level(level):
        rows = params([how] * 300)
        tokens = native(jnp.broadcast_to(logits, (300, 600)), rows, u)
    possible = np.asarray(logits)[tokens]
    expected = np.asarray(logits)[reference(jnp.broadcast_to(logits, (300, 600)), rows, u)]
    assert set(possible) == set(expected)


@for_each_level
def test_a_row_does_not_depend_on_its_batch(level):
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((len(OPTIONS), 3000)), jnp.float32)
    u = jnp.asarray(rng.random(len(OPTIONS)), jnp.float32)
    with library.use_level(level):
        whole = native(logits, params(OPTIONS), u)
        for row, option in enumerate(OPTIONS):
            assert native(logits[row : row + 1], params([option]), u[row : row + 1])[0] == whole[row]


@for_each_level
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_and_a_nan_is_answered_with_its_place(level, temperature):
    how = params([{"temperature": temperature}] * 4)
    logits = jnp.full((4, 1100), -jnp.inf).at[:, 1050].set(-3.0)
    logits = logits.at[1, 700].set(jnp.nan).at[2, 20].set(jnp.inf).at[3].set(-jnp.inf)
    with library.use_level(level):
        for at in (0.0, 0.999):
            assert native(logits, how, jnp.full(4, at)).tolist() == [1050, 700, 20, 0]


@for_each_level
def test_the_greedy_token_is_the_first_of_equals(level):
    logits = jnp.zeros((2, 1600)).at[0, jnp.asarray([900, 30, 1599])].set(2.0).at[1, 1599].set(1.0)
    with library.use_level(level):
        assert native(logits, params([{"temperature": 0.0}] * 2), jnp.zeros(2)).tolist() == [30, 1599]
