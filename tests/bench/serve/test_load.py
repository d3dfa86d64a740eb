"""Closed and open loops: how many requests are in flight, which are sent, and when a loop ends."""

import asyncio
import itertools

import pytest

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Load, run_load
from verax.bench.serve.traffic import Traffic
from verax.errors import InvalidParameterError


class Recorder:
    """Answers after some turns of the event loop, and keeps the numbers of requests in flight."""

    def __init__(self):
        self.in_flight, self.most, self.order = 0, 0, []

    async def ask(self, request):
        self.order.append(request.number)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(1 + request.number % 3):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return Answer(request, 0.0, ended=1.0)


def run(load, recorder=None, number=0):
    return asyncio.run(run_load((recorder or Recorder()).ask, load, Traffic(100).requests(number), number=number))


@pytest.mark.parametrize(("concurrency", "count"), [(1, 5), (4, 20), (8, 3)])
def test_a_closed_loop_keeps_so_many_in_flight(concurrency, count):
    recorder = Recorder()
    done = run(Load("a", concurrency=concurrency, num_requests=count), recorder)
    assert [answer.request.number for answer in done.answers] == list(range(count))
    assert recorder.order == list(range(count))
    assert recorder.most == min(concurrency, count)


def test_an_open_loop_sends_at_the_times_of_its_run_however_slow_the_answers():
    asked = []

    def arrivals(number):
        asked.append(number)
        return itertools.repeat(0.0)

    recorder = Recorder()
    done = run(Load("a", arrivals=arrivals, num_requests=12), recorder, number=3)
    assert asked == [3]
    assert len(done.answers) == 12
    assert recorder.most > 1


def test_each_answer_is_told():
    told = []
    for load in (
        Load("a", concurrency=2, num_requests=5),
        Load("a", arrivals=lambda number: itertools.repeat(0.0), num_requests=3),
    ):
        asyncio.run(run_load(Recorder().ask, load, Traffic(100).requests(), on_answer=lambda: told.append(1)))
    assert len(told) == 5 + 3


def test_a_duration_ends_a_loop_and_answers_in_flight_are_waited_for():
    closed = run(Load("a", concurrency=3, duration=1e-9))
    assert len(closed.answers) == 3
    opened = run(Load("a", arrivals=lambda number: iter([0.0, 0.001, 5.0]), duration=0.01))
    assert len(opened.answers) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 1},
        {"concurrency": 1, "arrivals": itertools.repeat, "num_requests": 1},
        {"concurrency": 0, "num_requests": 1},
        {"concurrency": 1},
        {"concurrency": 1, "duration": 0.0},
        {"concurrency": 1, "duration": float("nan")},
    ],
)
def test_a_load_without_a_loop_or_an_end_is_refused(wrong):
    with pytest.raises(InvalidParameterError, match=r"^(concurrency|num_requests|duration): expected"):
        Load("a", **wrong)
