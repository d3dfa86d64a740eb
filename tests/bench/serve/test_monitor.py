"""The monitor: memory, and requests that go on although nobody waits for them."""

import asyncio

import psutil
import pytest

from tests.bench.serve.test_abandoned import log_line
from tests.support.fake_server import FakeServer
from verax.bench.serve import monitor as module
from verax.bench.serve.http import Target
from verax.bench.serve.monitor import Monitor
from verax.bench.serve.process import StartedServer
from verax.bench.serve.traffic import Request


def watch_some_leave(server, started=None):
    async def main():
        async with server.serving() as target:
            monitor = Monitor(target, started)
            await monitor.look()
            await asyncio.gather(*(monitor.ask(Request(number, (5,), 40, leave_after=2)) for number in range(4)))
            await monitor.ask(Request(9, (5,), 3))
            await monitor.drained()
            return monitor.report()

    return asyncio.run(main())


def test_a_server_that_aborts_has_no_orphans_and_ends_empty():
    server = FakeServer(pause=0.001)
    report = watch_some_leave(server)
    assert server.aborted == 4
    assert report["most_orphans"] == 0
    assert report["drain_s"] >= 0


def test_a_server_that_goes_on_for_nobody_is_found(monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.0)
    monkeypatch.setattr(module, "DRAIN", 0.2)
    report = watch_some_leave(FakeServer(pause=0.001, forgets=True))
    assert report["most_orphans"] == 4
    assert report["drain_s"] is None


def test_clients_that_wait_and_those_that_just_left_are_no_orphans():
    server = FakeServer(pause=0.001, forgets=True)

    async def main():
        async with server.serving() as target:
            monitor = Monitor(target)
            await monitor.ask(Request(0, (5,), 400, leave_after=2))
            waiting = asyncio.create_task(monitor.ask(Request(1, (5,), 2000)))
            while server.running < 2:
                await asyncio.sleep(0.001)
            inside = await monitor.look()
            waiting.cancel()
            while server.aborted < 2:
                await asyncio.sleep(0.001)
            return inside, monitor.report()["most_orphans"]

    assert asyncio.run(main()) == (2, 0)


def own_server(tmp_path, log=""):
    path = tmp_path / "log"
    path.write_text(log)
    return StartedServer(Target("127.0.0.1", 1), psutil.Process(), path)


def test_memory_is_that_of_the_process_or_of_the_metrics(tmp_path):
    memory = watch_some_leave(FakeServer())["memory"]
    assert [memory[key] for key in ("start_gb", "warm_gb", "end_gb", "peak_gb")] == [2.5] * 4
    own = watch_some_leave(FakeServer(), own_server(tmp_path))["memory"]
    assert 0 < own["start_gb"] <= own["peak_gb"] < 2.5


def test_memory_over_time_has_the_first_value_the_last_one_and_at_most_so_many(monkeypatch):
    monitor = Monitor(Target("127.0.0.1", 1))
    monitor._memory = [(100.0 + number, 10**9 + number * 10**7) for number in range(250)]
    memory = monitor.report()["memory"]
    assert memory["over_time"][0] == [0.0, 1.0]
    assert memory["over_time"][-1] == [249.0, 3.49]
    assert 40 < len(memory["over_time"]) <= module.POINTS
    assert memory["warm_gb"] == pytest.approx(1.63)  # at 63 s, the first look behind a quarter of 249 s


def test_each_abandoned_request_has_its_end_in_the_servers_log_or_is_late(tmp_path):
    started = own_server(tmp_path)

    async def main():
        async with FakeServer(pause=0.001).serving() as target:
            monitor = Monitor(target, started)
            await asyncio.gather(*(monitor.ask(Request(number, (5,), 40, leave_after=2)) for number in range(3)))
            soon, slow, _ = monitor._left.items()
            lines = [(soon[0], soon[1] + 0.25), (slow[0], slow[1] + 1.5), ("somebody-else", soon[1])]
            started.log.write_text("".join(log_line(name, when, 9.0) for name, when in lines))
            return monitor.report()["abandoned"]

    found = asyncio.run(main())
    assert (found["clients"], found["logged"], found["late"]) == (3, 2, 2)
    assert found["most_s"] == pytest.approx(1.5, abs=0.01)


def test_aborts_and_abandoned_requests_that_ran_on_are_counted_from_the_metrics(monkeypatch):
    pages = iter([(2, 5, 7), (2 + 3, 5 + 1, 7 + 4)])

    def metrics(self):
        abort, stop, length = next(pages)
        counter = 'vllm:request_success_total{engine="0",finished_reason="%s"} %d\n'
        return "".join(counter % pair for pair in (("abort", abort), ("stop", stop), ("length", length)))

    async def main():
        async with FakeServer(pause=0.001).serving() as target:
            monitor = Monitor(target)
            monkeypatch.setattr(FakeServer, "_metrics", metrics)
            await monitor.look()
            monkeypatch.setattr(FakeServer, "_metrics", lambda self: "")
            await asyncio.gather(*(monitor.ask(Request(number, (5,), 40, leave_after=2)) for number in range(4)))
            await asyncio.gather(*(monitor.ask(Request(number, (5,), 2)) for number in range(4)))
            monkeypatch.setattr(FakeServer, "_metrics", metrics)
            await monitor.look()
            return monitor.report()["abandoned"]

    assert asyncio.run(main()) == {"engine_aborts": 3, "ran_to_their_end": 1}


def test_a_server_without_metrics_is_loaded_all_the_same(monkeypatch):
    monkeypatch.setattr(FakeServer, "_metrics", lambda self: None)
    report = watch_some_leave(FakeServer())
    assert report == {"memory": None, "most_orphans": None, "looks": 0, "drain_s": None, "abandoned": None}


@pytest.mark.parametrize(
    ("page", "tokens"), [('{"count": 2, "tokens": [4, 5]}', [4, 5]), ('{"pieces": [4, 5]}', None), (None, None)]
)
def test_texts_become_tokens_if_the_server_has_vllms_page_for_it(page, tokens, monkeypatch):
    async def main():
        async with FakeServer(tokenized=page).serving() as target:
            return await Monitor(target).tokenize("a b")

    assert asyncio.run(main()) == tokens


@pytest.mark.parametrize("text", ["", "# HELP a b\n", "a NaNa\n", "{} 3\n"])
def test_pages_without_samples_have_no_values(text):
    assert module._sums(module._parsed(text)) == {}


def test_samples_are_summed_over_their_labels():
    text = 'a{x="1 } 2"} 2.0\na{x="2"} 3e1\nb 4\n'
    assert module._sums(module._parsed(text)) == {"a": 32.0, "b": 4.0}
