"""The configurations of nginx and Caddy in docs/server.md: streams pass at once, clients that leave are noticed."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.chat_run import running
from tests.support.markdown import blocks
from verax.serve.http.middleware import Security
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.http.sse import DONE, EventStream, data_event

PAGE = Path(__file__).parents[2] / "docs/server.md"
HOST = "llm.example.com"
PATIENCE = 30
"""Seconds after which a test that waits has failed."""


class Upstream:
    """A server whose stream sends an event only after the client has confirmed the one before."""

    def __init__(self):
        self.read = threading.Semaphore(1)
        self.left = threading.Event()

    def app(self):
        server = Server(settings=ServerSettings(allowed_hosts=(HOST,)))
        routes = [
            Route("/v1/chat/completions", self.stream, methods=["POST"]),
            Route("/metrics", self.other),
            Route("/upload", self.upload, methods=["POST"]),
        ]
        return Starlette(routes=routes, middleware=[Middleware(Security, server)])

    async def stream(self, request):
        await request.body()  # as the server does: Caddy closes a connection whose answer comes before the body is sent
        return EventStream(self.events())

    async def events(self):
        try:
            for number in range(5):
                while not self.read.acquire(blocking=False):
                    await asyncio.sleep(0.01)
                yield data_event({"number": number})
            yield DONE
        finally:
            self.left.set()

    async def other(self, request):
        return PlainTextResponse("reached")

    async def upload(self, request):
        return PlainTextResponse(str(len(await request.body())))


def nginx(text, port, upstream, folder):
    """Command that runs the configuration of the page as nobody's service, and its file."""
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("127.0.0.1:8000", upstream)
    for name in ("fullchain", "privkey"):
        text = text.replace(f"/etc/letsencrypt/live/{HOST}/{name}.pem", str(folder / f"{name}.pem"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root;\n" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off;\n{user}pid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{text}\n}}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


def caddy(text, port, upstream, folder):
    own = f"https://{HOST}:{port} {{\n    tls {folder}/fullchain.pem {folder}/privkey.pem"
    text = text.replace(f"{HOST} {{", own).replace("127.0.0.1:8000", upstream)
    options = "{\n    admin off\n    auto_https disable_redirects\n    default_bind 127.0.0.1\n}\n"
    (folder / "Caddyfile").write_text(options + text + "\n")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


PROXIES = {"nginx": (nginx, "server {"), "caddy": (caddy, f"{HOST} {{")}


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request, tmp_path_factory):
    """A client of the proxy in front of a server."""
    for program in (request.param, "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    make, beginning = PROXIES[request.param]
    (text,) = [block.text for block in blocks(PAGE) if block.text.startswith(beginning)]
    folder = tmp_path_factory.mktemp(request.param)
    certificate(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    upstream = Upstream()
    with running(upstream.app()) as address, contextlib.ExitStack() as stack:
        command = make(text, port, address.removeprefix("http://"), folder)
        environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        log = stack.enter_context((folder / "log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        client = stack.enter_context(
            httpx.Client(base_url=f"https://127.0.0.1:{port}", headers={"Host": HOST}, verify=False, timeout=PATIENCE)
        )
        until = time.monotonic() + PATIENCE
        while not listens(client):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.05)
        yield client, upstream


def certificate(folder):
    names = ["-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem", "-subj", f"/CN={HOST}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-addext", f"subjectAltName=DNS:{HOST}"], check=True, capture_output=True)


NAMED = {"sni_hostname": HOST}


def listens(client):
    with contextlib.suppress(httpx.ConnectError):
        return client.get("/", extensions=NAMED)


def events(answer, upstream):
    """Events of a stream, each confirmed when it is here."""
    for line in answer.iter_lines():
        if line:
            yield line.removeprefix("data: ")
            upstream.read.release()


def test_each_event_passes_before_the_next_is_made(proxy):
    client, upstream = proxy
    with client.stream("POST", "/v1/chat/completions", json={}, extensions=NAMED) as answer:
        assert answer.status_code == 200
        assert [*events(answer, upstream)] == [*(f'{{"number":{number}}}' for number in range(5)), "[DONE]"]
    upstream.read = threading.Semaphore(1)


def test_a_client_that_leaves_ends_its_stream(proxy):
    client, upstream = proxy
    upstream.left.clear()
    with client.stream("POST", "/v1/chat/completions", json={}, extensions=NAMED) as answer:
        assert next(events(answer, upstream)) == '{"number":0}'
    assert upstream.left.wait(PATIENCE)
    upstream.read = threading.Semaphore(1)


def test_a_body_that_is_too_large_does_not_reach_the_server(proxy):
    client, _ = proxy
    assert client.post("/upload", content=b"x" * (60 << 20), extensions=NAMED).text == str(60 << 20)
    with contextlib.suppress(httpx.WriteError):  # the proxy may close the connection while the body is sent
        answer = client.post("/upload", content=b"x" * (65 << 20), extensions=NAMED)
        assert answer.status_code in (413, 502)  # 502: Caddy 2.6


def test_metrics_are_not_for_strangers(proxy):
    client, _ = proxy
    assert client.get("/metrics", extensions=NAMED).status_code == 403
