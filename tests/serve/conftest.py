"""One tiny engine of each kind, the application over them in this process and over HTTP, and helpers for both."""

import asyncio
import json
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from tests.support.tiny import CHAT_TEMPLATE, tiny_checkpoint
from tests.support.tiny_encoder import sentence_files, tiny_encoder
from verax import Encoder, VideoPipeline
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings
from verax.serve.run import _Process, bind, new_runner
from verax.text.engine.async_llm import AsyncLLM
from verax.text.engine.llm import LLM


@pytest.fixture(scope="session")
def new_llm(tmp_path_factory):
    """Makes an engine of random weights: its answers are noise, and always the same. All share compiled programs."""
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny", chat_template=template)
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4}
    options |= {"structured_outputs": True}
    return lambda: LLM(folder, dtype="float32", use_tqdm=False, **options)


@pytest.fixture(scope="session")
def served_llm(new_llm):
    return new_llm()


@pytest.fixture(scope="session")
def engine(served_llm):
    llm = AsyncLLM.from_llm(served_llm, max_queued_requests=16)
    yield llm
    asyncio.run(llm.shutdown())


@pytest.fixture(scope="session")
def served_encoder(tmp_path_factory):
    folder = tiny_encoder(tmp_path_factory.mktemp("encoder"))
    sentence_files(folder, max_seq_length=16)
    return Encoder(folder)


@pytest.fixture(scope="session")
def served_pipeline():
    return VideoPipeline.from_pretrained(show_progress=False)


class InstantPipeline:
    """A pipeline that checks requests as the real one does, and makes black clips at once."""

    def __init__(self, pipeline):
        self._pipeline = pipeline
        self.stages = SimpleNamespace(encode=lambda frames: np.zeros((1, 1, 16, 16, 16), np.float32))

    def __getattr__(self, name):
        return getattr(self._pipeline, name)

    def generate(self, request):
        return SimpleNamespace(frames=np.zeros((5, 16, 16, 3), np.uint8), fps=8)


@pytest.fixture(scope="session")
def new_server(served_llm, served_encoder, served_pipeline):
    """Makes a server of all engines; other models, names and settings by name."""

    def make(*, max_queued_requests=1024, names=("tiny",), reranker=None, pipeline=served_pipeline, **settings):
        return Server(
            llm=AsyncLLM.from_llm(served_llm, max_queued_requests=max_queued_requests),
            served_names=names,
            encoder=LazyModel("sentences", lambda: served_encoder),
            reranker=reranker and LazyModel("pairs", lambda: reranker),
            videos=LazyModel("clips", lambda: pipeline),
            settings=ServerSettings(port=0, **settings),
        )

    return make


@pytest.fixture
def slow(served_llm, monkeypatch):
    """An engine whose steps take a while."""
    advance = served_llm.engine.advance

    def slowly():
        time.sleep(0.03)
        return advance()

    monkeypatch.setattr(served_llm.engine, "advance", slowly)


@contextmanager
def serving(server):
    """Base URL of a server's process, which runs in a thread, for tests that need real connections."""
    started = threading.Event()
    process, listener = _Process(server, started.set), bind(server.settings)

    def serve():
        with new_runner() as runner:
            runner.run(process.serve(sockets=[listener]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        process.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def error_of(response, status=400):
    """Error object of an answer over HTTP, which has to be one."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


def named(field, *values):
    """Cases of a table: wrong values of a field, each with the field's name."""
    return [({field: value}, field) for value in values]


def events_of(text):
    """Data of the events of a stream, each of which has its type as its name."""
    events = []
    for name, data in (event.split("\n") for event in text.split("\n\n") if event and not event.startswith(":")):
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def joined(chunks, index=0):
    """The choice that the chunks of a stream make together, as clients join them."""
    whole = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert whole.get("finish_reason") is None
        whole = _added(whole, choice)
    return whole


def _added(first, second):
    """A value and what follows it: texts and lists are continued, and the calls of a list by their numbers."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        return {name: _added(first.get(name), second.get(name)) for name in first | second}
    if isinstance(first, list) and second and isinstance(second[0], dict) and "index" in second[0]:
        parts = {part["index"]: part for part in first}
        return [*(parts | {part["index"]: _added(parts.get(part["index"]), part) for part in second}).values()]
    return first if isinstance(first, int) else first + second


def prompt_of(api, messages, **fields):
    """Prompt that a conversation becomes, read back from its tokens."""
    tokens = api.ok("/tokenize", {"messages": messages, **fields})["tokens"]
    return api.ok("/detokenize", {"tokens": tokens})["prompt"]


def text_of(body, index=0):
    """Text of an answer of any API."""
    if "choices" in body:
        choice = body["choices"][index]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    return [part["text"] for item in body.get("output") or [body] for part in item["content"]]


class Api:
    """Client of an application in this process. Each call runs an event loop of its own."""

    def __init__(self, app):
        self.app = app

    def call(self, method, path, **options):
        async def main():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, **options)

        return asyncio.run(main())

    def get(self, path, **options):
        return self.call("GET", path, **options)

    def post(self, path, body, **options):
        return self.call("POST", path, json=body, **options)

    def ok(self, path, body):
        """Body of an answer that has to be one."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path, body, status=400):
        """Error object of an answer that has to be one."""
        error = error_of(self.post(path, body), status)
        if error["param"]:
            assert error["message"].startswith(error["param"])
        return error

    def events(self, path, body):
        """Data of the events of a stream with names."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return events_of(response.text)

    def stream(self, path, body):
        """Objects of a stream, which has to end with [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if not event.startswith(":")]
        assert events[-2:] == ["[DONE]", ""]
        return [json.loads(event) for event in events[:-2]]


@pytest.fixture(scope="session")
def make_api(engine):
    """Makes an application over the session's engine; settings by name."""

    def make(llm=engine, served_names=("tiny", "alias"), **settings):
        return Api(create_app(Server(llm=llm, served_names=served_names, settings=ServerSettings(**settings))))

    return make


@pytest.fixture(scope="session")
def api(make_api):
    return make_api()
