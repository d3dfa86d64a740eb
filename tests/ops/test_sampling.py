"""Sampling: truncation against its definition by sorting, the draw against the distribution, penalties by hand.

The C++ sampler runs at every level, by one program: the level is looked up when it runs.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import NATIVE, at_level
from tests.support.sampling import assert_same_draws, sampling_arguments
from verax import ops
from verax.ops import sampling

each_form = pytest.mark.parametrize("by", ["bisect", *NATIVE])
"""Forms without a sort, which draw what the sorting reference draws."""


@cache
def program(implementation):
    @jax.jit
    def run(*args):
        with ops.use_implementations(sample=implementation):
            return sampling.sample(*args)

    return run


def draw(by, *arguments):
    implementation, level = at_level(by)
    with level:
        return np.asarray(program(implementation)(*arguments))


def possible(logits, **option):
    """Which tokens one row can give, found by many draws."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (4000, len(logits)))
    return set(np.asarray(ops.sampling.sample(*sampling_arguments(rows, [option] * 4000))).tolist())


LOGITS = np.log(np.asarray([0.4, 0.05, 0.3, 0.15, 0.1], np.float32))


@pytest.mark.parametrize(
    ("option", "kept"),
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
def test_truncation_keeps_exactly_the_tokens_of_its_definition(option, kept):
    with ops.use_implementations(sample="reference"):
        assert possible(LOGITS, **option) == kept


def test_ties_at_the_threshold_are_all_kept():
    assert possible([1.0, 3.0, 3.0, 2.0, 3.0], top_k=2) == {1, 2, 4}


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
ADJUSTMENTS = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.75},
    {"repetition_penalty": 1.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.5, "repetition_penalty": 0.6},
    {"num_prompt": 9, "presence_penalty": 1.0, "repetition_penalty": 2.0},
    {"bias": {3: 5.0, 10: -np.inf, 2_000_000: 1.0, -1: 9.0}},
    {"min_length": 8, "banned": [2, 6, -1]},  # a row's length is below that
    {"min_length": 4, "banned": [2, 6]},  # or not
    {"min_length": 99, "banned": [0, 1], "bias": {5: 2.0}, "repetition_penalty": 1.2, "num_prompt": 3},
]

adjust = jax.jit(sampling.adjust)


@each_form
@pytest.mark.parametrize("V", [1, 2, 15, 513, 2500])
def test_it_draws_what_the_sorting_form_draws(by, V):
    rng = np.random.default_rng(V)
    for spread in (0.1, 3.0, 30.0):
        logits = rng.standard_normal((len(OPTIONS), V)) * spread
        arguments = sampling_arguments(logits, OPTIONS, seed=V)
        assert_same_draws(logits, OPTIONS, draw(by, *arguments), draw("reference", *arguments))


