"""The GPU's kernel that searches for the sampler's thresholds, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.sampling import assert_same_draws, sampling_arguments
from verax import ops
from verax.ops import sampling
from verax.ops.gpu.sampling_kernel import FIRST_TRIALS, PASSES, PROGRAMS, TRIALS, _pass, chunk_of_program, search

by_kernel = partial(search, interpret=True)


@partial(jax.jit, static_argnames=("form", "weighted"))
def found_by(form, scores, least, wanted, weighted):
    return form(scores, least, wanted, weighted=weighted)


def thresholds(scores, wanted, *, least=-np.inf, weighted=False, form=by_kernel):
    """Threshold of each row."""
    rows = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), scores.shape[:1]) for x in (least, wanted))
    return np.asarray(found_by(form, jnp.asarray(scores, jnp.float32), *rows, weighted))


def shifted(rows):
    """Rows whose largest score is 0."""
    rows = np.asarray(rows, np.float32)
    return rows - rows.max(-1, keepdims=True)


def hard_rows(V):
    """Rows that search differently: of any spread, with ties, all equal, masked, with one token, and close to 0."""
    rng = np.random.default_rng(V)
    smooth = rng.standard_normal((4, V)) * np.asarray([[0.1], [3], [30], [1e30]])
    masked = np.where(rng.random(V) < 0.9, -np.inf, rng.standard_normal(V))
    alone = np.full(V, -np.inf)
    masked[V // 2], alone[-1] = 0.5, -7
    return shifted([*smooth, rng.integers(-3, 0, V), np.zeros(V), masked, alone, -1e-30 * rng.random(V)])


@pytest.mark.parametrize("V", [1, 257, 4099])
def test_ranks_have_the_threshold_of_bisection_to_the_bit(V):
    scores = np.repeat(hard_rows(V), 4, axis=0)
    wanted = np.minimum(np.tile([1, 2, V // 2 + 1, V], len(scores) // 4), V)
    found = thresholds(scores, wanted)
    np.testing.assert_array_equal(found, thresholds(scores, wanted, form=sampling._bisect))
    assert (np.sum(scores >= found[:, None], axis=-1) >= wanted).all()
    assert (np.sum(scores > found[:, None], axis=-1) < wanted).all()


ROUNDING = 1e-5
"""Share of the weight by which sums in another order, and by another exponential, may be off."""


def assert_is_share(scores, found, wanted, least):
    """Fails unless the scores from a threshold on are the fewest whose share of the weight is enough."""
    scores = np.where(scores >= least[:, None], scores, -np.inf).astype(np.float64)
    weights = np.exp(scores)
    needed = wanted * weights.sum(-1)
    for row, threshold in enumerate(found):
        assert weights[row][scores[row] >= threshold].sum() >= needed[row] * (1 - ROUNDING)
        assert weights[row][scores[row] > threshold].sum() < needed[row] * (1 + ROUNDING)


@pytest.mark.parametrize("V", [1, 257, 4099])
def test_shares_are_those_of_the_fewest_scores_that_are_enough(V):
    scores = np.repeat(hard_rows(V), 5, axis=0)
    wanted = np.tile([1e-6, 0.3, 0.9, 0.999, 0.9], len(scores) // 5).astype(np.float32)
    least = np.tile([-np.inf, -np.inf, -np.inf, -np.inf, -1.5], len(scores) // 5).astype(np.float32)
    assert_is_share(scores, thresholds(scores, wanted, least=least, weighted=True), wanted, least)


def test_a_share_between_two_scores_has_the_threshold_to_the_bit():
    """No rounding decides it: half of a score's own weight is missing before it, and half is too much with it."""
    scores = shifted(np.random.default_rng(0).standard_normal((8, 1500)) * 2)
    descending = -np.sort(-scores, axis=-1)
    weights = np.exp(descending.astype(np.float64))
    last = np.asarray([0, 1, 2, 10, 50, 100, 300, 700])
    cumulative = np.take_along_axis(np.cumsum(weights, axis=-1) - weights / 2, last[:, None], axis=-1)[:, 0]
    found = thresholds(scores, cumulative / weights.sum(-1), weighted=True)
    np.testing.assert_array_equal(found, descending[np.arange(8), last])


def test_sums_that_are_exact_are_enough_where_they_are_equal():
    """Weights of 1 and 0, of which half of a chunk, of all chunks, is wanted."""
    scores = np.where(np.arange(4096) % 2, -np.inf, 0.0)[None]
    assert thresholds(scores, 1.0 - 2**-24, weighted=True) == thresholds(scores, 2048) == 0
    assert thresholds(scores, 2049) == -np.inf


@pytest.mark.parametrize(("rows", "V"), [(64, 257), (16, 151936), (1, 262144)])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_a_batch_that_keep_everything_keep_it_beside_those_that_do_not(rows, V, weighted):
    rng = np.random.default_rng(rows)
    scores = shifted(rng.standard_normal((rows, V)) * 3)
    wanted = np.where(np.arange(rows) % 3 == 1, np.inf, 0.9 if weighted else 5).astype(np.float32)
    least = np.where(np.arange(rows) % 4 == 2, -4.0, -np.inf).astype(np.float32)
    found = thresholds(scores, wanted, least=least, weighted=weighted)
    assert (np.isneginf(found) == np.isinf(wanted)).all()
    some = np.isfinite(wanted)
    if weighted:
        assert_is_share(scores[some], found[some], wanted[some], least[some])
    else:
        np.testing.assert_array_equal(found[some], -np.sort(-scores[some], axis=-1)[:, 4])


