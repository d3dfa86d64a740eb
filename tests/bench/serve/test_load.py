"""The load generator: what a seed decides, when loops end, latencies of known numbers, failures, servers it starts."""

import asyncio
import itertools
import sys
from itertools import islice

import numpy as np
import psutil
import pytest

from tests.bench.serve.conftest import FakeServer, answer, answer_of
from verax.bench.serve import load as module
from verax.bench.serve.load import (
    Answer,
    Client,
    Load,
    Request,
    Run,
    arrival_times,
    draw_requests,
    latencies,
    make_loads,
    run_load,
    started,
    summarise,
)
from verax.bench.settings import ServeSettings, TrafficSettings
from verax.errors import InvalidParameterError, VeraxError


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


PROMPT, PYTHON = (5, 6, 7), (sys.executable, "-m")


def ask_fake(server, *requests):
    async def main():
        async with server.serving() as client:
            return [await client.complete(request) for request in requests]

    return asyncio.run(main())


@pytest.mark.parametrize("cut_at", [0, 1, 7, 64])
def test_an_answer_is_whole_however_it_is_cut(cut_at):
    server = FakeServer(cut_at=cut_at)
    (answer,) = ask_fake(server, Request(0, PROMPT, 5))
    assert answer.completed
    assert answer.text == "".join(answer_of(list(PROMPT), 5))
    assert (answer.completion_tokens, len(answer.events)) == (5, 5)
    assert answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended
    assert answer.events == sorted(answer.events)
    # A greedy stream of a fixed length.
    options = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    assert server.bodies == [{"prompt": [5, 6, 7], "max_tokens": 5, "model": "fake", **options, **usage}]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "authorization" not in server.heads[0].lower()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("429", "http 429"),
        ("cut", "lost: no end of the stream"),
        ("short", "lost: 4 tokens instead of 5"),
        ("error", "in the stream: server_error"),
        ("other id", "mixed: an event has another id"),
        ("garbage", "protocol: JSONDecodeError"),
    ],
)
def test_a_failure_has_its_kind_and_the_next_request_is_not_affected(fault, error):
    failed, whole = ask_fake(FakeServer(faults={0: fault}), Request(0, PROMPT, 5), Request(1, PROMPT, 5))
    assert (failed.error, failed.completed, whole.completed) == (error, False, True)


def test_a_server_that_is_not_there_or_speaks_something_else_is_a_failure_too():
    async def main():
        async def nonsense(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        wrong = await client.complete(Request(0, PROMPT, 5))
        server.close()
        await server.wait_closed()
        absent = await client.complete(Request(1, PROMPT, 5))
        await client.close()
        return wrong, absent

    wrong, absent = asyncio.run(main())
    assert not wrong.completed
    assert absent.error == "connection: ConnectError"


@pytest.mark.parametrize("leave_after", [0, 1, 3])
def test_a_client_that_leaves_has_read_that_number_of_events(leave_after):
    (answer,) = ask_fake(FakeServer(pause=0.005), Request(0, PROMPT, 200, leave_after=leave_after))
    assert (answer.left, answer.error, answer.completed, len(answer.events)) == (True, None, False, leave_after)


@pytest.mark.parametrize("wrong", ["ftp://example.org", "localhost:8000", "http://"])
def test_a_url_without_http_or_a_host_is_refused(wrong):
    with pytest.raises(InvalidParameterError, match=r"^url: expected one such as http://127"):
        Client(wrong)


def test_a_page_is_fetched_with_the_key_or_its_status_is_an_error():
    server = FakeServer(cut_at=3)

    async def main():
        async with server.serving() as target:
            client = Client(target.url, api_key="secret")
            await client.find_model()
            page = await client.fetch("/metrics")
            with pytest.raises(VeraxError, match=r"/nothing: status 404"):
                await client.fetch("/nothing")
        with pytest.raises(VeraxError, match=r"/metrics: "):
            await client.fetch("/metrics")
        await client.close()
        return client.model, page

    model, page = asyncio.run(main())
    assert (model, "num_requests_running" in page) == ("fake", True)
    assert "authorization: bearer secret\r\n" in server.heads[0].lower()


def test_a_server_is_ready_in_the_block_and_gone_after_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "health").write_text("ready")

    async def main():
        async with started(lambda port: [*PYTHON, "http.server", str(port), "--bind", "127.0.0.1"]) as server:
            client = Client(server.url)
            text = await client.fetch("/health")
            await client.close()
            measured = server.measured()
        with pytest.raises(VeraxError):
            await Client(server.url).fetch("/health")
        return text, measured

    text, measured = asyncio.run(main())
    assert text == "ready"
    assert 0 < measured["start_s"] < 60
    assert measured["peak_bytes"] is None or 1e6 < measured["peak_bytes"] < 1e9


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('no such model'); sys.exit(3)", "ended with status 3: no such model"),
        (DEAF, "not ready after 0 s: deaf"),  # it is stopped even if it ignores the signal
    ],
)
def test_a_server_that_ends_or_is_never_ready_is_an_error_with_its_last_words(monkeypatch, code, message):
    monkeypatch.setattr(module, "START", 0.5 if code is DEAF else 60.0)
    monkeypatch.setattr(module, "STOP", 0.2)

    async def main():
        async with started(lambda port: [sys.executable, "-c", code]):
            pytest.fail("it cannot be ready")

    with pytest.raises(VeraxError, match=message):
        asyncio.run(main())
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
