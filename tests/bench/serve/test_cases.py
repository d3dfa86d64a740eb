"""The load test as a whole against a fake server, its sides, its checks, and the models that it serves."""

import asyncio
import contextlib
import json
from functools import partial

import pytest

from tests.bench.serve.conftest import FakeServer, answer, in_a_thread
from tests.support.tiny import tiny_checkpoint
from verax import builtin
from verax.bench.results import compare_results, markdown, read_results, write
from verax.bench.serve import cases
from verax.bench.serve.cases import bench_serve
from verax.bench.serve.load import Answer, Load, Request, draw_requests, run_load
from verax.bench.settings import ServeSettings, TrafficSettings
from verax.bench.text.gguf_export import gguf_file
from verax.checkpoint import Checkpoint
from verax.errors import InvalidParameterError, MissingDependencyError, VeraxError
from verax.shapes import QWEN3_0_6B, SHAPES
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM
from verax.text.tokens.tokenizer import Tokenizer

SMALL = {**QWEN3_0_6B, "num_hidden_layers": 1, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64}


def load_server(server, **options):
    with in_a_thread(server) as url:
        return bench_serve(ServeSettings(url=url, vocab_size=500, **{"runs": 1, **options}))


@pytest.fixture(scope="module")
def server():
    return FakeServer(faults={5: "429"})


def test_all_requests_are_accounted_for_and_the_result_is_written_read_and_compared(server, tmp_path):
    clients = dict(disconnect=0.2, slow_readers=0.1, input_tokens=4, output_tokens=6)
    result = load_server(server, concurrency="4,2", num_requests=20, checks=3, runs=2, **clients)
    for case in result["cases"]:
        side = case["sides"]["server"]
        assert side["requests"] == 20 * len(side["seconds"])
        assert min(side["rates"]) <= side["output_tokens_per_s"] <= max(side["rates"])
        assert side["completed"] + side["disconnected"] + sum(side["errors"].values()) == side["requests"]
        assert side["disconnected"] > 0
        assert (case["check"]["identical"], case["check"]["checked"], case["check"]["lost"]) == (3, 3, 0)
    assert result["settings"]["traffic"]["vocab_size"] == 500
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == len(set(prompts)) + 2 * 3  # the checks repeat
    read, name = read_results(write(result, tmp_path)), "fake-bfloat16-4-streams-2-streams"
    comparison = compare_results(read, {name: result})
    assert {row["name"] for row in comparison["rows"]} == {f"{name} / {n} streams / server" for n in (4, 2)}
    page = markdown(read[name])
    assert page.count("| **server** |") == 2
    for words in ("| 4 streams | **server** |", "| disconnected |"):
        assert words in page


def test_a_server_that_stays_gets_other_prompts_and_prefixes_each_time():
    server = FakeServer()
    for _ in range(2):
        load_server(server, concurrency="1", num_requests=3, warmup=0, checks=0, prefix_tokens=8)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert (len(set(prompts)), len({prompt[:8] for prompt in prompts})) == (6, 2)


def test_failures_are_shown_by_kind():
    broken = FakeServer(faults=dict.fromkeys(range(100), "429") | {2: "cut"})
    page = markdown(load_server(broken, concurrency="2", num_requests=6, warmup=0))
    for words in (
        "x http 429",
        "1 x lost: no end of the stream",
        "| 2 streams | **server** |",
        "| 0 | 0.00 |",
    ):
        assert words in page


def test_streams_that_the_first_of_several_runs_lost_are_counted():
    result = load_server(FakeServer(faults={2: "cut"}), concurrency="2", num_requests=6, warmup=0, runs=2)
    assert result["cases"][0]["check"]["lost"] == 1


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (("--concurrency", "1,3"), ["1 stream", "3 streams"]),
        (("--request-rate", "500,1000"), ["500 requests per second", "1000 requests per second"]),
    ],
)
def test_the_command_loads_a_server_with_each_load_and_prints_json(bench, server, load, names):
    with in_a_thread(server) as url:
        traffic = ("--vocab-size", 500, "--num-requests", 4, "--output-tokens", 3)
        status, out, error = bench("serve", "--url", url, *load, *traffic, "--runs", 1, "--warmup", 0, "--json")
    assert not status, error
    result = json.loads(out)
    assert [case["case"] for case in result["cases"]] == names
    assert result["cases"][1]["sides"]["server"]["output_tokens"] == 12


async def ask_again(request):
    assert (request.slow, request.leave_after) == (False, None)
    text = {0: "one two three", 1: "four five six"}.get(request.number)
    return Answer(request, 0.0, text=text or "", error=None if text else "http 500")