@each_form
@pytest.mark.parametrize("V", [11, 600])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_adjusted_as_in_the_reference(by, V, masked):
    rng = np.random.default_rng(V)
    options = [option | {"temperature": t} for option in ADJUSTMENTS for t in (0.0, 0.8, 3.0) for _ in range(5)]
    tokens = rng.integers(0, 10, (len(options), 12))
    tokens[:, 3] = 2_000_000  # outside the vocabulary, where nothing should be
    lengths = rng.integers(5, 8, len(options))
    mask = rng.integers(-(2**31), 2**31, (len(options), -(-V // 32))) if masked else None
    arguments = sampling_arguments(
        rng.standard_normal((len(options), V)), options, tokens=tokens, lengths=lengths, num_prompt=2, mask=mask
    )
    got = draw(by, *arguments)
    assert_same_draws(adjust(*arguments[:2], *arguments[3:]), options, got, draw("reference", *arguments))
    assert len(set(got.tolist())) > 5
    plain = draw(by, *sampling_arguments(arguments[0], [{"temperature": o["temperature"]} for o in options]))
    assert (plain != got).sum() > 10, "the adjustments decide too few of these draws"


@each_form
def test_min_tokens_gives_way_where_a_grammar_allows_nothing_else(by):
    held = {"temperature": 0.0, "min_length": 10, "banned": [4, 40]}
    logits = np.zeros((3, 50))
    logits[:, [4, 40]] = 3.0, 2.0
    # Only tokens that are held back; one that is not, too; a row without a grammar.
    mask = np.asarray([[1 << 4, 1 << 8], [1 << 7, 1 << 8], [-1, -1]])
    arguments = sampling_arguments(logits, [held] * 3, mask=mask)
    assert draw(by, *arguments).tolist() == draw("reference", *arguments).tolist() == [4, 7, 0]


@each_form
def test_the_random_number_is_jaxs(by):
    rows, V = 500, 4096
    positions = jnp.arange(rows) * 7
    arguments = sampling_arguments(np.zeros((rows, V)), [{}] * rows, seed=5, lengths=positions)
    params = arguments[4]
    seed = jnp.stack([params.int("seed_high"), params.int("seed_low")], axis=1).view(jnp.uint32)
    # All tokens are equally likely, so the token is the number's leading bits.
    np.testing.assert_array_equal(draw(by, *arguments), np.floor(sampling.uniform(seed, positions) * V))


@each_form
@pytest.mark.parametrize("option", OPTIONS[1:-1])
def test_only_what_truncation_keeps_is_drawn(by, option):
    logits = jnp.asarray(np.random.default_rng(3).integers(-4, 4, 600), jnp.float32)  # many ties
    arguments = sampling_arguments(jnp.broadcast_to(logits, (300, 600)), [option] * 300)
    got, expected = draw(by, *arguments), draw("reference", *arguments)
    assert set(np.asarray(logits)[got]) == set(np.asarray(logits)[expected])


@each_form
def test_draws_are_the_same_with_64_bits(by):
    logits = np.random.default_rng(0).standard_normal((len(OPTIONS), 600)) * 3
    plain = draw(by, *sampling_arguments(logits, OPTIONS))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draw(by, *sampling_arguments(logits, OPTIONS)), plain)


@each_form
def test_a_row_does_not_depend_on_its_batch(by):
    rng = np.random.default_rng(1)
    options = OPTIONS + ADJUSTMENTS
    tokens = rng.integers(0, 3000, (len(options), 12))
    logits, _, slots, lengths, params, _ = sampling_arguments(
        rng.standard_normal((len(options), 3000)), options, lengths=[8] * len(options)
    )
    whole = draw(by, logits, tokens, slots, lengths, params)
    for row in range(len(options)):
        one = slice(row, row + 1)
        assert draw(by, logits[one], tokens, slots[one], lengths[one], params)[0] == whole[row]


@pytest.mark.parametrize("by", NATIVE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_and_a_nan_is_answered_with_its_place(by, temperature):
    logits = jnp.full((4, 1100), -jnp.inf).at[:, 1050].set(-3.0)
    logits = logits.at[1, 700].set(jnp.nan).at[2, 20].set(jnp.inf).at[3].set(-jnp.inf)
    for seed in range(5):
        arguments = sampling_arguments(logits, [{"temperature": temperature}] * 4, seed=seed)
        assert draw(by, *arguments).tolist() == [1050, 700, 20, 0]


@each_form
def test_the_greedy_token_is_the_first_of_equals(by):
    logits = jnp.zeros((2, 1600)).at[0, jnp.asarray([900, 30, 1599])].set(2.0).at[1, 1599].set(1.0)
    assert draw(by, *sampling_arguments(logits, [{"temperature": 0.0}] * 2)).tolist() == [30, 1599]


@pytest.mark.parametrize("by", ["reference", "bisect", *NATIVE])
@pytest.mark.parametrize("temperature", [1e-7, 1e-10, 1e-30, 2e-38])
@pytest.mark.parametrize("option", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_small_temperature_gives_the_best_token(by, temperature, option):
    logits = np.random.default_rng(0).standard_normal((4, 1000)) * 5
    for row in logits:  # alone, where XLA fuses what it does not in a batch
        assert draw(by, *sampling_arguments(row[None], [option | {"temperature": temperature}])) == row.argmax()


@pytest.mark.parametrize("by", ["reference", "passes", *NATIVE])
@pytest.mark.parametrize(("V", "num_top"), [(1, 1), (7, 7), (63, 20), (64, 5), (65, 20), (3001, 20)])
def test_logprobs_are_exact_and_of_equals_the_first_is_the_better(by, V, num_top):
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((5, V)).astype(np.float32) * 8
    logits[1] = np.round(logits[1])  # many ties
    logits[2] -= 500 if by in NATIVE else 0
    logits[3, V // 2 + 1 :] = -np.inf
    chosen = rng.integers(0, V, 5)
    chosen[3] = 0
    wanted = jnp.asarray([True, True, True, True, False])
    implementation, level = at_level(by)
    with level, ops.use_implementations(token_logprobs=implementation):
        values, ids, ranks = sampling.token_logprobs(jnp.asarray(logits), jnp.asarray(chosen), wanted, num_top=num_top)
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    best = np.argsort(-exact, axis=-1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(ids[:4], np.concatenate([chosen[:, None], best], -1)[:4])
    np.testing.assert_allclose(
        values[:4], np.take_along_axis(exact, np.asarray(ids), -1)[:4], rtol=1e-6, atol=2e-6 if by in NATIVE else 1e-5
    )
    own = np.take_along_axis(exact, chosen[:, None], -1)
    assert ranks.tolist() == [*(1 + (exact > own).sum(-1))[:4], 0]
    assert not values[4].any()
    assert not ids[4].any()


@pytest.mark.parametrize("by", ["reference", "passes", *NATIVE])
def test_a_token_that_is_ruled_out_ranks_next_to_its_equals_after_the_others(by):
    logits = jnp.asarray([[-jnp.inf, 1, 2, -jnp.inf, 0]])
    implementation, level = at_level(by)
    with level, ops.use_implementations(token_logprobs=implementation):
        values, ids, rank = sampling.token_logprobs(logits, jnp.asarray([3]), jnp.asarray([True]), num_top=2)
    assert (rank.tolist(), ids.tolist(), float(values[0, 0])) == ([4], [[3, 2, 1]], -np.inf)
