"""Load: what a seed decides, how many requests are in flight, when a loop ends, and latencies of known numbers."""

import asyncio
import itertools
from itertools import islice

import numpy as np
import pytest

from tests.bench.serve.conftest import answer
from verax.bench.serve.load import (
    Answer,
    Load,
    Run,
    arrival_times,
    draw_requests,
    latencies,
    make_loads,
    run_load,
    summarise,
)
from verax.bench.settings import ServeSettings, TrafficSettings


class Recorder:
    """Answers after some turns of the event loop, and keeps the numbers of requests in flight."""

    def __init__(self):
        self.in_flight, self.largest, self.order = 0, 0, []

    async def ask(self, request):
        self.order.append(request.number)
        self.in_flight += 1
        self.largest = max(self.largest, self.in_flight)
        for _ in range(1 + request.number % 3):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return Answer(request, 0.0, ended=1.0)


def run(load, recorder=None, number=0):
    requests = draw_requests(TrafficSettings(vocab_size=100), number)
    return asyncio.run(run_load((recorder or Recorder()).ask, load, requests, number=number))


@pytest.mark.parametrize(("concurrency", "count"), [(1, 5), (4, 20), (8, 3)])
def test_a_closed_loop_keeps_that_number_in_flight(concurrency, count):
    recorder = Recorder()
    done = run(Load("a", concurrency=concurrency, num_requests=count), recorder)
    assert [answer.request.number for answer in done.answers] == recorder.order == list(range(count))
    assert recorder.largest == min(concurrency, count)


def test_an_open_loop_sends_at_the_times_of_its_run_however_slow_the_answers():
    recorder = Recorder()
    arrivals = {3: itertools.repeat(0.0)}.__getitem__
    assert len(run(Load("a", arrivals=arrivals, num_requests=12), recorder, number=3).answers) == 12
    assert recorder.largest > 1


def test_a_duration_ends_a_loop_and_answers_in_flight_are_waited_for():
    assert len(run(Load("a", concurrency=3, duration=1e-9)).answers) == 3
    assert len(run(Load("a", arrivals=lambda number: iter([0.0, 0.001, 5.0]), duration=0.01)).answers) == 2


@pytest.mark.parametrize(
    ("settings", "loads"),
    [
        (dict(concurrency="1,64"), [("1 stream", 1, 16, None), ("64 streams", 64, 128, None)]),
        (dict(request_rate="2.5", duration=3.0), [("2.5 requests per second", None, None, 3)]),
    ],
)
def test_settings_become_a_load_for_each_number_of_streams_or_rate(settings, loads):
    given = make_loads(ServeSettings(**settings))
    assert [(load.name, load.concurrency, load.num_requests, load.duration) for load in given] == loads


def first(count, run=0, **traffic):
    return list(islice(draw_requests(TrafficSettings(**{"vocab_size": 1000, **traffic}), run), count))


def test_a_run_decides_on_all_requests():
    clients = dict(disconnect=0.3, slow_readers=0.3)
    assert first(20, **clients) == first(20, **clients) != first(20, run=1, **clients)


def test_prompts_are_distinct_tokens_of_the_vocabulary_after_the_same_prefixes_in_all_runs():
    prompts = [request.prompt for request in first(200, vocab_size=300, input_tokens=16)]
    assert (len(set(prompts)), {len(prompt) for prompt in prompts}) == (200, {16})
    assert 3 <= min(map(min, prompts)) < max(map(max, prompts)) < 300
    traffic = dict(input_tokens=4, prefix_tokens=8, num_prefixes=3)
    assert len({request.prompt[:8] for run in (0, 1) for request in first(60, run, **traffic)}) == 3
    assert TrafficSettings(**traffic).longest == 8 + 4 + 64


def test_shares_are_as_asked_for_and_nobody_leaves_after_the_end():
    requests = first(2000, slow_readers=0.1, disconnect=0.2, output_tokens=32)
    assert np.mean([request.slow for request in requests]) == pytest.approx(0.1, abs=0.03)
    leave = [request.leave_after for request in requests if request.leave_after is not None]
    assert len(leave) / 2000 == pytest.approx(0.2, abs=0.04)
    assert set(leave) == set(range(8))


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = list(islice(arrival_times(8.0, seed=3), 20000))
    assert times == list(islice(arrival_times(8.0, seed=3), 20000))
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, rel=0.05)


def test_latencies_are_counted_from_the_request_in_milliseconds():
    times = latencies(answer(0, 0.25, 0.125, 3))
    assert times == {"ttft": 250.0, "tpot": 125.0, "itl": [125.0, 125.0], "e2el": 1000.0}
    times = latencies(answer(0, 0.25, 0.5, 3, completion_tokens=6))  # an event has several tokens
    assert (times["itl"], times["tpot"]) == (pytest.approx([500, 500]), pytest.approx(1000 / 5))
    assert "tpot" not in latencies(answer(0, 0.25, 0.5, 1))


def test_percentiles_rates_and_kinds_of_failure():
    answers = [answer(number, number / 1000, 0.01, 5) for number in range(101)]
    answers += [answer(200, 9, 9, 5, error="http 429"), answer(201, 9, 9, 5, error="http 429")]
    answers += [answer(202, 9, 9, 5, error="timeout"), answer(203, 9, 9, 5, left=True)]
    report = summarise([Run(tuple(answers[:50]), 2.0), Run(tuple(answers[50:]), 3.0)])
    assert (report["requests"], report["completed"], report["disconnected"]) == (105, 101, 1)
    assert report["errors"] == {"http 429": 2, "timeout": 1}
    assert report["requests_per_s"] == pytest.approx(101 / 5)
    assert report["output_tokens_per_s"] == pytest.approx(101 * 5 / 5)
    assert report["output_tokens"] == 5 * 101
    assert report["latency_ms"]["ttft"] == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert report["latency_ms"]["tpot"] == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p99"), 10))


def test_slow_readers_count_in_rates_and_not_in_latencies_and_nothing_completed_is_a_report_too():
    report = summarise([Run((answer(0, 0.1, 0.1, 2), answer(1, 5.0, 5.0, 2, slow=True)), 1.0)])
    assert (report["completed"], report["latency_ms"]["ttft"]["p99"]) == (2, pytest.approx(100))
    report = summarise([Run((answer(0, 1, 1, 2, error="timeout"),), 1.0)])
    assert report["latency_ms"] == dict.fromkeys(("ttft", "tpot", "itl", "e2el"))