@pytest.mark.parametrize(
    ("number", "text", "identical", "failed"),
    [(0, "one two three", 2, 0), (0, "one two thirty", 1, 0), (2, "seven", 1, 1)],
)
def test_answers_are_compared_with_those_without_load_and_lost_streams_are_counted(number, text, identical, failed):
    answers = [
        Answer(Request(number, (1,), 3, slow=True), 0.0, text=text),
        Answer(Request(1, (2,), 3), 0.0, text="four five six"),
        answer(2, 0, 0, 3, error="lost: no end"),
    ]
    report = asyncio.run(cases.check_answers(ask_again, answers, number=100))
    assert report == {"checked": 2, "identical": identical, "failed": failed, "lost": 1}


def test_random_weights_have_a_tokenizer_with_a_text_for_every_id_and_are_gone_afterwards(monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3", ("small shapes", SMALL))
    with cases.served_model(None, "qwen3") as (name, path):
        assert name == "random weights, small shapes"
        tokenizer = Tokenizer.from_folder(path)
    assert not path.exists()
    assert tokenizer.decode([300, 511, 256]) == " w300 w511 w"
    assert len({tokenizer.token(number) for number in range(512)}) == 512
    assert tokenizer.decode(tokenizer.encode("Grüße")) == "Grüße"


def test_the_given_program_goes_before_path_and_the_built_one(tmp_path, monkeypatch):
    def program(path):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(MissingDependencyError, match=r"no program .*; build it with make llama-server, or give"):
        cases.find_llama_server()
    for path in (tmp_path / cases.BUILT, tmp_path / "bin" / "llama-server"):
        assert program(path) == cases.find_llama_server()
    given = program(tmp_path / "given" / "other")
    assert cases.find_llama_server(given) == given


def test_command_lines_have_the_options_of_the_engine_and_room_for_the_longest_request(tmp_path):
    words = cases.serve_command("folder", {"quantization": "int8", "max_num_seqs": 8, "dtype": None}, 8123)
    assert words[1:5] == ["-m", "verax", "serve", "folder"]
    assert " ".join(words[5:]) == "--quantization int8 --max-num-seqs 8 --host 127.0.0.1 --port 8123"
    assert cases.serve_command(None, {}, 1)[4] == "--host"
    words = cases.llama_server_command("llama-server", tmp_path / "a.gguf", 32, 96, 8123)
    options = dict(zip(words[1::2], words[2::2], strict=False))
    assert (options["--parallel"], options["--ctx-size"], options["--port"]) == ("32", str(32 * 96), "8123")
    assert options["--threads"] == options["--threads-batch"]


def test_the_gguf_file_has_the_vocabulary_of_the_folder(tmp_path):
    source, folder = builtin.text_model(), tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": []}')
    with contextlib.ExitStack() as stack:
        kind, path = gguf_file(Checkpoint.open(source), "bfloat16", stack, vocabulary=source / "tokenizer.json")
        assert kind == "BF16"
        ours, theirs = Tokenizer.from_checkpoint(Checkpoint.open(path)), Tokenizer.from_folder(source)
        for words in ("Once upon a time, there was a fox. 12 + 30 =", "Grüße\n\n  x"):
            assert ours.encode(words) == theirs.encode(words)
            assert ours.decode(ours.encode(words)) == words
        assert 2 in ours.eos_token_ids
        assert gguf_file(Checkpoint.open(path), "bfloat16", stack) == (kind, path)
        with pytest.raises(VeraxError, match="a tokenizer of type WordLevel cannot be written"):
            gguf_file(Checkpoint.open(folder), "float32", stack, vocabulary=folder / "tokenizer.json")


def requests(**traffic):
    return draw_requests(TrafficSettings(vocab_size=90, input_tokens=5, **{"output_tokens": 6, **traffic}))


def test_offline_and_async_answer_alike_and_clients_that_leave_abort(tmp_path):
    llm = LLM(tiny_checkpoint(tmp_path), dtype="float32", max_num_seqs=2, max_model_len=32, use_tqdm=False)
    for load in (Load("a", concurrency=1, duration=1.0), Load("a", arrivals=lambda run: iter([0.0]), num_requests=1)):
        with pytest.raises(InvalidParameterError, match="against: offline has no arrivals and no clock"):
            asyncio.run(cases.run_offline(llm, load, requests()))
    load = Load("2 streams", concurrency=2, num_requests=6)
    theirs = asyncio.run(cases.run_offline(llm, load, requests()))

    async def main():
        engine = AsyncLLM.from_llm(llm)
        ask = partial(cases.ask_engine, engine)
        try:
            whole = await run_load(ask, load, requests())
            left = await run_load(ask, load, requests(output_tokens=20, disconnect=1.0))
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
