"""The load test as a whole against a fake server, its sides, its checks, and the models that it serves."""

import asyncio
import contextlib
import json
from functools import partial

import pytest

from tests.bench.serve.conftest import answer, in_a_thread
from tests.support.fake_server import FakeServer
from tests.support.tiny import tiny_checkpoint
from verax import builtin
from verax.bench.compare import compare_results, read_timed
from verax.bench.results import markdown, write
from verax.bench.serve import cases
from verax.bench.serve.cases import bench_serve
from verax.bench.serve.load import Answer, Load, Request, Traffic, run_load
from verax.bench.settings import ServeSettings
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError
from verax.shapes import QWEN3_0_6B, SHAPES
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM
from verax.text.tokens.tokenizer import Tokenizer

SMALL = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}


def load_server(server, **options):
    with in_a_thread(server) as url:
        return bench_serve(ServeSettings(url=url, vocab_size=500, **{"runs": 2, **options}))


@pytest.fixture(scope="module")
def server():
    return FakeServer(faults={5: "429"})


@pytest.fixture
def result(server):
    server.bodies.clear()
    clients = dict(disconnect=0.2, slow_readers=0.1, input_tokens=4, output_tokens=6)
    return load_server(server, concurrency="4,2", num_requests=20, goodput="e2el:1e6", checks=3, **clients)


def test_all_requests_are_accounted_for(result, server, tmp_path):
    for case in result["cases"]:
        side = case["sides"]["server"]
        assert side["requests"] == 20 * len(side["seconds"])
        assert side["completed"] + side["disconnected"] + sum(side["errors"].values()) == side["requests"]
        assert side["disconnected"] > 0
        assert side["goodput_requests_per_s"] > 0
        assert case["check"]["identical"] == case["check"]["checked"] == 3
        assert case["check"]["lost"] == 0
    assert result["settings"]["traffic"]["vocab_size"] == 500
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) + 2 * 3  # the checks repeat


def test_an_open_loop_is_a_case_for_each_rate(server):
    rates = load_server(server, request_rate="500,1000", num_requests=10, output_tokens=2)["cases"]
    assert [case["case"] for case in rates] == ["500 requests per second", "1000 requests per second"]
    assert all(case["sides"]["server"]["requests"] == 10 * len(case["sides"]["server"]["seconds"]) for case in rates)


def test_the_result_is_written_read_and_compared(result, tmp_path):
    path = write(result, tmp_path)
    read = read_timed(path)
    name = "fake-bfloat16-4-streams-2-streams"
    comparison = compare_results(read, {name: result})
    assert {row["name"] for row in comparison["rows"]} == {f"{name} / {n} streams / server" for n in (4, 2)}
    page = markdown(read[name])
    assert "## 4 streams" in page
    assert "goodput (e2el 1e+06 ms) req/s" in page
    assert "clients disconnected" in page
    assert page.count("| server |") == 2


def test_failures_are_shown_by_kind():
    broken = FakeServer(faults=dict.fromkeys(range(100), "429") | {2: "cut"})
    result = load_server(broken, concurrency="2", num_requests=6, runs=1, warmup=0)
    page = markdown(result)
    assert "x http 429" in page
    assert "1 x lost: no end of the stream" in page
    assert "| server | 0 | 0.00 | 0.0 | - | - | - | - |" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": "vllm"}, "against: expected offline, async, llama.cpp, got 'vllm'"),
        ({"url": "http://127.0.0.1:1/v1", "against": "offline", "vocab_size": 9}, "model: with a url"),
        ({"url": "http://127.0.0.1:1/v1"}, "vocab_size: with a url"),
        ({"shapes": "llama"}, "shapes: expected one of qwen3, qwen3-8b, hybrid, moe"),
        ({"shapes": "qwen3", "model": "somewhere"}, "shapes: random weights stand for a model"),
        ({"disconnect": 1.1}, "disconnect: expected a number of at least 0 and at most 1"),
        ({"prefix_tokens": -1}, "prefix_tokens: expected a whole number of at least 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_any_work(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        ServeSettings(**options)


def test_a_server_that_is_not_there_is_one_error():
    with pytest.raises(VeraxError, match=r"http://127.0.0.1:1/v1/models: "):
        bench_serve(ServeSettings(url="http://127.0.0.1:1/v1", vocab_size=500))


def test_the_command_loads_a_server_and_prints_json(bench, server):
    with in_a_thread(server) as url:
        load = ("--vocab-size", 500, "--concurrency", "1,3", "--num-requests", 4, "--output-tokens", 3)
        status, out, error = bench("serve", "--url", url, *load, "--runs", 1, "--warmup", 0, "--json")
    assert not status, error
    result = json.loads(out)
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
        (["--duration", "0"], "duration: expected a number of more than 0"),
        (["--disconnect", "20"], "'--disconnect': Input should be less than or equal to 1"),
        (["--against", "llama.cpp", "--llama-server", "/nowhere/llama-server"], "build it with make llama-server"),
        (["--against", "vllm"], "against: expected"),
    ],
)
def test_the_command_refuses_nonsense_in_one_line(bench, arguments, message):
    status, _, error = bench("serve", *arguments)
    assert status in (1, 2)
    assert error.count("\n") == 1
    assert message in error


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


