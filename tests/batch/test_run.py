"""A batch over an engine in this process: answers, errors, resumption, full queues, signals, a dead engine."""

import codecs
import io
import json
import os
import signal

import pytest

from tests.serve.conftest import InstantPipeline
from verax.batch.requests import AnswerLine, LocalServer
from verax.batch.results import ResultFile
from verax.batch.run import BatchRun, read_lines
from verax.errors import EngineDeadError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def line(name, url=COMPLETIONS, **body):
    body = {"prompt": f"abc {name}", **GREEDY, **body} if url == COMPLETIONS else body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text_of(lines):
    return b"".join((entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n" for entry in lines)


def answers_in(path):
    return [json.loads(text) for text in path.read_bytes().splitlines()]


@pytest.fixture
def run_batch(new_server, tmp_path):
    """Answers lines into out.jsonl and gives the run."""

    def run(lines, *, server=None, retry_errors=False, max_in_flight=4, report=lambda counts: None):
        server = server or new_server(names=("tiny", "alias"), disable_page=True)
        output = ResultFile.open(tmp_path / "out.jsonl", AnswerLine, retry_errors=retry_errors)
        run = BatchRun(
            LocalServer(server),
            io.BytesIO(text_of(lines)),
            output,
            max_in_flight=max_in_flight,
            clips=tmp_path / "out.clips",
            shutdown_timeout=server.settings.shutdown_timeout,
            report=report,
        )
        try:
            run.run()
        finally:
            output.file.close()
        return run

    return run


def test_every_line_gets_the_answer_that_the_server_gives(run_batch, api, tmp_path):
    chat = {"messages": [{"role": "user", "content": "abc"}], **GREEDY}
    lines = [line("chat", CHAT, **chat), *(line(f"text-{i}", seed=i) for i in range(12))]
    lines += [line("response", "/v1/responses", input="abc", temperature=0, max_output_tokens=4)]
    run = run_batch(lines)
    answers = {answer["custom_id"]: answer for answer in answers_in(tmp_path / "out.jsonl")}
    assert len(answers) == run.counts.done == len(lines)
    assert run.complete
    for sent in lines:
        answer = answers[sent["custom_id"]]
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["id"].startswith("batch_req_")
        assert set(answer["response"]) == {"status_code", "request_id", "body"}
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        expected, body = api.ok(sent["url"], sent["body"]), answer["response"]["body"]
        assert set(body) == set(expected)
        for part in ("choices", "object", "model"):
            assert body.get(part) == expected.get(part)
    assert answers["response"]["response"]["body"]["output"][0]["type"] == "message"
    usages = [answer["response"]["body"]["usage"] for answer in answers.values()]
    generated = sum(usage.get("completion_tokens", 0) + usage.get("output_tokens", 0) for usage in usages)
    assert run.counts.output_tokens == generated


def test_a_refused_request_has_the_servers_error_and_the_batch_continues(run_batch, api, tmp_path):
    wrong = {"n": 1000, "model": "other", "temperature": -1}
    run = run_batch([*(line(name, **{name: value}) for name, value in wrong.items()), line("good")])
    assert (run.counts.done, run.counts.failed) == (1, 3)
    for answer in answers_in(tmp_path / "out.jsonl"):
        if (name := answer["custom_id"]) in wrong:
            refused = api.post(COMPLETIONS, {"prompt": "abc", name: wrong[name]})
            assert answer["response"]["status_code"] == refused.status_code
            assert answer["response"]["body"] == refused.json()
            assert answer["error"] is None


def test_no_more_requests_are_in_flight_than_allowed(run_batch, served_llm, monkeypatch):
    counts, add = [0], served_llm.engine.add

    def counting(*args, **options):
        added = add(*args, **options)
        counts.append(len(served_llm.engine._requests))
        return added

    monkeypatch.setattr(served_llm.engine, "add", counting)
    run_batch([line(str(i)) for i in range(20)], max_in_flight=3)
    assert 1 < max(counts) <= 3


def test_a_wrong_line_has_one_error_line_and_the_batch_continues(run_batch, tmp_path):
    lines = [
        line("a"),
        b"{not json",
        {"custom_id": "b", "method": "POST", "body": {}},
        line("a", prompt="again"),
        b"",
        line("c", "/v1/nothing"),
        line("d", stream=True),
        line("e"),
    ]
    run = run_batch(lines)
    assert (run.counts.done, run.counts.failed) == (2, 5)
    errors = {answer["error"]["line"]: answer for answer in answers_in(tmp_path / "out.jsonl") if answer["error"]}
    names = {number: answer["custom_id"] for number, answer in errors.items()}
    assert names == {2: None, 3: "b", 4: "a", 6: "c", 7: "d"}
    assert errors[4]["error"]["code"] == "duplicate_custom_id"
    assert all(answer["response"] is None for answer in errors.values())
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run_batch(lines)
    assert (again.counts.done, again.counts.failed, again.counts.skipped) == (0, 0, 7)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_an_exception_of_the_server_is_the_error_of_its_line(run_batch, new_server, tmp_path, monkeypatch):
    answer = LocalServer.answer

    async def fail(self, request, clips):
        if request.custom_id == "b":
            raise ZeroDivisionError("planted")
        return await answer(self, request, clips)

    monkeypatch.setattr(LocalServer, "answer", fail)
    run = run_batch([codecs.BOM_UTF8 + text_of([line("a")]).rstrip(), line("b"), line("c")])
    assert (run.complete, run.counts.done, run.counts.failed) == (True, 2, 1)
    errors = {answer["custom_id"]: answer["error"] for answer in answers_in(tmp_path / "out.jsonl")}
    assert (errors["a"], errors["b"]["code"], errors["c"]) == (None, "server_error", None)


def test_a_full_queue_is_waited_for(run_batch, new_server, tmp_path, slow):
    # One waits beyond the eight that run; five prompts at once fit only when few others are there.
    server = new_server(max_queued_requests=1)
    lines = [line(str(i), prompt=["abc"] * 5) if i % 4 == 0 else line(str(i)) for i in range(16)]
    run = run_batch(lines, server=server, max_in_flight=12)
    assert (run.counts.done, run.counts.failed) == (16, 0)


def test_a_request_that_no_queue_can_take_is_an_error(run_batch, new_server, tmp_path):
    run = run_batch([line("a", prompt=["abc"] * 20), line("b")], server=new_server(max_queued_requests=1))
    assert (run.counts.done, run.counts.failed) == (1, 1)
    (refused,) = [answer for answer in answers_in(tmp_path / "out.jsonl") if answer["custom_id"] == "a"]
    assert refused["response"]["status_code"] == 429


def stop_after(answers, *signals):
    """A report that sends signals to this process, each after a given number of further answers."""
    left = list(signals)

    def report(counts):
        if left and counts.done >= answers * (len(signals) - len(left) + 1):
            os.kill(os.getpid(), left.pop(0))

    return report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_what_runs_finish_and_reads_no_more(run_batch, slow, tmp_path, number):
    lines = [line(str(i)) for i in range(24)]
    run = run_batch(lines, report=stop_after(4, number))
    assert not run.complete
    assert run.stopped_by == number
    assert 4 <= run.counts.done < 24
    written = [answer["custom_id"] for answer in answers_in(tmp_path / "out.jsonl")]
    assert len(written) == run.counts.done
    again = run_batch(lines)
    assert again.complete
    assert (again.counts.skipped, again.counts.done) == (len(written), 24 - len(written))


# The shortest one is the last: once it has its answer, the others are in flight.
@pytest.mark.parametrize(
    ("timeout", "signals", "tokens", "answered"),
    [
        (0.0, [signal.SIGTERM], {"a": 40, "b": 40, "c": 40, "short": 1}, ["short"]),
        (600.0, [signal.SIGINT, signal.SIGINT], {"long": 120, "second": 5, "first": 1}, ["first", "second"]),
    ],
)
def test_what_does_not_finish_in_time_or_before_a_second_signal_is_abandoned_and_runs_again(
    run_batch, new_server, slow, tmp_path, timeout, signals, tokens, answered
):
    lines = [line(name, max_tokens=number) for name, number in tokens.items()]
    run = run_batch(lines, server=new_server(shutdown_timeout=timeout), report=stop_after(1, *signals))
    assert not run.complete
    assert sorted(answer["custom_id"] for answer in answers_in(tmp_path / "out.jsonl")) == answered
    assert run_batch(lines).counts.done == len(lines) - len(answered)


def test_an_engine_that_fails_ends_the_batch_without_errors_for_its_lines(run_batch, served_llm, monkeypatch, tmp_path):
    steps, advance = [], served_llm.engine.advance

    def fail():
        steps.append(1)
        if len(steps) > 12:
            raise RuntimeError("device lost")
        return advance()

    lines = [line(str(i)) for i in range(12)]
    with monkeypatch.context() as patch:
        patch.setattr(served_llm.engine, "advance", fail)
        with pytest.raises(EngineDeadError, match="device lost"):
            run_batch(lines)
    for request_id in list(served_llm.engine._requests):
        served_llm.engine.abort(request_id)
    written = answers_in(tmp_path / "out.jsonl")
    assert all(answer["response"]["status_code"] == 200 for answer in written)
    assert run_batch(lines).counts.done == 12 - len(written)


def test_a_clip_is_written_next_to_the_output(run_batch, new_server, served_pipeline, tmp_path):
    pytest.importorskip("av")
    clip = {"prompt": "a red circle floats left", "num_inference_steps": 1}
    server = new_server(pipeline=InstantPipeline(served_pipeline))
    run = run_batch([line("clip", "/v1/videos", **clip), line("wrong", "/v1/videos", prompt=1)], server=server)
    assert (run.counts.done, run.counts.failed) == (1, 1)
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers_in(tmp_path / "out.jsonl")}
    assert bodies["clip"]["status"] == "completed"
    assert [path.name for path in (tmp_path / "out.clips").iterdir()] == [f"{bodies['clip']['id']}.mp4"]
    assert (tmp_path / "out.clips" / f"{bodies['clip']['id']}.mp4").read_bytes()[4:8] == b"ftyp"
    assert "prompt" in bodies["wrong"]["error"]["message"]


def test_a_clip_that_cannot_be_written_ends_the_batch_without_a_line(run_batch, new_server, served_pipeline, tmp_path):
    pytest.importorskip("av")
    (tmp_path / "out.clips").touch()
    clip = line("clip", "/v1/videos", prompt="a red circle floats left", num_inference_steps=1)
    with pytest.raises(FileExistsError):
        run_batch([clip], server=new_server(pipeline=InstantPipeline(served_pipeline)))
    assert answers_in(tmp_path / "out.jsonl") == []


async def test_a_failure_is_raised_after_the_lines_before_it():
    class Failing(io.RawIOBase):
        def __iter__(self):
            yield b"first\n"
            raise OSError("device lost")

    lines = read_lines(Failing())
    assert await anext(lines) == b"first\n"
    with pytest.raises(OSError, match="device lost"):
        await anext(lines)
