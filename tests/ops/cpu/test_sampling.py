"""The native sampler at every level: it draws what the sorting implementation draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cpu import for_each_level, needs_library
from tests.support.sampling import sampling_arguments
from verax import ops
from verax.ops import sampling
from verax.ops.cpu import library

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
ADJUSTMENTS = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.75},
    {"repetition_penalty": 1.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.5, "repetition_penalty": 0.6},
    {"num_prompt": 9, "presence_penalty": 1.0, "repetition_penalty": 2.0},
    {"bias": {3: 5.0, 10: -np.inf, 2_000_000: 1.0}},
    {"min_length": 8, "banned": [2, 6]},  # a row's length is below that
    {"min_length": 4, "banned": [2, 6]},  # or not
    {"min_length": 99, "banned": [0, 1], "bias": {5: 2.0}, "repetition_penalty": 1.2, "num_prompt": 3},
]


def drawing(implementation):
    @jax.jit
    def run(*args):
        with ops.use_implementations(sample=implementation):
            return sampling.sample(*args)

    return lambda *args: np.asarray(run(*args))


native, reference = drawing("native"), drawing("reference")
adjust = jax.jit(sampling.adjust)


def assert_same_draws(got, expected, scores, temperatures):
    """A draw that falls on a boundary may go to the neighbour: then the weights up to them differ by rounding."""
    for row in np.flatnonzero(got != expected):
        exact = np.asarray(scores[row], np.float64) / (temperatures[row] or 1)
        weights = np.exp(exact - exact.max())
        between = slice(min(got[row], expected[row]) + 1, max(got[row], expected[row]))
        assert weights[between].sum() < 1e-4 * weights.sum()


@for_each_level
@pytest.mark.parametrize("V", [1, 2, 15, 513, 2500])
def test_it_draws_what_the_sorting_form_draws(level, V):
    rng = np.random.default_rng(V)
    with library.use_level(level):
        for spread in (0.1, 3.0, 30.0):
            logits = rng.standard_normal((len(OPTIONS), V)) * spread
            arguments = sampling_arguments(logits, OPTIONS, seed=V)
            temperatures = [option.get("temperature", 1.0) for option in OPTIONS]
            assert_same_draws(native(*arguments), reference(*arguments), logits, temperatures)


@for_each_level
@pytest.mark.parametrize("V", [11, 600])
@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_adjusted_as_in_the_reference(level, V, masked):
    rng = np.random.default_rng(V)
    options = [option | {"temperature": t} for option in ADJUSTMENTS for t in (0.0, 0.8, 3.0) for _ in range(5)]
    tokens = rng.integers(0, 10, (len(options), 12))
    tokens[:, 3] = 2_000_000  # beside the vocabulary, as nothing should be
    lengths = rng.integers(5, 8, len(options))
    mask = rng.integers(-(2**31), 2**31, (len(options), -(-V // 32))) if masked else None
    arguments = sampling_arguments(
        rng.standard_normal((len(options), V)), options, tokens=tokens, lengths=lengths, num_prompt=2, mask=mask
    )
    adjusted = adjust(*arguments[:2], *arguments[3:])
    with library.use_level(level):
        got, expected = native(*arguments), reference(*arguments)
    assert_same_draws(got, expected, adjusted, [option["temperature"] for option in options])
    assert len(set(got.tolist())) > 5
    plain = native(*sampling_arguments(arguments[0], [{"temperature": o["temperature"]} for o in options]))
    assert (plain != got).sum() > 10, "the adjustments decide too few of these draws"


@for_each_level
def test_min_tokens_gives_way_where_a_grammar_allows_nothing_else(level):
    held = {"temperature": 0.0, "min_length": 10, "banned": [4, 40]}
    logits = np.zeros((3, 50))
    logits[:, [4, 40]] = 3.0, 2.0
    # Only tokens that are held back; one that is not, too; a row without a grammar.
    mask = np.asarray([[1 << 4, 1 << 8], [1 << 7, 1 << 8], [-1, -1]])
    arguments = sampling_arguments(logits, [held] * 3, mask=mask)
    with library.use_level(level):
        assert native(*arguments).tolist() == reference(*arguments).tolist() == [4, 7, 0]


@for_each_level
def test_the_random_number_is_that_of_jax(level):
    rows, V = 500, 4096
    positions = jnp.arange(rows) * 7
    arguments = sampling_arguments(np.zeros((rows, V)), [{}] * rows, seed=5, lengths=positions)
    params = arguments[4]
    seed = jnp.stack([params.int("seed_high"), params.int("seed_low")], axis=1).view(jnp.uint32)
    with library.use_level(level):  # all tokens are equally likely, so the token is the number's leading bits
        np.testing.assert_array_equal(native(*arguments), np.floor(sampling.uniform(seed, positions) * V))


@for_each_level
@pytest.mark.parametrize("how", OPTIONS[1:-1])
def test_only_what_truncation_keeps_is_drawn(level, how):
    logits = jnp.asarray(np.random.default_rng(3).integers(-4, 4, 600), jnp.float32)  # many ties
    arguments = sampling_arguments(jnp.broadcast_to(logits, (300, 600)), [how] * 300)
    with library.use_level(level):
        got = native(*arguments)
    assert set(np.asarray(logits)[got]) == set(np.asarray(logits)[reference(*arguments)])


@for_each_level
def test_a_row_does_not_depend_on_its_batch(level):
    rng = np.random.default_rng(1)
    options = OPTIONS + ADJUSTMENTS
    tokens = rng.integers(0, 3000, (len(options), 12))
    logits, _, slots, lengths, params, _ = sampling_arguments(
        rng.standard_normal((len(options), 3000)), options, lengths=[8] * len(options)
    )
    with library.use_level(level):
        whole = native(logits, tokens, slots, lengths, params)
        for row in range(len(options)):
            one = slice(row, row + 1)
            assert native(logits[one], tokens, slots[one], lengths[one], params)[0] == whole[row]


@for_each_level
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_and_a_nan_is_answered_with_its_place(level, temperature):
    logits = jnp.full((4, 1100), -jnp.inf).at[:, 1050].set(-3.0)
    logits = logits.at[1, 700].set(jnp.nan).at[2, 20].set(jnp.inf).at[3].set(-jnp.inf)
    with library.use_level(level):
        for seed in range(5):
            arguments = sampling_arguments(logits, [{"temperature": temperature}] * 4, seed=seed)
            assert native(*arguments).tolist() == [1050, 700, 20, 0]


@for_each_level
def test_the_greedy_token_is_the_first_of_equals(level):
    logits = jnp.zeros((2, 1600)).at[0, jnp.asarray([900, 30, 1599])].set(2.0).at[1, 1599].set(1.0)
    with library.use_level(level):
        assert native(*sampling_arguments(logits, [{"temperature": 0.0}] * 2)).tolist() == [30, 1599]


@for_each_level
@pytest.mark.parametrize(("V", "num_top"), [(1, 1), (7, 7), (63, 20), (64, 5), (65, 20), (3001, 20)])
def test_logprobs_are_exact_and_of_equals_the_first_is_the_better(level, V, num_top):
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((5, V)).astype(np.float32) * 8
    logits[1] = np.round(logits[1])  # many ties
    logits[2] -= 500
    logits[3, V // 2 + 1 :] = -np.inf
    chosen = rng.integers(0, V, 5)
    chosen[3] = 0
    wanted = jnp.asarray([True, True, True, True, False])
    with library.use_level(level), ops.use_implementations(token_logprobs="native"):
        values, ids, ranks = sampling.token_logprobs(jnp.asarray(logits), jnp.asarray(chosen), wanted, num_top=num_top)
    exact = logits.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    best = np.argsort(-exact, axis=-1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(ids[:4], np.concatenate([chosen[:, None], best], -1)[:4])
    np.testing.assert_allclose(values[:4], np.take_along_axis(exact, np.asarray(ids), -1)[:4], rtol=1e-6, atol=2e-6)
    own = np.take_along_axis(exact, chosen[:, None], -1)
    assert ranks.tolist() == [*(1 + (exact > own).sum(-1))[:4], 0]
    assert not values[4].any()
    assert not ids[4].any()
