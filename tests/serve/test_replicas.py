"""Several replicas at one port: the same answers, figures of each, and a server that is not healthy once one failed."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.replicas import as_replicas
from verax.text.engine.async_llm import AsyncLLM

ASKED = {"prompt": ["abc", "once upon a time", "a small fox", "the river"], "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def pair(new_llm):
    served = AsyncLLM.from_llm(as_replicas(new_llm(), new_llm()))
    yield served
    asyncio.run(served.shutdown())


def generated(api):
    """Generated tokens by replica."""
    families = text_string_to_metric_families(api.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["engine"]: s.value for s in samples if s.name == "vllm:generation_tokens_total"}


def test_answers_are_those_of_one_engine_and_metrics_those_of_each_replica(make_api, pair, api):
    both = make_api(llm=pair)
    body = {**ASKED, "temperature": 1.0, "seed": 3}
    answers = [choice["text"] for choice in both.ok("/v1/completions", body)["choices"]]
    assert answers == [choice["text"] for choice in api.ok("/v1/completions", body)["choices"]]
    assert generated(both) == {"0": 16, "1": 16}
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "temperature": 0}
    chunks = [chunk["choices"][0]["delta"].get("content") or "" for chunk in both.stream("/v1/chat/completions", chat)]
    assert "".join(chunks) == api.ok("/v1/chat/completions", chat)["choices"][0]["message"]["content"]


def test_a_server_with_a_dead_replica_says_so_everywhere(make_api, pair):
    api = make_api(llm=pair)
    assert api.get("/health").status_code == 200

    def advance():
        raise ZeroDivisionError("planted")

    pair.llm.engines[1].advance = advance
    assert api.post("/v1/completions", ASKED).json()["error"]["code"] == "engine_dead"
    health = api.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
    assert api.post("/v1/completions", {**ASKED, "prompt": "abc"}).json()["error"]["code"] == "engine_dead"
