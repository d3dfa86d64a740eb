"""Faults, bounds and the process, over real connections: each fault costs one request one error and leaves nothing."""

import codecs
import concurrent.futures
import contextlib
import gzip
import json
import os
import signal
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.conftest import error_of, serving
from verax.errors import InvalidParameterError, StructuredOutputError
from verax.serve.http import middleware
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.run import bind, run
from verax.serve.video import videos
from verax.text.engine.async_llm import AsyncLLM
from verax.text.features import grammar

pytest.importorskip("av")
pytest.importorskip("PIL.Image")

ASKED = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True}
SHORT = {**ASKED, "max_tokens": 2}
LONG = {**ASKED, "max_tokens": 100}
CLIP = {"prompt": "a circle", "num_frames": 5, "num_inference_steps": 1}
JSON = {"content-type": "application/json"}
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
BODY = b'{"prompt":"a"}'


@pytest.fixture
def serve(new_server):
    """Context of a server with all engines, which a client reaches over HTTP; settings by name."""
    return lambda **settings: serving(new_server(**settings))


def client_of(url):
    return httpx.Client(base_url=url, timeout=60)


def is_alive(api):
    """True if the server answers, and the engine too."""
    answer = api.post("/v1/chat/completions", json=SHORT)
    return (api.get("/health").status_code, answer.status_code) == (200, 200)


