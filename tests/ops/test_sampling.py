"""Sampling: truncation against its definition by sorting, the draw against the distribution, penalties by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import assert_same_draws, sampling_arguments
from verax import ops
from verax.ops import sampling


def possible(logits, **how):
    """Which tokens one row can give, found by many draws."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (4000, len(logits)))
    return set(np.asarray(ops.sampling.sample(*sampling_arguments(rows, [how] * 4000))).tolist())


LOGITS = np.log(np.asarray([0.4, 0.05, 0.3, 0.15, 0.1], np.float32))


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.65}, {0, 2}),
        ({"top_p": 0.71}, {0, 2, 3}),
        ({"min_p": 0.3}, {0, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 2}),
        ({"min_p": 0.3, "top_p": 0.99}, {0, 2, 3}),
        ({"temperature": 0.0, "top_k": 3}, {0}),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "bisect"])
def test_truncation_keeps_exactly_the_tokens_of_its_definition(how, kept, implementation):
    with ops.use_implementations(sample=implementation):
        assert possible(LOGITS, **how) == kept


def test_ties_at_the_threshold_are_all_kept():
    assert possible([1.0, 3.0, 3.0, 2.0, 3.0], top_k=2) == {1, 2, 4}


@jax.jit
def sorting(*args):
    with ops.use_implementations(sample="reference"):
        return sampling.sample(*args)


@jax.jit
def bisecting(*args):
    with ops.use_implementations(sample="bisect"):
        return sampling.sample(*args)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 7, 513, 1500]),
    st.sampled_from([0, 1, 5, 400]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-4]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
)
def test_the_form_without_a_sort_draws_what_the_sorting_form_draws(seed, V, top_k, top_p, min_p, temperature):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((6, V)) * rng.choice([0.1, 3.0, 30.0]), jnp.float32)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    arguments = sampling_arguments(logits, [how] * 6, seed=seed)
    expected, got = np.asarray(sorting(*arguments)), np.asarray(bisecting(*arguments))
    assert_same_draws(np.asarray(logits), [how] * 6, got, expected)


def test_draws_follow_the_distribution():
    V, n = 700, 20_000
    logits = jnp.asarray(np.random.default_rng(0).standard_normal(V) * 2, jnp.float32)
    u = jnp.asarray((np.arange(n) + 0.5) / n, jnp.float32)
    draw = jax.jit(lambda u: sampling._invert_cdf(jnp.broadcast_to(jnp.exp(logits - logits.max()), (1000, V)), u))
    counts = np.bincount(np.concatenate([np.asarray(draw(part)) for part in u.reshape(-1, 1000)]), minlength=V)
    # Each token gets as many of evenly spaced numbers as lie in its share of the unit interval.
    expected = np.asarray(jax.nn.softmax(logits), np.float64) * n
    assert np.abs(counts - expected).max() < 1.5


def test_draws_at_both_ends_land_on_possible_tokens():
    weights = jnp.zeros((1, 1200)).at[0, jnp.asarray([3, 700, 1100])].set(1e-3)
    for u in (0.0, 1e-9, 0.34, 0.67, np.nextafter(np.float32(1), np.float32(0))):
        assert int(sampling._invert_cdf(weights, jnp.asarray([u], jnp.float32))[0]) in (3, 700, 1100)


def test_uniform_depends_on_seed_and_position_only():
    seeds = jnp.asarray([[0, 7], [0, 7], [1, 7], [0, 8]], jnp.uint32)
    together = np.asarray(sampling.uniform(seeds, jnp.asarray([5, 6, 5, 5])))
    alone = np.asarray(sampling.uniform(seeds[:1], jnp.asarray([5])))
    assert together[0] == alone[0]
    assert len(set(together.tolist())) == 4
    assert ((together >= 0) & (together < 1)).all()


def test_penalties_by_hand():
    logits = jnp.asarray([[2.0, -1.0, 0.5, 1.0]])
    tokens = jnp.asarray([[0, 1, 2, 2, 3, 3]])  # prompt 0 1, generated 2 2, then what is not written yet
    out = sampling.penalize(
        logits,
        tokens,
        jnp.asarray([2]),
        jnp.asarray([4]),
        presence_penalty=jnp.asarray([0.1]),
        frequency_penalty=jnp.asarray([0.2]),
        repetition_penalty=jnp.asarray([2.0]),
    )
    np.testing.assert_allclose(out, [[1.0, -2.0, 0.25 - 0.1 - 2 * 0.2, 1.0]], rtol=1e-6)


def test_logprobs_are_those_of_log_softmax_and_ranks_count_better_tokens():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.standard_normal((4, 50)), jnp.float32)
    chosen = jnp.asarray([4, 0, int(logits[2].argmax()), 3])
    values, ids, ranks = sampling.token_logprobs(logits, chosen, jnp.arange(4) < 3, num_top=5)
    exact = np.asarray(logits, np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(values[:3], np.take_along_axis(exact, np.asarray(ids), -1)[:3], atol=1e-5)
    np.testing.assert_array_equal(ids[:3, 0], chosen[:3])
    np.testing.assert_array_equal(ids[:3, 1:], np.argsort(-exact, axis=-1)[:3, :5])
    assert ranks.tolist() == [1 + (exact[0] > exact[0, 4]).sum(), 1 + (exact[1] > exact[1, 0]).sum(), 1, 0]
    assert not values[3].any()  # not wanted
    assert not ids[3].any()


ADJUSTED = [{"presence_penalty": 0.5}, {"frequency_penalty": 0.3}, {"repetition_penalty": 1.3}, {"bias": {3: 4.0}}]
HELD_BACK = {"banned": [5, 6], "min_length": 30}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("adjusted", [{}, *ADJUSTED, HELD_BACK], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_the_form_without_a_sort_adjusts_scores_as_the_sorting_form_does(adjusted, temperature, masked):
    """In a batch whose other rows need nothing of it: their tokens stay those that they have alone."""
    rng = np.random.default_rng(3)
    V, logits = 40, rng.standard_normal((3, 40)).astype(np.float32)
    how = [{"temperature": temperature, **options} for options in ({}, adjusted, {})]
    mask = rng.integers(-(2**31), 2**31, (3, 2)) if masked else None
    given = {"tokens": rng.integers(0, V, (3, 25)), "lengths": [20, 20, 20], "num_prompt": 4, "mask": mask}
    got = np.asarray(bisecting(*sampling_arguments(logits, how, **given)))
    np.testing.assert_array_equal(got, sorting(*sampling_arguments(logits, how, **given)))
    plain = [{"temperature": temperature}] * 3
    np.testing.assert_array_equal(got[::2], bisecting(*sampling_arguments(logits, plain, **given))[::2])
