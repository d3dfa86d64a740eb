"""The client: every way to cut a stream gives the same answer, and every failure has its kind."""

import asyncio
import itertools
import re

import pytest

from tests.support.fake_server import FakeServer, answer_of
from verax.bench.serve.client import ask
from verax.bench.serve.http import Target, fetch
from verax.bench.serve.traffic import Request
from verax.errors import InvalidParameterError, VeraxError

PROMPT = (5, 6, 7)


def ask_fake(server, *requests):
    async def main():
        async with server.serving() as target:
            return [await ask(target, request) for request in requests]

    return asyncio.run(main())


@pytest.mark.parametrize("cut_at", [0, 1, 7, 64])
def test_an_answer_is_whole_however_it_is_cut(cut_at):
    (answer,) = ask_fake(FakeServer(cut_at=cut_at), Request(0, PROMPT, 5))
    assert answer.completed
    assert answer.text == "".join(answer_of(list(PROMPT), 5))
    assert (answer.id, answer.prompt_tokens, answer.completion_tokens, len(answer.events)) == ("cmpl-0", 3, 5, 5)
    assert answer.sent <= answer.events[0] <= answer.events[-1] <= answer.ended
    assert answer.events == sorted(answer.events)


def test_the_request_is_a_greedy_stream_of_a_fixed_length():
    server = FakeServer()
    ask_fake(server, Request(0, PROMPT, 5))
    assert server.bodies == [
        {
            "prompt": [5, 6, 7],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            "model": "fake",
        }
    ]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization" not in server.heads[0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("429", "http 429"),
        ("cut", "lost: no end of the stream"),
        ("short", "lost: 4 tokens instead of 5"),
        ("error", "in the stream: server_error"),
        ("other id", "mixed: an event has another id"),
        ("garbage", "protocol: DecodeError"),
    ],
)
def test_a_failure_has_its_kind_and_the_next_request_is_not_affected(fault, error):
    failed, whole = ask_fake(FakeServer(faults={0: fault}), Request(0, PROMPT, 5), Request(1, PROMPT, 5))
    assert failed.error == error
    assert not failed.completed
    assert whole.completed


def test_a_server_that_is_not_there_or_speaks_something_else_is_a_failure_too():
    async def main():
        async def nonsense(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        wrong = await ask(Target("127.0.0.1", port), Request(0, PROMPT, 5))
        server.close()
        await server.wait_closed()
        return wrong, await ask(Target("127.0.0.1", port), Request(1, PROMPT, 5))

    wrong, absent = asyncio.run(main())
    assert wrong.error == "protocol: ValueError"
    assert absent.error == "connection: ConnectionRefusedError"


@pytest.mark.parametrize("leave_after", [0, 1, 3])
def test_a_client_that_leaves_has_read_so_many_events(leave_after):
    server = FakeServer(pause=0.005)
    (answer,) = ask_fake(server, Request(0, PROMPT, 200, leave_after=leave_after))
    assert answer.left
    assert answer.error is None
    assert not answer.completed
    assert len(answer.events) == leave_after


def test_a_slow_reader_gets_the_whole_answer():
    (answer,) = ask_fake(FakeServer(), Request(0, PROMPT, 300, slow=True))
    assert answer.completed
    assert answer.text == "".join(answer_of(list(PROMPT), 300))


def test_an_url_is_a_target():
    target = Target.of("http://localhost:9000/openai/v1/", api_key="secret")
    assert (target.host, target.port, target.path) == ("localhost", 9000, "/openai/v1")
    head = target.head("GET", "/metrics").decode()
    assert head.startswith("GET /metrics HTTP/1.1\r\nHost: localhost:9000\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert Target.of("http://example.org").port == 80
    for wrong in ("https://example.org", "localhost:8000", "http://"):
        with pytest.raises(InvalidParameterError, match=r"^url: expected one such as http://127"):
            Target.of(wrong)


def test_a_page_is_fetched_or_its_status_is_an_error():
    async def main():
        async with FakeServer(cut_at=3).serving() as target:
            page = await fetch(target, "/metrics")
            with pytest.raises(VeraxError, match=r"/nothing: status 404"):
                await fetch(target, "/nothing")
        with pytest.raises(VeraxError, match=r"/metrics: "):
            await fetch(target, "/metrics")
        return page

    assert "vllm:num_requests_running{" in asyncio.run(main())


def test_each_request_has_an_id_of_its_own_in_its_headers():
    server = FakeServer()
    answers = ask_fake(server, Request(0, PROMPT, 2), Request(0, PROMPT, 2))
    sent = [re.search(r"X-Request-Id: (\w+)\r\n", head)[1] for head in server.heads]
    assert sent == [answer.request_id for answer in answers]
    assert len(set(sent)) == 2


def test_connections_are_closed_behind_answers():
    requests = [Request(number, PROMPT, 2) for number in range(3)]
    server = FakeServer()
    assert all(answer.completed for answer in ask_fake(server, *requests))
    assert all("Connection: close" in head for head in itertools.islice(server.heads, 3))
    assert server.running == 0
