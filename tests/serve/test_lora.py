"""Adapters over HTTP: listed with their base, chosen by a request's `model`."""

import asyncio

import pytest

from tests.serve.conftest import Api
from tests.support.adapters import adapter_weights, linear_sizes, save_adapter
from tests.support.tiny import random_weights, tiny_checkpoint, tiny_config
from verax import LLM, AsyncLLM, LoRARequest
from verax.errors import InvalidParameterError
from verax.serve.app import create_app
from verax.serve.http.server import Server

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "abc"}], **GREEDY}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    sizes = linear_sizes(random_weights(tiny_config()))
    folder = save_adapter(tmp_path_factory.mktemp("adapters") / "fox", adapter_weights(sizes, spread=0.5))
    return LoRARequest("fox", 1, str(folder))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    return LLM(folder, dtype="float32", use_tqdm=False, enable_lora=True, max_lora_rank=4, **sizes)


@pytest.fixture(scope="module")
def api(llm, adapter):
    engine = AsyncLLM.from_llm(llm)
    yield Api(create_app(Server(llm=engine, served_names=("tiny", "alias"), adapters={"fox": adapter})))
    asyncio.run(engine.shutdown())


def test_adapters_are_listed_with_their_base(api, adapter):
    models = {model["id"]: model for model in api.get("/v1/models").json()["data"]}
    assert list(models) == ["tiny", "alias", "fox"]
    assert (models["fox"]["parent"], models["fox"]["root"]) == ("tiny", adapter.lora_path)
    assert models["tiny"]["parent"] is None
    assert api.get("/v1/models/fox").json() == models["fox"]


def test_the_model_of_a_request_chooses_the_adapter(api):
    texts = {}
    for name in ("tiny", "alias", "fox"):
        answer = api.post("/v1/completions", {"model": name, "prompt": "abc def", **GREEDY}).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
    assert texts["tiny"] == texts["alias"] != texts["fox"]


def test_chats_and_responses_choose_it_too(api, llm, adapter):
    chat = api.post("/v1/chat/completions", {"model": "fox", **CHAT}).json()
    base = api.post("/v1/chat/completions", {"model": "tiny", **CHAT}).json()
    assert chat["model"] == "fox"
    assert chat["choices"][0]["message"]["content"] != base["choices"][0]["message"]["content"]
    body = {"model": "fox", "input": "abc", "temperature": 0, "max_output_tokens": 8}
    assert api.post("/v1/responses", body).json()["model"] == "fox"


def test_an_unknown_name_is_answered_with_those_that_are_served(api):
    error = api.refused("/v1/completions", {"model": "wolf", "prompt": "abc"}, 404)
    assert "tiny, alias, fox" in error["message"]


def test_an_adapter_cannot_have_the_models_name(adapter):
    with pytest.raises(InvalidParameterError, match="lora_modules: tiny is the model's own name"):
        Server(served_names=("tiny",), adapters={"tiny": adapter})
