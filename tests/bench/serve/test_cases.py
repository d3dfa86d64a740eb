"""The load test as a whole against a fake server, its sides, its checks, and the models that it serves."""

import asyncio
import contextlib
import json
import sys

import pytest

from tests.bench.serve.conftest import answer, in_a_thread
from tests.support.fake_server import FakeServer
from tests.support.tiny import tiny_checkpoint
from verax import builtin, cli, machine
from verax.bench.compare import compare_results, read_timed
from verax.bench.results import markdown, write
from verax.bench.serve import cases
from verax.bench.serve.cases import bench_serve
from verax.bench.serve.llama_cpp import LlamaServer
from verax.bench.serve.load import Answer, Load, Request, Traffic, arrival_times
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError
from verax.shapes import QWEN3_0_6B, SHAPES
from verax.text.engine.async_llm import AsyncLLM
from verax.text.tokens.tokenizer import Tokenizer

SMALL = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}
LIMITS = {"memory_bandwidth_gb_per_s": 10.0, "matmul_float32_gflop_per_s": 10, "matmul_bfloat16_gflop_per_s": 10}


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
    assert closed["check"]["lost"] == 0
    assert opened["sides"]["server"]["requests"] == 10 * len(opened["sides"]["server"]["seconds"])
    assert result["settings"]["traffic"]["vocab_size"] == 500
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) + 6  # the checks repeat


