"""Ray Serve over two replicas: streams outlive the replica that began them; and nothing listens beyond this machine."""

import asyncio
import json
import os
import socket

import httpx
import psutil
import pytest

from tests.ray.cluster.conftest import ENGINE

APP = "verax-test"


@pytest.fixture(scope="module")
def address(cluster):
    """Base URL of two replicas with Ray Serve's HTTP."""
    from ray import serve

    from verax.ray import deployment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    # The ingress takes half a CPU.
    application = deployment(replicas=2, num_cpus=0.25, served_model_name="tiny", structured_outputs=True, **ENGINE)
    serve.run(application, name=APP)
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


REQUESTS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "seed": 2, "frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 1, "seed": 3, "logprobs": 2},
    {"temperature": 1, "seed": 4, "stop": ["zzz", "qqqq"]},
    {"temperature": 1, "seed": 5, "n": 2},
    {"temperature": 1, "seed": 6, "structured_outputs": {"regex": "[a-z ]{200}"}},
    {"temperature": 1, "seed": 7, "min_p": 0.05, "top_p": 0.9, "top_k": 50},
] * 2


async def stream(client, number, fields, begun):
    """Joined answers of a stream: text, tokens' log-probabilities and finish reason by index."""
    prompt = f"Once upon a time {number}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 90, "ignore_eos": "structured_outputs" not in fields}
    answers = {}
    async with client.stream("POST", "/v1/completions", json={**body, **fields, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            begun.add(number)
            for choice in event["choices"]:
                text, logprobs, reason = answers.get(choice["index"], ("", [], None))
                logprobs = logprobs + ((choice.get("logprobs") or {}).get("token_logprobs") or [])
                answers[choice["index"]] = text + choice["text"], logprobs, choice["finish_reason"] or reason
    return answers


async def streams(address, on_begun=None):
    """Answers of all requests at once; the function is called when each has begun."""
    begun = set()
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        tasks = [asyncio.create_task(stream(client, i, fields, begun)) for i, fields in enumerate(REQUESTS)]
        if on_begun is not None:
            while len(begun) < len(tasks) - 2 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.005)
            on_begun(sum(task.done() for task in tasks))
        return await asyncio.gather(*tasks)


def test_every_stream_ends_as_undisturbed_though_a_replica_is_killed(address, actors):
    undisturbed = asyncio.run(streams(address))
    done = []

    def kill(num_done):
        done.append(num_done)
        replica = actors("verax-replica")[0]
        replica.kill()

    disturbed = asyncio.run(streams(address, kill))
    assert done[0] < len(REQUESTS), "all streams had ended before a replica was killed"
    assert len(disturbed) == 16
    for fields, before, after in zip(REQUESTS, undisturbed, disturbed, strict=True):
        assert after.keys() == before.keys(), fields
        for index, (text, logprobs, reason) in after.items():
            assert (text, reason) == before[index][::2], fields
            assert reason is not None
            assert logprobs == pytest.approx(before[index][1], abs=1e-3)


def test_chats_and_refusals_pass_through(address):
    client = httpx.Client(base_url=address, timeout=60)
    assert client.get("/health").status_code == 200
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["usage"]["completion_tokens"] <= 8
    refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 400})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert client.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
    assert "vllm:num_requests_waiting" in client.get("/metrics").text


def test_only_this_machine_is_listened_to(address):
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    ours = [process for process in family if process.pid != os.getpid()]
    listening = {
        connection.laddr.ip: process.cmdline()[0]
        for process in ours
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}, listening
