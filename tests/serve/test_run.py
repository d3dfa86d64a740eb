"""The process: real connections, clients that go away, signals, and an engine that fails."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import closing

import httpx
import pytest

from verax.errors import InvalidParameterError
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.run import bind, run
from verax.text.engine.async_llm import AsyncLLM

LONG = {"messages": [{"role": "user", "content": "abc"}], "ignore_eos": True, "max_tokens": 100}
SHORT = {**LONG, "max_tokens": 5}


@pytest.fixture
def serve(served_llm):
    """Runs a server in this thread while a client runs in another, then ends it by SIGTERM."""

    def serving(client, **settings):
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

    return serving


def events_of(response):
    return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def idle(llm):
    """True once the engine has nothing to do; waits for it."""
    for _ in range(500):
        stats = llm.stats()
        if stats.num_requests_running == stats.num_requests_waiting == 0:
            return True
        time.sleep(0.02)
    return False


def test_openais_client_is_served(serve):
    openai = pytest.importorskip("openai")

    def client(url, llm):
        strict = {"max_retries": 0, "_strict_response_validation": True}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", **strict) as api:
            options = {"messages": LONG["messages"], "max_tokens": 10, "seed": 1, "temperature": 1.0}
            whole = api.chat.completions.create(model="tiny", **options)
            chunks = list(api.chat.completions.create(model="tiny", stream=True, **options))
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert content == whole.choices[0].message.content
            assert api.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].finish_reason
            assert [model.id for model in api.models.list()] == ["tiny"]
            with pytest.raises(openai.NotFoundError) as missing:
                api.chat.completions.create(model="gpt-9", messages=LONG["messages"])
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as wrong:
                api.chat.completions.create(model="tiny", messages=LONG["messages"], n=1000)
            assert wrong.value.param == "n"
        return True

    assert serve(client) == (0, True)


def test_a_client_that_goes_away_ends_its_request(serve, slow, served_llm):
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
    status, (streamed, whole) = serve(client)
    assert status == 0
    # Neither answer was generated to its end.
    assert streamed - begin < LONG["max_tokens"]
    assert whole < LONG["max_tokens"]


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(serve, slow):
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
    status, (code, name, last) = serve(client)
    assert (status, code, name, last) == (0, 503, "draining", "data: [DONE]")


def test_what_does_not_finish_in_time_is_aborted_and_says_so(serve, slow):
    def client(url, llm):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            return [line for line in lines if line][-1]

    status, last = serve(client, shutdown_timeout=0.0)
    assert status == 0
    assert json.loads(last.removeprefix("data: "))["error"]["type"] in ("unavailable_error", "server_error")


def test_an_address_in_use_is_an_error_that_names_the_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidParameterError, match=f"port: cannot listen at 127.0.0.1 port {port}"):
            bind(ServerSettings(port=port))
