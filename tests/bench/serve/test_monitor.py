"""The monitor: memory, and requests that go on although nobody waits for them."""

import asyncio

import psutil
import pytest

from tests.support.fake_server import FakeServer
from verax.bench.serve import monitor as module
from verax.bench.serve.monitor import Monitor
from verax.bench.serve.traffic import Request


def watch_some_leave(server, process=None):
    async def main():
        async with server.serving() as target:
            monitor = Monitor(target, process)
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


def test_memory_is_that_of_the_process_or_of_the_metrics():
    assert watch_some_leave(FakeServer())["memory"] == dict.fromkeys(("start_gb", "warm_gb", "end_gb", "peak_gb"), 2.5)
    own = watch_some_leave(FakeServer(), psutil.Process())["memory"]
    assert 0 < own["start_gb"] <= own["peak_gb"] < 2.5


def test_a_server_without_metrics_is_loaded_all_the_same(monkeypatch):
    monkeypatch.setattr(FakeServer, "_metrics", lambda self: None)
    assert watch_some_leave(FakeServer()) == {"memory": None, "most_orphans": None, "drain_s": None}


@pytest.mark.parametrize("text", ["", "# HELP a b\n", "a NaNa\n", "{} 3\n"])
def test_pages_without_samples_have_no_values(text):
    assert module._sums(text) == {}


def test_samples_are_summed_over_their_labels():
    assert module._sums('a{x="1 } 2"} 2.0\na{x="2"} 3e1\nb 4\n') == {"a": 32.0, "b": 4.0}