def test_the_first_trials_leave_what_the_further_passes_can_divide():
    patterns = np.abs(FIRST_TRIALS).view(np.int32)
    assert patterns.size == TRIALS
    assert patterns[-1] == np.float32(np.inf).view(np.int32)
    assert np.diff(np.concatenate([[-1], patterns]).astype(np.int64)).max() <= TRIALS ** (PASSES - 1)


def test_scores_outside_of_the_bracket_are_not_read_again():
    """Neither those of a row that keeps everything, nor chunks in which nothing can be the threshold."""
    chunk = 1024
    scores = jnp.zeros((2, 4 * chunk)).at[:, 1:].set(-100.0).at[:, 3 * chunk].set(-5.0)
    limits = jnp.full(2, -jnp.inf), jnp.asarray([2.0, jnp.inf])
    settings = {"chunk": chunk, "weighted": False, "interpret": True}
    first = jnp.asarray(np.abs(FIRST_TRIALS).view(np.int32))
    bracket, sums = _pass(scores, *limits, first, first=True, **settings)
    assert np.asarray(sums[:, :, -1]).tolist() == [[1024] * 4, [0] * 4]
    _, sums = _pass(scores, *limits, *bracket, sums, first=False, **settings)
    assert np.asarray(sums[:, :, -1]).tolist() == [[0, 0, 0, 1], [0] * 4]


def test_programs_fill_the_device_in_one_turn_where_the_rows_are_fewer():
    for rows, V in ((1, 257), (1, 151936), (16, 151936), (64, 151936), (500, 151936)):
        chunk = chunk_of_program(rows, V)
        assert rows * -(-V // chunk) <= PROGRAMS
        assert chunk < 1024 + V * rows / (PROGRAMS - rows + 1)
    assert chunk_of_program(600, 3000) == 3072


HOW = [
    {},
    {"temperature": 0.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 0.3},
    {"top_k": 99999},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"top_k": 400, "top_p": 0.5, "temperature": 4.0},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.5},
]


@jax.jit
def sampled_by_kernel(*args):
    return sampling.sample_by_search(by_kernel, *args)


@pytest.mark.parametrize("V", [7, 1500])
def test_a_batch_of_any_truncation_has_the_tokens_of_the_sorting_form(V):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((len(HOW), V)) * rng.choice([0.1, 3.0, 30.0])
        arguments = sampling_arguments(logits, HOW, seed=seed)
        assert_same_draws(logits, HOW, np.asarray(sampled_by_kernel(*arguments)), sampling.sample.reference(*arguments))


@pytest.mark.parametrize(("u", "end"), [(0.0, 0), (1 - 2**-24, -1)])
def test_the_least_and_the_largest_number_draw_the_first_and_the_last_token_that_is_kept(u, end, monkeypatch):
    """Scores of which half are minus infinity: draws go to those that a grammar allows."""
    rng = np.random.default_rng(5)
    how = [{"top_k": 7}, {"top_k": 1}, {"top_k": 9, "min_p": 0.2}, {"top_p": 1e-6}, {}]
    logits = np.where(rng.random((len(how), 96)) < 0.5, -np.inf, rng.standard_normal((len(how), 96)))
    mask = rng.integers(-(2**31), 2**31, (len(how), 3)).astype(np.int32)
    allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little").astype(bool)
    monkeypatch.setattr(sampling, "_uniform", lambda params, lengths: jnp.full(lengths.shape, u, jnp.float32))
    arguments = sampling_arguments(logits, how, mask=mask)
    drawn = jax.jit(lambda *args: sampling.sample_by_search(by_kernel, *args))(*arguments)
    for row, options in enumerate(how):
        possible = np.flatnonzero(allowed[row] & np.isfinite(logits[row]))
        order = possible[np.argsort(-logits[row, possible])]
        near = logits[row, order] >= logits[row, order[0]] + np.log(options.get("min_p", 0) or 1e-30)
        num_kept = 1 if "top_p" in options else options.get("top_k") or len(order)
        assert drawn[row] == np.sort(order[near][:num_kept])[end]


def chosen(vocab=1500, dtype="float32", rows=4):
    """Implementation that takes a call."""
    arguments = jax.eval_shape(lambda: sampling_arguments(jnp.zeros((rows, vocab)), [{}] * rows))
    return sampling.sample.select(jax.ShapeDtypeStruct((rows, vocab), dtype), *arguments[1:]).name


def test_it_runs_where_it_is_named_and_takes_the_call():
    with ops.use_target("gpu", "NVIDIA H100 80GB HBM3"):
        assert chosen() == "bisect"
        with ops.use_implementations(sample="triton"):
            assert chosen() == chosen(151936, rows=256) == "triton"
            assert chosen(dtype="bfloat16") == chosen((1 << 24) + 1) == chosen(1 << 23, rows=256) == "bisect"
    with ops.use_implementations(sample="triton"):
        assert chosen() != "triton"
        with ops.use_target("gpu", "Tesla T4"):
            assert chosen() == "bisect"