def test_random_weights_have_a_tokenizer_and_are_gone_afterwards(monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3", ("small shapes", SMALL))
    with cases.served_model(None, "qwen3") as (name, argument, path):
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


PROGRAM_TEXT = "#!/bin/sh\necho 'version: 0.5 (build 1)' >&2\n"


def program(folder, name="llama-server"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(PROGRAM_TEXT)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working directory and a PATH without the program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(cases.VARIABLE, raising=False)
    return tmp_path


def test_the_given_program_goes_before_the_variable_path_and_the_built_one(nowhere, monkeypatch):
    with pytest.raises(MissingDependencyError, match=r"no program .*; build it with make llama-server, or give"):
        cases.find_llama_server()
    built = program(nowhere / cases.BUILT.parent)
    assert cases.find_llama_server() == built
    on_path = program(nowhere / "bin")
    assert cases.find_llama_server() == on_path
    named = program(nowhere / "named", "server")
    monkeypatch.setenv(cases.VARIABLE, named)
    assert cases.find_llama_server() == named
    given = program(nowhere / "given", "other")
    assert cases.find_llama_server(given) == given


def test_every_slot_has_room_for_the_longest_request(tmp_path):
    words = cases.llama_server_command("llama-server", tmp_path / "a.gguf", 32, 96, 8123)
    options = dict(zip(words[1::2], words[2::2], strict=False))
    assert (options["--parallel"], options["--ctx-size"]) == ("32", str(32 * 96))
    assert options["--threads"] == options["--threads-batch"]
    assert options["--port"] == "8123"


def test_the_gguf_file_has_the_vocabulary_of_the_folder(tmp_path):
    with contextlib.ExitStack() as stack:
        kind, path = cases.gguf_file(builtin.text_model(), "bfloat16", stack)
        assert kind == "BF16"
        ours = Tokenizer.from_checkpoint(Checkpoint.open(path))
        theirs = Tokenizer.from_folder(builtin.text_model())
        for words in ("Once upon a time, there was a fox. 12 + 30 =", "Grüße\n\n  x"):
            assert ours.encode(words) == theirs.encode(words)
            assert ours.decode(ours.encode(words)) == words
        assert 2 in ours.eos_token_ids
        assert cases.gguf_file(path, "bfloat16", stack) == (kind, path)
    folder = tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": []}')
    with (
        pytest.raises(VeraxError, match="a tokenizer of type WordLevel cannot be written"),
        contextlib.ExitStack() as s,
    ):
        cases.gguf_file(folder, "float32", s)


TRAFFIC = Traffic(vocab_size=90, input_tokens=5, output_tokens=6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(folder, dtype="float32", max_num_seqs=2, max_model_len=32, use_tqdm=False)


@pytest.mark.parametrize(
    "load",
    [Load("a", concurrency=1, duration=1.0), Load("a", arrivals=lambda run: iter([0.0]), num_requests=1)],
    ids=["duration", "arrivals"],
)
def test_offline_has_no_clock_and_no_arrivals(llm, load):
    with pytest.raises(InvalidParameterError, match="against: offline has no arrivals and no clock"):
        asyncio.run(cases.run_offline(llm, load, TRAFFIC.requests()))


def test_the_command_line_of_the_server_has_the_options_of_the_engine():
    words = cases.EngineOptions("folder", quantization="int8", max_num_seqs=8, max_model_len=96).command(8123)
    assert words[1:5] == ["-m", "verax", "serve", "folder"]
    assert " ".join(words[5:]) == (
        "--dtype bfloat16 --quantization int8 --kv-cache-dtype auto --max-num-seqs 8 --max-model-len 96 "
        "--host 127.0.0.1 --port 8123"
    )
    assert cases.EngineOptions().command(1)[4] == "--dtype"


def test_offline_and_async_answer_alike_and_clients_that_leave_abort(llm):
    load = Load("2 streams", concurrency=2, num_requests=6)
    theirs = asyncio.run(cases.run_offline(llm, load, TRAFFIC.requests()))
    leaving = Traffic(vocab_size=90, input_tokens=5, output_tokens=20, disconnect=1.0)

    async def main():
        engine = AsyncLLM.from_llm(llm)  # the last test that uses it
        ask = partial(cases.ask_engine, engine)
        try:
            whole = await run_load(ask, load, TRAFFIC.requests())
            left = await run_load(ask, load, leaving.requests())
            while (stats := engine.stats()).num_requests_running + stats.num_requests_waiting:
                await asyncio.sleep(0.01)
            return whole, left
        finally:
            await engine.shutdown()

    ours, left = asyncio.run(main())
    assert [answer.text for answer in ours.answers] == [answer.text for answer in theirs.answers]
    assert [answer.completion_tokens for answer in ours.answers] == [6] * 6
    assert all(answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended for answer in ours.answers)
    assert all(answer.events == [] and answer.completed for answer in theirs.answers)
    assert any(answer.left for answer in left.answers)
    assert all(answer.completion_tokens < 20 for answer in left.answers if answer.left)
