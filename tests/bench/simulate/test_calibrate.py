"""Calibration: overheads are found again in made-up measurements, at loads that are none of those to predict."""

import numpy as np
import pytest

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Load, Run
from verax.bench.serve.traffic import Request, Traffic
from verax.bench.simulate.calibrate import calibration_loads, fit_overheads, request_times
from verax.bench.simulate.fleet import simulate
from verax.bench.simulate.overheads import Overheads
from verax.errors import VeraxError

TRAFFIC = Traffic(96, input_tokens=8, output_tokens=16)


def closed(streams, requests=None):
    return Load(f"{streams} streams", concurrency=streams, num_requests=requests or 4 * streams)


@pytest.fixture
def simulated(make_engines):
    """Times of requests at some loads, simulated with some overheads."""

    def times(overheads, *loads):
        engines = make_engines(overheads=overheads)
        return [request_times(simulate(engines.new(1), load, TRAFFIC.requests(0))[0], load) for load in loads]

    return times


@pytest.mark.parametrize(
    "overheads",
    [
        Overheads(0.2, 0.06, 0.5, contention=0.5),
        Overheads(0.0, 0.1, 0.0, contention=0.5),
        Overheads(0.3, 0.0, 2.0, contention=0.0),
        Overheads(contention=0.5),
    ],
)
def test_overheads_are_found_in_what_they_lead_to(simulated, overheads):
    loads = closed(1), closed(6)
    found = fit_overheads(
        simulated(overheads, *loads),
        lambda each: simulated(each, *loads),
        step=1.0,
        contention=overheads.contention,
    )
    assert found.contention == overheads.contention
    # Overheads found at one stream and six predict three and eight, of which the fit has seen nothing.
    for load in (closed(3), closed(8)):
        predicted, true = simulated(found, load)[0], simulated(overheads, load)[0]
        np.testing.assert_allclose(predicted, true, rtol=0.05)


def test_overheads_are_not_negative_where_a_server_is_faster_than_its_steps(simulated):
    loads = closed(1), closed(6)
    faster = [0.8 * times for times in simulated(Overheads(), *loads)]
    found = fit_overheads(faster, lambda each: simulated(each, *loads), step=1.0, contention=0.5)
    assert (found.per_step, found.per_token, found.per_request) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("loads", "max_num_seqs", "expected"),
    [
        ([closed(4), closed(8), closed(32)], 32, [1, 16]),
        ([closed(4), closed(8)], 8, [1, 7]),
        ([closed(1), closed(16)], 64, [2, 15]),
        ([closed(1)], 1, [2, 3]),
        ([Load("5 requests per second", arrivals=lambda run: iter([1.0]), num_requests=1)], 64, [1, 16]),
    ],
)
def test_no_load_is_calibrated_that_is_to_be_predicted(loads, max_num_seqs, expected):
    assert [load.concurrency for load in calibration_loads(loads, max_num_seqs)] == expected


def answer(number, sent, events, error=None):
    return Answer(Request(number, (5,), len(events)), sent, events[-1] if events else sent, list(events), error=error)


def test_the_times_of_a_request_are_means_of_the_complete_ones():
    run = Run((answer(0, 1.0, [2.0, 3.0, 5.0]), answer(1, 1.0, [4.0, 6.0]), answer(2, 0.0, [9.0], "timeout")), 6.0)
    assert request_times(run, closed(2)).tolist() == [2.0, 2.5, 6.0]


def test_a_server_that_completes_nothing_is_one_error():
    with pytest.raises(VeraxError, match="completed no request of the simulation's 2 streams"):
        request_times(Run((answer(0, 0.0, [], "http 500"),), 1.0), closed(2))
