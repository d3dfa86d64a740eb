"""The client, and servers that a benchmark starts: every failure has its kind, and no server is left."""

import asyncio
import sys

import psutil
import pytest

from tests.support.fake_server import FakeServer, answer_of
from verax.bench.serve import client as module
from verax.bench.serve.client import Client, started
from verax.bench.serve.load import Request
from verax.errors import InvalidParameterError, VeraxError

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
    assert (answer.id, answer.prompt_tokens, answer.completion_tokens, len(answer.events)) == ("cmpl-0", 3, 5, 5)
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
    assert (model, "vllm:num_requests_running{" in page) == ("fake", True)
    assert "authorization: bearer secret\r\n" in server.heads[0].lower()


def test_a_server_is_ready_in_the_block_and_gone_after_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "health").write_text("ready")

    async def main():
        async with started(lambda port: [*PYTHON, "http.server", str(port), "--bind", "127.0.0.1"]) as url:
            client = Client(url)
            text = await client.fetch("/health")
            await client.close()
        with pytest.raises(VeraxError):
            await Client(url).fetch("/health")
        return text

    assert asyncio.run(main()) == "ready"


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
