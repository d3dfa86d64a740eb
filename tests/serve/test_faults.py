"""Faults over real connections: each costs one request one error, leaves nothing, and the server continues."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.support.pictures import saved
from verax.serve import run
from verax.serve.http import middleware
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings
from verax.serve.run import bind
from verax.serve.video import jobs as store_module
from verax.serve.video import videos
from verax.serve.video.decode import MediaDecoder
from verax.text.engine.async_llm import AsyncLLM
from verax.video import files as video_files

pytest.importorskip("av")
pytest.importorskip("PIL.Image")

ASKED = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}
SHORT = {**ASKED, "max_tokens": 2}
LONG = {**ASKED, "max_tokens": 100}
CLIP = {"prompt": "a circle", "num_frames": 5, "num_inference_steps": 1}
JSON = {"content-type": "application/json"}


@pytest.fixture
def serve(http, served_llm, served_encoder, served_pipeline):
    """Context of a server with all engines, which a client reaches over HTTP; settings by name."""

    def serving(*, max_queued_requests=1024, **settings):
        server = Server(
            llm=AsyncLLM.from_llm(served_llm, max_queued_requests=max_queued_requests),
            served_names=("tiny",),
            encoder=LazyModel("sentences", lambda: served_encoder),
            videos=LazyModel("clips", lambda: served_pipeline),
            settings=ServerSettings(port=0, **settings),
        )
        return http(server)

    return serving


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


def finished(api, name):
    for _ in range(3000):
        video = api.get(f"/v1/videos/{name}").json()
        if video["status"] in ("completed", "failed"):
            return video
        time.sleep(0.02)
    raise AssertionError("the clip takes more than a minute")


def test_a_decoder_that_is_killed_costs_its_request_one_error(serve, monkeypatch):
    made = []

    def decoder(*arguments):
        made.append(MediaDecoder(*arguments))
        return made[-1]

    monkeypatch.setattr(videos, "MediaDecoder", decoder)

    def upload(api):
        return api.post("/v1/videos", data={name: str(value) for name, value in CLIP.items()}, files=picture)

    picture = {"input_reference": ("a.png", saved("PNG"))}
    with serve() as url, client_of(url) as api, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(upload, api)
        while not made[-1].pids:
            assert not answer.done()
            time.sleep(0.001)
        os.kill(next(iter(made[-1].pids)), signal.SIGKILL)
        error = error_of(answer.result())
        assert error["param"] == "input_reference"
        assert "SIGKILL" in error["message"]
        assert api.get("/v1/videos").json()["data"] == []
        video = upload(api)
        assert video.status_code == 200
        assert finished(api, video.json()["id"])["status"] == "completed"
        assert is_alive(api)


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_fails_the_clip_and_leaves_nothing(serve, monkeypatch):
    stores = []

    class Store(store_module.ClipStore):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            stores.append(self)

    def write(frames, path, fps):
        path.with_suffix(".half").write_bytes(b"half of a clip")
        link = path.with_suffix(".full.mp4")
        link.symlink_to("/dev/full")
        video_files._write_mp4(np.repeat(frames, 50, axis=0), link, fps, 0)

    monkeypatch.setattr(videos, "ClipStore", Store)
    with serve() as url, client_of(url) as api:
        with monkeypatch.context() as full:
            full.setattr(store_module, "write_clip", write)
            video = finished(api, api.post("/v1/videos", json=CLIP).json()["id"])
        assert (video["status"], video["error"]) == (
            "failed",
            {"code": "storage_full", "message": "storage: the disk is full"},
        )
        assert list(stores[0].folder.iterdir()) == []
        again = finished(api, api.post("/v1/videos", json=CLIP).json()["id"])
        assert again["status"] == "completed"
        assert is_alive(api)


def test_a_store_that_is_too_small_fails_the_clip(serve):
    with serve(max_video_storage_bytes=100) as url, client_of(url) as api:
        video = finished(api, api.post("/v1/videos", json=CLIP).json()["id"])
        assert (video["status"], video["error"]["code"]) == ("failed", "storage_full")
        assert "100 bytes" in video["error"]["message"]
        assert error_of(api.get(f"/v1/videos/{video['id']}/content"), 404)["code"] == "video_failed"


def test_a_full_queue_is_a_429_that_says_when_to_come_again(serve, served_llm, monkeypatch):
    advance = served_llm.engine.advance

    def slowly():
        time.sleep(0.01)
        return advance()

    monkeypatch.setattr(served_llm.engine, "advance", slowly)
    with serve(max_queued_requests=4) as url, client_of(url) as api:
        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: api.post("/v1/chat/completions", json=LONG), range(40)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert 0 < len(refused) < 40
        for answer in refused:
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        assert is_alive(api)


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "body"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "body"),
        (b'\xef\xbb\xbf{"messages": []}', "body"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "body"),
        (b"\xff" * 100_000, "body"),
        (b"\0" * 100, "body"),
        (b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "body"),
        (b'{"messages": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", "body"),
        (b"[" * 10_000, "body"),
        (b"[" * 4_000_000, "body"),
        (b'{"temperature": 1e400, "messages": [{"role": "user", "content": "a"}]}', "temperature"),
        (b'{"temperature": ' + b"1" * 100_000 + b"}", "temperature"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_damaged_body_is_one_error(shared, body, param):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/videos"):
        error = error_of(shared.post(path, content=body, headers=JSON))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param or (error["param"] is None and param == "body") or "completions" not in path
    assert is_alive(shared)


@pytest.fixture(scope="module")
def shared(http, served_llm, served_encoder, served_pipeline):
    """Client of a server that the tests of single requests share."""
    server = Server(
        llm=AsyncLLM.from_llm(served_llm),
        served_names=("tiny",),
        encoder=LazyModel("sentences", lambda: served_encoder),
        videos=LazyModel("clips", lambda: served_pipeline),
        settings=ServerSettings(port=0),
    )
    with http(server) as url, client_of(url) as api:
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


def test_names_in_bodies_and_queries_are_no_paths(shared):
    for name in ("../../etc/passwd", "a\0b", "/dev/zero", "a" * 100_000, "\u202e", "~root"):
        for path, body in {
            "/v1/chat/completions": SHORT,
            "/v1/embeddings": {"input": "a"},
            "/v1/videos": CLIP,
            "/tokenize": {"prompt": "a"},
        }.items():
            error = error_of(shared.post(path, json={**body, "model": name}), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert len(error["message"]) < 1000
        error_of(shared.get("/v1/stream", params={"conv_id": name[:5000]}), 404)
        error_of(shared.get("/v1/videos", params={"after": name[:5000]}))
        # The name of a file is not read.
        files = {"input_reference": (name.replace("\0", "")[:500], saved("PNG"))}
        form = {name: str(value) for name, value in CLIP.items()}
        made = shared.post("/v1/videos", data=form, files=files)
        assert made.status_code == 200, made.text
        deleted = shared.delete(f"/v1/videos/{made.json()['id']}")
        assert deleted.status_code == 200, deleted.text
        assert deleted.json()["deleted"]
    assert is_alive(shared)


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