def sent(url, *pieces):
    """All that the server answers to bytes on a connection of their own, also if it closes that before it has them."""
    address, answer = urlsplit(url), b""
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        connection.settimeout(60)
        with suppress(ConnectionError):  # what came before can be read all the same
            for piece in pieces:
                connection.sendall(piece)
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return answer


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
    outcomes = {}

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
                outcomes["events"] = [line for line in lines if line]
            outcomes["answers"] = {path: answer.result() for path, answer in answers.items()}

    monkeypatch.setattr("verax.serve.run.LAST_ANSWERS", 30.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        tasks = []
        try:
            status = run(server, bind(server.settings), lambda url: tasks.append(pool.submit(clients, url)))
        finally:
            monkeypatch.undo()
            served_llm.engine._in_flight = None
            for request_id in list(served_llm.engine._requests):
                served_llm.engine.abort(request_id)
        tasks[0].result()
    assert status == 1
    assert json.loads(outcomes["events"][-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    for path, answer in outcomes["answers"].items():
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
def shared(new_server):
    """Client of a server that the tests of single requests share."""
    with serving(new_server()) as url, client_of(url) as api:
        yield api


@pytest.fixture
def raw(shared):
    """`sent` to the shared server, which answers others afterwards."""
    yield lambda *pieces: sent(str(shared.base_url).rstrip("/"), *pieces)
    assert is_alive(shared)


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00b", "%00"),
        *("..%5c..%5cwindows", "/etc/passwd", "%ff%fe", "%e2%80%ae", "%0d%0aX-Injected:%201", "video_" + "0" * 32),
        "a" * 8000,
    ],
)
def test_a_name_is_looked_up_and_is_not_a_path(shared, raw, name):
    paths = [
        *("/v1/models/{}", "/v1/videos/{}", "/v1/videos/{}/content", "/v1/videos/{}/events", "/static/{}/page.js"),
        *("/static/x/{}", "/static/reports/x/{}", "/{}"),
    ]
    for path in paths:
        answer = raw(
            b"GET " + path.format(name).encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
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
def test_too_many_or_too_long_headers_are_cut_off(raw, headers):
    answer = raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", headers, b"\r\n\r\n")
    # The server closes while the client still sends: its answer may be lost, or never read.
    assert not answer or b" 400 " in answer.splitlines()[0] or b" 431 " in answer.splitlines()[0]
    many = b"\r\n".join(b"X%d: a" % i for i in range(1000))
    answer = raw(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + many + b"\r\n\r\n")
    assert b" 200 " in answer.splitlines()[0]


@pytest.mark.parametrize("cut", [0, 10_000])
def test_a_head_after_a_long_body_in_the_same_bytes_is_not_long(raw, cut):
    body = b'{"prompt":"' + b"a" * 20_000 + b'"}'
    first = HEAD.replace(b"14", b"%d" % len(body)) + body
    second = HEAD.replace(b"Host", b"Connection: close\r\nHost") + BODY
    answer = raw(first[:cut], first[cut:] + second[:30], second[30:])
    assert answer.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "rest", [b"5;", b"3\r\n{} \r\n0\r\nX", b"3\r\n{} \r\n0\r\nX: "], ids=["extension", "name", "trailer"]
)
def test_what_a_body_has_around_it_is_bounded(raw, rest):
    head = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(head, rest, *[b"a" * 100_000] * 20)
    assert not answer or b" 431 " in answer.splitlines()[0]


@pytest.mark.parametrize(
    "line",
    [
        *(b"GET /\xff HTTP/1.1", b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT a:80 HTTP/1.1"),
        *(b"GET http://[ HTTP/1.1", b"GET //evil.example/ HTTP/1.1", b"GET / HTTP/9.9", b"\x16\x03\x01\x02"),
        *(b"PRI * HTTP/2.0", b"GET / SPAM/1.1", b"G\0T / HTTP/1.1"),
    ],
)
def test_an_odd_request_line_is_one_error(raw, line):
    answer = raw(line + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.splitlines()[0].split()[1] in (b"400", b"404", b"405")
    assert json.loads(body)["error"]["type"] in ("invalid_request_error", "not_found_error")


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        (UPGRADE, BODY, 200, None),  # Java's client asks so with every first request of a connection
        (UPGRADE + b"\r\nTransfer-Encoding: chunked", b"e\r\n" + BODY + b"\r\n0\r\n\r\n", 200, None),
        (UPGRADE + b"\r\nTransfer-Encoding: chunked", b"x", 400, None),
        (b"Connection: close", codecs.BOM_UTF8 + BODY, 200, None),
        (b"Connection: close\r\nContent-Encoding: gzip", gzip.compress(BODY, mtime=0), 415, "content-encoding"),
        (b"Connection: close\r\nTransfer-Encoding: gzip, chunked", b"0\r\n\r\n", 415, "transfer-encoding"),
        (b"Connection: close\r\nOrigin: http://[", BODY, 403, "origin"),
        (b"Connection: close", b'{"prompt": NaN}', 400, None),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_an_odd_request_is_answered_once(raw, headers, body, status, param, together):
    length = b"" if b"chunked" in headers else b"Content-Length: %d\r\n" % len(body)
    head = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\n" + length + headers + b"\r\n\r\n"
    answer = raw(*([head + body] if together else [head, body]))
    assert answer.count(b"HTTP/1.1") == 1
    assert b" %d " % status in answer.splitlines()[0]
    result = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert result["count"] if status == 200 else result["error"]["param"] == param
    assert "NaN" not in str(body) or "at 'NaN}'" in result["error"]["message"]


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


@pytest.mark.parametrize("cut", [0, 20, len(HEAD) + 5], ids=["unused connection", "head", "body"])
def test_a_server_that_stood_still_reads_what_came_in_meanwhile_before_it_gives_a_client_up(serve, monkeypatch, cut):
    def stand_still(self):
        time.sleep(0.8)
        return True

    monkeypatch.setattr("verax.serve.run.KEEP_ALIVE", 0.3)
    with serve(slow_client_timeout=0.3) as url, concurrent.futures.ThreadPoolExecutor() as pool:
        address = urlsplit(url)
        with closing(socket.create_connection((address.hostname, address.port))) as connection:
            connection.settimeout(60)
            connection.sendall(HEAD + BODY)
            assert b" 200 " in connection.recv(65536)
            connection.sendall((HEAD + BODY)[:cut])
            monkeypatch.setattr(AsyncLLM, "is_running", property(stand_still))
            standing = pool.submit(httpx.get, f"{url}/health")
            time.sleep(0.15)
            connection.sendall((HEAD + BODY)[cut:])
            assert b" 200 " in connection.recv(65536)
        standing.result()
        monkeypatch.undo()


# Requests that ask for more work than a request may: each is one error, and nobody else waits for it.


CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETE, {"prompt": "a" * 5_000_000}, 400, "prompt"),
        (COMPLETE, {"prompt": [1] * 2_000_000}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 257}, 400, "prompt"),
        (COMPLETE, {"prompt": ["a"] * 256, "n": 8}, 429, None),
        (COMPLETE, {"prompt": "a", "n": 128}, 400, "n"),
        (COMPLETE, {"prompt": "a", "stop": "z" * 1025}, 400, "stop"),
        (COMPLETE, {"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
        (COMPLETE, {"prompt": "a", "stop_token_ids": [1] * 100_000}, 400, "stop_token_ids"),
        (COMPLETE, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), 1)}, 400, "logit_bias"),
        (COMPLETE, {"prompt": "a", "guided_choice": ["a" * i for i in range(1, 1000)]}, 400, "guided_choice"),
        (COMPLETE, {"prompt": "a", "guided_regex": "(a{1000}){1000}"}, 400, "guided_regex"),
        (COMPLETE, {"prompt": "a", "guided_regex": "(" * 30_000 + ")" * 30_000}, 400, "guided_regex"),
        (COMPLETE, {"prompt": "a", "guided_regex": "a" * 100_000}, 400, "guided_regex"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_000}]}, 400, "messages"),
        (CHAT, {**ASKED, "stop": ["z" * 500_000] * 4}, 400, "stop"),
        (CHAT, {**ASKED, "tools": [TOOL] * 10_000, "tool_choice": "required"}, 400, None),
        (CHAT, {**ASKED, "chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, 400, "chat_template_kwargs"),
        (CHAT, {**ASKED, "chat_template_kwargs": {"__class__": 1}}, 400, "chat_template_kwargs"),
        (CHAT, {**ASKED, "chat_template_kwargs": {"a": "b" * 9_000_000}}, 413, "body"),
        (EMBED, {"input": ["a"] * 2049}, 400, "input"),
        (EMBED, {"input": "a " * 1_000_000}, 400, "input"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_too_much_work_is_one_error(shared, path, body, status, param):
    response = shared.post(path, json=body)
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert error["param"] == param or param is None
    assert len(error["message"]) < 1000
    assert after_the_queue(shared).status_code == 200


def after_the_queue(shared):
    """A short answer, as soon as what was refused in part has left the queue."""
    for _ in range(1000):
        answer = shared.post(CHAT, json={**ASKED, "max_tokens": 1})
        if answer.status_code != 429:
            break
        time.sleep(0.01)
    return answer


def test_megabytes_of_text_are_not_tokenised_for_a_vector(shared, served_encoder, monkeypatch):
    tokenised, tokenize = [], served_encoder.tokenize

    def watched(texts, **options):
        tokenised.extend(map(len, texts))
        return tokenize(texts, **options)

    monkeypatch.setattr(served_encoder, "tokenize", watched)
    long = "the cat " * 500_000
    error = shared.post(EMBED, json={"input": ["a", long]}).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["n_prompt_tokens"] > error["n_ctx"] == 16
    cut = shared.post(EMBED, json={"input": long, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 16
    assert max(tokenised) < 2000


def test_as_many_texts_as_openai_takes_are_embedded(shared):
    outcomes = shared.post(EMBED, json={"input": ["a"] * 2048}).json()["data"]
    assert [one["index"] for one in outcomes] == list(range(2048))


def test_a_prompt_of_megabytes_is_refused_without_being_tokenised(shared, served_llm, monkeypatch):
    tokenised = []
    encode = type(served_llm.tokenizer).encode
    monkeypatch.setattr(
        type(served_llm.tokenizer),
        "encode",
        lambda self, text, **options: tokenised.append(len(text)) or encode(self, text, **options),
    )
    long = "a" * 1_000_000
    for path, body in {CHAT: {"messages": [{"role": "user", "content": long}]}, COMPLETE: {"prompt": long}}.items():
        error = shared.post(path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
        assert error["n_prompt_tokens"] > error["n_ctx"] == 128
    assert not tokenised
    assert shared.post("/tokenize", json={"prompt": "a" * 100_000}).json()["count"] > 128


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_takes_too_long_ends_its_request_alone(shared, monkeypatch, stream):
    def fail(*_):
        raise StructuredOutputError("structured_outputs: the grammar is too ambiguous")

    monkeypatch.setattr(grammar.GrammarMatcher, "fill", fail)
    form = {"max_tokens": 50, "structured_outputs": {"grammar": 'start: s\ns: s s | "a" | "b" | "ab"'}}
    with shared.stream("POST", COMPLETE, json={"prompt": "abc", "max_tokens": 100, "stream": True}) as other:
        lines = other.iter_lines()
        next(lines)
        response = shared.post(COMPLETE, json={"prompt": "abc", "stream": stream, **form})
        rest = [line for line in lines if line]
    # The first mask fails, so that a stream, too, has its real status.
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert "ambiguous" in error["message"]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")


def test_nobody_waits_for_grammars_that_compile(shared, monkeypatch):
    done, compile_grammar = threading.Event(), grammar.GrammarCompiler.compile

    def slow(self, wanted):
        assert done.wait(60)
        return compile_grammar(self, wanted)

    monkeypatch.setattr(grammar.GrammarCompiler, "compile", slow)
    formed = {"prompt": "abc", "max_tokens": 2, "guided_choice": ["a", "b"]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            waiting = [pool.submit(shared.post, COMPLETE, json=formed) for _ in range(4)]
            assert shared.post(CHAT, json={**ASKED, "max_tokens": 1}).status_code == 200
            assert not any(answer.done() for answer in waiting)
        finally:
            done.set()
        assert [answer.result().status_code for answer in waiting] == [200] * 4


# The process: clients that go away, and signals.
@pytest.fixture
def run_client(served_llm):
    """Runs a server in this thread while a client runs in another, then ends it by SIGTERM."""

    def call(client, **settings):
        llm = AsyncLLM.from_llm(served_llm)
        server = Server(llm=llm, served_names=("tiny",), settings=ServerSettings(port=0, **settings))
        results, errors = [], []

        def work(url):
            try:
                results.append(client(url, llm))
            except BaseException as error:
                errors.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        def start(url):
            threading.Thread(target=work, args=(url,), daemon=True).start()

        status = run(server, bind(server.settings), start)
        for error in errors:
            raise error
        return status, results[0]

    return call


def idle(llm):
    """True once the engine has nothing to do; waits for it."""
    for _ in range(500):
        stats = llm.stats()
        if stats.num_requests_running == stats.num_requests_waiting == 0:
            return True
        time.sleep(0.02)
    return False


def test_a_client_that_goes_away_ends_its_request(run_client, slow, served_llm):
    def client(url, llm):
        with httpx.Client(base_url=url) as api:
            with api.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_lines())
            assert idle(llm)
            streamed = llm.stats().generation_tokens
            with pytest.raises(httpx.ReadTimeout):
                api.post("/v1/chat/completions", json=LONG, timeout=0.3)
            assert idle(llm)
            return streamed, llm.stats().generation_tokens - streamed

    begin = served_llm.engine.num_generated_tokens
    status, (streamed, whole) = run_client(client)
    assert status == 0
    # Neither answer was generated to its end.
    assert streamed - begin < LONG["max_tokens"]
    assert whole < LONG["max_tokens"]


def posted(path, body):
    """Bytes of a request."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


def test_a_client_that_has_sent_its_next_request_already_ends_the_one_before_it(run_client, slow, served_llm, caplog):
    def client(url, llm):
        address = urlsplit(url)
        with closing(socket.create_connection((address.hostname, address.port))) as connection:
            connection.sendall(posted(CHAT, {**LONG, "stream": True}) + posted(CHAT, LONG))
            assert b" 200 " in connection.recv(4096)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert idle(llm)
        return llm.stats().generation_tokens

    begin = served_llm.engine.num_generated_tokens
    _, end = run_client(client)
    assert end - begin < LONG["max_tokens"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux cuts such a connection")
@pytest.mark.parametrize("stream", [False, True])
def test_the_connection_of_a_client_that_does_not_read_ends_with_all_that_waits_for_it(serve, monkeypatch, stream):
    def bind_small(settings):
        listener = bind(settings)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr("tests.serve.conftest.bind", bind_small)
    body = {"prompt": "a", "n": 8, "max_tokens": 100, "ignore_eos": True, "logprobs": 5, "stream": stream}
    with serve(slow_client_timeout=0.5) as url, closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(url)
        connection.connect((address.hostname, address.port))
        connection.sendall(posted(COMPLETE, body))
        for _ in range(100):
            time.sleep(0.1)
            try:
                connection.send(b"\r\n")
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(run_client, slow):
    def client(url, llm):
        with httpx.Client(base_url=url) as api:
            with api.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                refused = httpx.get(f"{url}/v1/models")
                while refused.status_code == 200:
                    refused = httpx.get(f"{url}/v1/models")
                rest = [line for line in lines if line]
            return refused.status_code, refused.json()["error"]["code"], rest[-1]

    # The signal that the fixture sends at the end is a second one: it ends the server at once, which is done already.
    status, (code, name, last) = run_client(client)
    assert (status, code, name, last) == (0, 503, "draining", "data: [DONE]")


@pytest.mark.parametrize(("timeout", "signals"), [(0.0, 1), (60.0, 2)])
def test_what_does_not_finish_in_time_or_until_a_second_signal_is_aborted_and_says_so(
    run_client, slow, timeout, signals
):
    def client(url, llm):
        with (
            concurrent.futures.ThreadPoolExecutor() as pool,
            httpx.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            whole = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=LONG)
            while llm.stats().num_requests_running < 2:
                time.sleep(0.01)
            for _ in range(signals - 1):
                os.kill(os.getpid(), signal.SIGTERM)
                while httpx.get(f"{url}/health").status_code == 200:  # two at once would be one
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            return [line for line in lines if line][-1], error_of(whole.result(), 503)

    status, (last, error) = run_client(client, shutdown_timeout=timeout)
    assert status == 0
    assert json.loads(last.removeprefix("data: "))["error"] == error
    assert error["code"] == "aborted"


def test_an_address_in_use_is_an_error_that_names_the_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameterError, match=f"port: cannot listen at 127.0.0.1 port {port}"):
            bind(ServerSettings(port=port))