def test_the_result_is_written_read_and_compared(result, tmp_path):
    path = write(result, tmp_path)
    read = read_timed(path)
    name = "fake-bfloat16-4-streams-open"
    comparison = compare_results(read, {name: result})
    assert {row["name"] for row in comparison["rows"]} == {f"{name} / 4 streams / server", f"{name} / open / server"}
    page = markdown(read[name])
    assert "## 4 streams" in page
    assert "goodput (e2el 1e+06 ms) req/s" in page
    assert "clients disconnected" in page
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
    assert [case["case"] for case in result["cases"]] == ["1 stream", "3 streams"]
    assert result["cases"][1]["sides"]["server"]["output_tokens"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1", "--request-rate", "1"], "give one of them"),
        (["--concurrency", "many"], "expected whole numbers"),
        (["--concurrency", "0"], "concurrency: expected at least 1"),
        (["--request-rate", "-1"], "request_rate: expected more than 0"),
        (["--goodput", "p99:1"], "goodput: expected"),
        (["--concurrency", "1.5"], "expected whole numbers such as 1,8, got '1.5'"),
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


async def ask_again(request):
    assert not request.slow
    assert request.leave_after is None
    text = {0: "one two three", 1: "four five six"}.get(request.number)
    return Answer(request, 0.0, text=text or "", error=None if text else "http 500")


@pytest.mark.parametrize(
    ("number", "text", "outcome"),
    [
        (0, "one two three", "identical"),
        (2, "seven", "failed"),
    ],
)
def test_answers_are_compared_with_those_without_load(number, text, outcome):
    asked = Request(number, (1,), 3, slow=True)
    answers = [Answer(asked, 0.0, text=text), Answer(Request(1, (2,), 3), 0.0, text="four five six")]
    report = asyncio.run(cases.check_answers(ask_again, answers, number=100))
    assert report[outcome] == (2 if outcome == "identical" else 1)
    assert report["checked"] == 2


def test_an_answer_that_differs_is_not_identical_and_lost_streams_are_counted():
    answers = [Answer(Request(0, (1,), 3), 0.0, text="one two thirty"), answer(2, 0, 0, 3, error="lost: no end")]
    report = asyncio.run(cases.check_answers(ask_again, answers, number=9))
    assert report == {"checked": 1, "identical": 0, "failed": 0, "lost": 1}


def test_without_a_model_it_is_the_built_in_one():
    with cases.served_model(None, None, "bfloat16") as (_, argument, path):
        assert (argument, path) == (None, builtin.text_model())


def test_random_weights_have_a_tokenizer_and_are_gone_afterwards(monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3", ("small shapes", SMALL))
    with cases.served_model(None, "qwen3", "bfloat16") as (name, argument, path):
        assert name == "random weights, small shapes"
        assert argument == str(path)
        assert Tokenizer.from_folder(path).vocab_size == 512
    assert not path.exists()


def test_every_id_of_a_made_up_tokenizer_is_a_text(tmp_path):
    cases._write_tokenizer(tmp_path, 1000)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([300, 999, 256]) == " w300 w999 w"
    assert len({tokenizer.token(number) for number in range(1000)}) == 1000
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"


@pytest.mark.parametrize("shapes", ["llama", "qwen3"])
def test_shapes_stand_for_a_model_and_are_known(shapes, tmp_path):
    model = "somewhere" if shapes == "qwen3" else None
    with (
        pytest.raises(InvalidParameterError, match="shapes: expected one of qwen3, qwen3-8b, hybrid, moe and no model"),
        cases.served_model(model, shapes, "bfloat16"),
    ):
        pass


def test_the_gguf_file_has_the_vocabulary_of_the_folder(tmp_path):
    with contextlib.ExitStack() as stack:
        server = LlamaServer("llama-server")
        assert server.write(builtin.text_model(), "bfloat16", stack) == "BF16"
        ours = Tokenizer.from_checkpoint(Checkpoint.open(server.path))
        theirs = Tokenizer.from_folder(builtin.text_model())
        for words in ("Once upon a time, there was a fox. 12 + 30 =", "Grüße\n\n  x"):
            assert ours.encode(words) == theirs.encode(words)
            assert ours.decode(ours.encode(words)) == words
        assert 2 in ours.eos_token_ids
        again = LlamaServer("llama-server")
        again.write(server.path, "bfloat16", stack)
        assert again.path == server.path
    folder = tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": []}')
    with (
        pytest.raises(VeraxError, match="a tokenizer of type WordLevel cannot be written"),
        contextlib.ExitStack() as s,
    ):
        LlamaServer("llama-server").write(folder, "float32", s)


TRAFFIC = Traffic(90, input_tokens=5, output_tokens=6)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return cases._OfflineSide(
        cases.EngineOptions(str(folder), dtype="float32", max_num_seqs=2, max_model_len=32), TRAFFIC
    )


@pytest.mark.parametrize(
    "load",
    [Load("a", concurrency=1, duration=1.0), Load("a", arrivals=lambda run: iter([0.0]), num_requests=1)],
    ids=["duration", "arrivals"],
)
def test_offline_has_no_clock_and_no_arrivals(offline, load):
    with pytest.raises(InvalidParameterError, match="against: offline has no arrivals and no clock"):
        asyncio.run(offline.run(load, 0))


def test_the_command_line_of_the_server_has_the_options_of_the_engine():
    words = cases.EngineOptions("folder", quantization="int8", max_num_seqs=8, max_model_len=96).command(8123)
    assert words[1:5] == ["-m", "verax", "serve", "folder"]
    assert " ".join(words[5:]) == (
        "--dtype bfloat16 --quantization int8 --kv-cache-dtype auto --max-num-seqs 8 --max-model-len 96 "
        "--host 127.0.0.1 --port 8123"
    )
    assert cases.EngineOptions().command(1)[4] == "--dtype"


def test_offline_and_async_answer_alike_and_clients_that_leave_abort(offline):
    load = Load("2 streams", concurrency=2, num_requests=6)
    theirs = asyncio.run(offline.run(load, 0))
    leaving = Traffic(90, input_tokens=5, output_tokens=20, disconnect=1.0)

    async def main():
        llm = AsyncLLM.from_llm(offline._llm)  # the last test that uses it
        try:
            whole = await cases._AsyncSide(llm, TRAFFIC).run(load, 0)
            left = await cases._AsyncSide(llm, leaving).run(load, 0)
            while (stats := llm.stats()).num_requests_running + stats.num_requests_waiting:
                await asyncio.sleep(0.01)
            return whole, left
        finally:
            await llm.shutdown()

    ours, left = asyncio.run(main())
    assert [answer.text for answer in ours.answers] == [answer.text for answer in theirs.answers]
    assert [answer.completion_tokens for answer in ours.answers] == [6] * 6
    assert all(answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended for answer in ours.answers)
    assert all(answer.events == [] and answer.completed for answer in theirs.answers)
    assert any(answer.left for answer in left.answers)
    assert all(answer.completion_tokens < 20 for answer in left.answers if answer.left)
