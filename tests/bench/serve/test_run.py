"""The benchmark as a whole against a fake server: what is counted, written, refused and compared."""

import asyncio
import contextlib
import json
import sys
import threading

import pytest

from tests.support.fake_server import FakeServer
from verax import cli, machine
from verax.bench.compare import compare_results, read_result
from verax.bench.results import markdown, write
from verax.bench.serve.load import Load
from verax.bench.serve.run import bench_serve
from verax.bench.serve.traffic import Traffic, arrival_times
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError

LIMITS = {"memory_bandwidth_gb_per_s": 10.0, "matmul_float32_gflop_per_s": 10, "matmul_bfloat16_gflop_per_s": 10}


@contextlib.contextmanager
def in_a_thread(server):
    """The base URL of a fake server that runs beside this thread."""
    ready, over, found = threading.Event(), asyncio.Event(), []

    async def main():
        async with server.serving() as target:
            found.extend([asyncio.get_running_loop(), f"http://127.0.0.1:{target.port}/v1"])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield found[1]
    finally:
        found[0].call_soon_threadsafe(over.set)
        thread.join()


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    monkeypatch.setattr(machine, "measure_machine", lambda: LIMITS)


def traffic(vocab_size):
    return Traffic(vocab_size, input_tokens=4, output_tokens=6, disconnect=0.2, slow_readers=0.1)


def bench(server, *loads, **options):
    with in_a_thread(server) as url:
        return bench_serve(loads, traffic, url=url, vocab_size=500, **{"runs": 2, "warmup": 1, "checks": 3, **options})


@pytest.fixture(scope="module")
def server():
    return FakeServer(faults={5: "429"})


@pytest.fixture
def result(server):
    server.bodies.clear()
    arrivals = lambda run: arrival_times(1000.0, seed=run)
    loads = (Load("4 streams", concurrency=4, num_requests=20), Load("open", arrivals=arrivals, num_requests=10))
    return bench(server, *loads, goodput={"e2el": 1e6})


def test_all_requests_are_accounted_for(result, server, tmp_path):
    closed, opened = result["cases"]
    side = closed["sides"]["server"]
    assert side["requests"] == 20 * len(side["seconds"])
    assert side["completed"] + side["disconnected"] + sum(side["errors"].values()) == side["requests"]
    assert side["disconnected"] > 0
    assert side["goodput_requests_per_s"] > 0
    assert closed["check"]["identical"] == closed["check"]["checked"] == 3
    assert closed["check"]["lost"] == closed["check"]["mixed"] == 0
    assert opened["sides"]["server"]["requests"] == 10 * len(opened["sides"]["server"]["seconds"])
    assert result["server"]["memory"]["warm_gb"] == 2.5
    assert result["settings"]["traffic"]["vocab_size"] == 500
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) + 6  # the checks repeat


def test_the_result_is_written_read_and_compared(result, tmp_path):
    path = write(result, tmp_path)
    assert path.name.endswith("-serve-fake-bfloat16-4-streams-open.json")
    comparison = compare_results(read_result(path), result)
    assert {row["name"] for row in comparison["rows"]} == {"4 streams / server", "open / server"}
    page = markdown(json.loads(path.read_text()))
    assert "## 4 streams" in page
    assert "goodput (e2el 1e+06 ms) req/s" in page
    assert "clients disconnected" in page
    assert "Memory of the server: 2.500 GB" in page
    assert page.count("| server |") == 2


def test_failures_are_shown_by_kind():
    broken = FakeServer(faults=dict.fromkeys(range(100), "429") | {2: "cut"})
    with in_a_thread(broken) as url:
        load = Load("2 streams", concurrency=2, num_requests=6)
        result = bench_serve([load], Traffic, url=url, vocab_size=500, runs=1, warmup=0)
    page = markdown(result)
    assert "x http 429" in page
    assert "1 x lost: no end of the stream" in page
    assert "| server | 0 | 0.00 | 0.0 | - | - | - | - |" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": ("vllm",)}, "against: expected offline, async, llama.cpp, got 'vllm'"),
        ({"url": "http://127.0.0.1:1/v1", "against": ("offline",), "vocab_size": 9}, "model: with a url"),
        ({"url": "http://127.0.0.1:1/v1"}, "vocab_size: with a url"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_any_work(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        bench_serve([Load("1", concurrency=1, num_requests=1)], traffic, **options)


def test_a_server_that_is_not_there_is_one_error():
    with pytest.raises(VeraxError, match=r"http://127.0.0.1:1/v1/models: "):
        bench_serve([Load("1", concurrency=1, num_requests=1)], traffic, url="http://127.0.0.1:1/v1", vocab_size=500)


def test_without_llama_server_the_error_says_where_it_is_from():
    with pytest.raises(MissingDependencyError, match=r"no program '/nowhere/llama-server'; build it with"):
        bench_serve(
            [Load("1", concurrency=1, num_requests=1)],
            traffic,
            against=("llama.cpp",),
            llama_server="/nowhere/llama-server",
        )


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["verax", "bench", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr()


def test_the_command_loads_a_server_and_prints_json(monkeypatch, capsys, server):
    with in_a_thread(server) as url:
        arguments = [
            "--vocab-size",
            "500",
            "--concurrency",
            "1,3",
            "--num-requests",
            "4",
            "--runs",
            "1",
            "--warmup",
            "0",
        ]
        status, shown = command(monkeypatch, capsys, "--url", url, *arguments, "--output-tokens", "3", "--json")
    assert not status, shown.err
    result = json.loads(shown.out)
    assert [case["name"] for case in result["cases"]] == ["1 stream", "3 streams"]
    assert result["cases"][1]["sides"]["server"]["output_tokens"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1", "--request-rate", "1"], "give one of them"),
        (["--concurrency", "many"], "expected numbers"),
        (["--concurrency", "0"], "concurrency: expected at least 1"),
        (["--request-rate", "-1"], "request_rate: expected more than 0"),
        (["--goodput", "p99:1"], "goodput: expected"),
        (["--concurrency", "1.5"], "expected whole numbers, got 1.5"),
        (["--duration", "0"], "duration: expected more than 0 seconds"),
        (["--disconnect", "20"], "disconnect: expected a share from 0 to 1"),
        (["--against", "llama.cpp", "--llama-server", "/nowhere/llama-server"], "build it with make llama-server"),
        (["--against", "vllm"], "against: expected"),
    ],
)
def test_the_command_refuses_nonsense_in_one_line(monkeypatch, capsys, arguments, message):
    status, shown = command(monkeypatch, capsys, *arguments)
    assert status in (1, 2)
    assert shown.err.count("\n") == 1
    assert message in shown.err
