"""Requests and arrivals: what a seed decides, and what the shares and lengths mean."""

from itertools import islice

import numpy as np
import pytest

from verax.bench.serve.traffic import Traffic, arrival_times
from verax.errors import InvalidParameterError


def first(traffic, count, run=0):
    return list(islice(traffic.requests(run), count))


def test_a_seed_and_a_run_decide_on_all_requests():
    traffic = Traffic(1000, range_ratio=0.5, disconnect=0.3, slow_readers=0.3)
    assert first(traffic, 20) == first(traffic, 20)
    assert first(traffic, 20) != first(traffic, 20, run=1)
    assert first(traffic, 20) != first(Traffic(1000, range_ratio=0.5, disconnect=0.3, slow_readers=0.3, seed=1), 20)


def test_prompts_are_distinct_tokens_of_the_vocabulary():
    prompts = [request.prompt for request in first(Traffic(300, input_tokens=16), 200)]
    assert len(set(prompts)) == 200
    assert {len(prompt) for prompt in prompts} == {16}
    assert min(map(min, prompts)) >= 3
    assert max(map(max, prompts)) < 300


def test_lengths_spread_around_their_mean():
    traffic = Traffic(100, input_tokens=40, output_tokens=20, range_ratio=0.5)
    requests = first(traffic, 400)
    lengths = [len(request.prompt) for request in requests]
    assert (min(lengths), max(lengths)) == (20, 60)
    assert (min(r.max_tokens for r in requests), max(r.max_tokens for r in requests)) == (10, 30)
    assert traffic.longest == 60 + 30


def test_prompts_share_their_prefixes_in_all_runs():
    traffic = Traffic(1000, input_tokens=4, prefix_tokens=8, num_prefixes=3)
    prefixes = {request.prompt[:8] for run in (0, 1) for request in first(traffic, 60, run)}
    assert len(prefixes) == 3
    assert traffic.longest == 8 + 4 + 64


def test_shares_are_those_asked_for_and_nobody_leaves_behind_the_end():
    requests = first(Traffic(1000, slow_readers=0.1, disconnect=0.2, output_tokens=32), 2000)
    assert np.mean([request.slow for request in requests]) == pytest.approx(0.1, abs=0.03)
    leave = [request.leave_after for request in requests if request.leave_after is not None]
    assert len(leave) / 2000 == pytest.approx(0.2, abs=0.04)
    assert set(leave) == set(range(8))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_a_gamma_process_of_the_rate(burstiness):
    times = list(islice(arrival_times(8.0, burstiness=burstiness, seed=3), 20000))
    assert times == list(islice(arrival_times(8.0, burstiness=burstiness, seed=3), 20000))
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_tokens", 0),
        ("output_tokens", -1),
        ("num_prefixes", 0),
        ("prefix_tokens", -1),
        ("range_ratio", 1.0),
        ("slow_readers", 1.1),
        ("disconnect", -0.1),
        ("vocab_size", 3),
    ],
)
def test_nonsense_is_an_error_that_names_the_field(field, value):
    with pytest.raises(InvalidParameterError, match=f"^{field}: expected"):
        Traffic(**{"vocab_size": 100, field: value})


def test_rates_and_burstiness_are_positive():
    with pytest.raises(InvalidParameterError, match=r"^request_rate: expected more than 0, got 0"):
        arrival_times(0.0)
    with pytest.raises(InvalidParameterError, match=r"^burstiness: expected more than 0, got nan"):
        arrival_times(1.0, burstiness=float("nan"))
