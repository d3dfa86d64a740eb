"""Faults over real connections: each costs one request one error, leaves nothing, and the server continues."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import pytest

from verax.serve import run
from verax.serve.http import middleware
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.run import bind
from verax.serve.video import videos
from verax.text.engine.async_llm import AsyncLLM

pytest.importorskip("av")
pytest.importorskip("PIL.Image")

ASKED = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}
SHORT = {**ASKED, "max_tokens": 2}
LONG = {**ASKED, "max_tokens": 100}
CLIP = {"prompt": "a circle", "num_frames": 5, "num_inference_steps": 1}
JSON = {"content-type": "application/json"}


@pytest.fixture
def serve(http, new_server):
    """Context of a server with all engines, which a client reaches over HTTP; settings by name."""
    return lambda **settings: http(new_server(**settings))


def client_of(url):
    return httpx.Client(base_url=url, timeout=60)


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


def is_alive(api):
    """True if the server answers, and the engine too."""
    answer = api.post("/v1/chat/completions", json=SHORT)
    return (api.get("/health").status_code, answer.status_code) == (200, 200)


def sent(url, *pieces):
    """All that the server answers to bytes on a connection of their own; None if it cuts that."""
    address = urlsplit(url)
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        connection.settimeout(60)
        try:
            for piece in pieces:
                connection.sendall(piece)
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            return None


def test_an_engine_that_fails_fails_every_request_of_every_api(served_llm, monkeypatch):
    """Those that stream and those that wait for a whole answer; the process ends with status 1."""
    advance, broken = served_llm.engine.advance, threading.Event()

    def fail():
        if broken.is_set():
            raise RuntimeError("device lost")
        time.sleep(0.01)
        return advance()

    monkeypatch.setattr(served_llm.engine, "advance", fail)
    server = Server(llm=AsyncLLM.from_llm(served_llm), served_names=("tiny",), settings=ServerSettings(port=0))
    found = {}

    def clients(url):
        with client_of(url) as api, concurrent.futures.ThreadPoolExecutor() as pool:
            whole = {
                "/v1/chat/completions": LONG,
                "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 100, "ignore_eos": True},
                "/v1/responses": {"input": "abc", "max_output_tokens": 100},
                "/v1/messages": {"messages": ASKED["messages"], "max_tokens": 100},
            }
            answers = {path: pool.submit(api.post, path, json=body) for path, body in whole.items()}
            with api.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                broken.set()
                found["events"] = [line for line in lines if line]
            found["answers"] = {path: answer.result() for path, answer in answers.items()}

    monkeypatch.setattr(run, "LAST_ANSWERS", 30.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        tasks = []
        try:
            status = run.run(server, bind(server.settings), lambda url: tasks.append(pool.submit(clients, url)))
        finally:
            monkeypatch.undo()
            served_llm.engine._in_flight = None
            for request_id in list(served_llm.engine._requests):
                served_llm.engine.abort(request_id)
        tasks[0].result()
    assert status == 1
    assert json.loads(found["events"][-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    for path, answer in found["answers"].items():
        assert answer.status_code == 500, path
        assert "the engine has failed" in answer.json()["error"]["message"]


def test_full_queues_of_clips_and_sentences_are_429s(serve, served_pipeline, served_encoder, monkeypatch):
    may_go, encoding = threading.Event(), threading.Event()
    generate, encode = served_pipeline.generate, served_encoder.encode_tokens
    monkeypatch.setattr(type(served_pipeline), "generate", lambda self, request: may_go.wait(60) and generate(request))

    def encode_later(*tokens, **options):
        encoding.set()
        assert may_go.wait(60)
        return encode(*tokens, **options)

    monkeypatch.setattr(served_encoder, "encode_tokens", encode_later)
    limits = {"max_queued_videos": 1, "max_embedding_inputs": 3, "max_queued_embedding_inputs": 3}
    with serve(**limits) as url, client_of(url) as api, concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            first = api.post("/v1/videos", json=CLIP).json()["id"]
            while api.get(f"/v1/videos/{first}").json()["status"] == "queued":
                time.sleep(0.01)
            assert api.post("/v1/videos", json=CLIP).status_code == 200
            waiting = pool.submit(api.post, "/v1/embeddings", json={"input": ["a", "the", "cat"]})
            assert encoding.wait(60)
            refused = {"/v1/videos": CLIP, "/v1/embeddings": {"input": "a"}}
            for path, body in refused.items():
                answer = api.post(path, json=body)
                assert error_of(answer, 429)["code"] == "queue_full"
                assert answer.headers["retry-after"]
        finally:
            may_go.set()
        assert waiting.result().status_code == 200
        assert is_alive(api)


def test_bodies_of_clips_that_are_read_at_once_are_bounded(serve):
    head = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 1000\r\n\r\n{"

    def create_until(status, body):
        answer = api.post("/v1/videos", json=body)
        while answer.status_code != status:
            time.sleep(0.02)
            answer = api.post("/v1/videos", json=body)
        return answer

    with serve(slow_client_timeout=100.0) as url, client_of(url) as api, contextlib.ExitStack() as uploads:
        address = urlsplit(url)
        for _ in range(videos.MAX_UPLOADS):
            upload = uploads.enter_context(closing(socket.create_connection((address.hostname, address.port))))
            upload.sendall(head)
        refused = error_of(create_until(429, {"prompt": 1}), 429)
        assert refused["code"] == "queue_full"
        assert "are being uploaded" in refused["message"]
        uploads.close()
        assert create_until(200, CLIP).json()["object"] == "video"
        assert is_alive(api)


@pytest.fixture(scope="module")
def shared(http, new_server):
    """Client of a server that the tests of single requests share."""
    with http(new_server()) as url, client_of(url) as api:
        yield api


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00b", "%00"),
        *("..%5c..%5cwindows", "/etc/passwd", "%ff%fe", "%e2%80%ae", "%0d%0aX-Injected:%201", "video_" + "0" * 32),
        "a" * 8000,
    ],
)
def test_a_name_is_looked_up_and_is_no_path(shared, name):
    paths = [
        *("/v1/models/{}", "/v1/videos/{}", "/v1/videos/{}/content", "/v1/videos/{}/events", "/static/{}/page.js"),
        *("/static/x/{}", "/static/reports/x/{}", "/{}"),
    ]
    for path in paths:
        answer = sent(
            str(shared.base_url).rstrip("/"),
            b"GET " + path.format(name).encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        )
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 404 " in head.splitlines()[0], (path, head)
        assert b"injected" not in head.lower()
        assert json.loads(body)["error"]["type"] == "not_found_error"
    assert error_of(shared.delete(f"/v1/videos/{name}"), 404)


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"a" * 1_000_000, b"\r\n".join(b"X%d: a" % i for i in range(100_000)), b"X" * 1_000_000 + b": a"],
    ids=["one of 1 MB", "100,000", "a name of 1 MB"],
)
def test_too_many_or_too_long_headers_are_cut_off(shared, headers):
    answer = sent(
        str(shared.base_url).rstrip("/"), b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", headers, b"\r\n\r\n"
    )
    # The server closes while the client still sends: its answer may be lost, or never read.
    assert not answer or b" 400 " in answer.splitlines()[0] or b" 431 " in answer.splitlines()[0]
    many = b"\r\n".join(b"X%d: a" % i for i in range(1000))
    answer = sent(
        str(shared.base_url).rstrip("/"),
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + many + b"\r\n\r\n",
    )
    assert b" 200 " in answer.splitlines()[0]
    assert is_alive(shared)


@pytest.mark.parametrize(
    "line",
    [
        *(b"GET /\xff HTTP/1.1", b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT a:80 HTTP/1.1"),
        *(b"GET http://[ HTTP/1.1", b"GET //evil.example/ HTTP/1.1", b"GET / HTTP/9.9", b"\x16\x03\x01\x02"),
        *(b"PRI * HTTP/2.0", b"GET / SPAM/1.1", b"G\0T / HTTP/1.1"),
    ],
)
def test_an_odd_request_line_is_one_error(shared, line):
    url = str(shared.base_url).rstrip("/")
    answer = sent(url, line + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.splitlines()[0].split()[1] in (b"400", b"404", b"405")
    assert json.loads(body)["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert is_alive(shared)


def test_headers_that_never_end_have_a_limited_time(serve):
    with serve(slow_client_timeout=0.3) as url, client_of(url) as api:
        silent = sent(url)
        begun = sent(url, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: a")
        head, _, body = begun.partition(b"\r\n\r\n")
        assert silent == b""
        assert b" 408 " in head.splitlines()[0]
        assert json.loads(body)["error"]["message"].startswith("headers: ")
        # An answer that takes longer than that is not cut, nor the connection that waits for the next request.
        assert is_alive(api)
        ended = sent(url, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /health HTTP/1.1\r\nHost:")
        assert ended.count(b"HTTP/1.1 200") == 1
        assert ended.count(b"HTTP/1.1 408") == 1


def test_a_slow_body_has_a_limited_time(serve, monkeypatch):
    def bytewise():
        for _ in range(10_000):
            time.sleep(0.05)
            yield b"["

    body = json.dumps(SHORT).encode()
    with serve(slow_client_timeout=1.0) as url, client_of(url) as api:
        for path, framing, part in (
            ("/v1/chat/completions", b"Transfer-Encoding: chunked", b"1\r\n{\r\n"),
            ("/v1/videos", b"Content-Length: %d" % len(body), body[:-1]),
        ):
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode()
            start, _, rest = sent(url, head + framing + b"\r\n\r\n", part).partition(b"\r\n\r\n")
            assert b" 408 " in start.splitlines()[0]
            assert json.loads(rest)["error"]["param"] == "body"
        try:
            dripped = api.post("/v1/chat/completions", content=bytewise(), headers=JSON).status_code
        except httpx.TransportError:
            dripped = None  # the server has closed while the client still sends
        assert dripped in (408, None)
        # A body that comes quickly enough may take longer than the timeout in all.
        monkeypatch.setattr(middleware, "MIN_BODY_RATE", 1)
        pieces = (piece for seconds, piece in ((0, body[:-1]), (1.5, body[-1:])) if time.sleep(seconds) is None)
        assert api.post("/v1/chat/completions", content=pieces, headers=JSON).status_code == 200
        assert is_alive(api)
