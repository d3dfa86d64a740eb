"""Numbers at and beyond every limit in every numeric field of every endpoint, over HTTP.

The fields are read from the Structs of the routes, so a new one is covered by itself.
"""

import json
import re

import httpx
import msgspec
import pytest
from msgspec import inspect

from tests.serve.conftest import InstantPipeline, serving
from tests.support.tiny_encoder import tiny_reranker
from verax.embed.reranker import Reranker
from verax.serve import app as app_module
from verax.serve.http.openapi import ApiRoute
from verax.serve.http.server import Server
from verax.serve.http.settings import ServerSettings
from verax.serve.text.embeddings import EmbeddingRequest
from verax.serve.video.videos import VideoCreate

pytest.importorskip("av")
pytest.importorskip("PIL.Image")

MARK = "the number"

NUMBERS = ("-1", "0", "-0.0", "1.5", str(-(2**63)), str(2**63), str(2**64), "1e308", "-1e308", "1e400", "-1e400")
NO_NUMBERS = ("true", '"1"', "NaN", "Infinity", "-Infinity", "9" * 5000, "[]", "{}")

ASKED = {"messages": [{"role": "user", "content": "a"}]}
BASES = {
    "ChatRequest": {**ASKED, "max_tokens": 1},
    "CompletionRequest": {"prompt": "a", "max_tokens": 1},
    "ResponsesRequest": {"input": "a", "max_output_tokens": 1},
    "MessagesRequest": {**ASKED, "max_tokens": 1},
    "CountTokensRequest": ASKED,
    "TokenizeRequest": {"prompt": "a"},
    "DetokenizeRequest": {"tokens": [1]},
    "EmbeddingRequest": {"input": "a"},
    "RerankRequest": {"query": "a", "documents": ["b"]},
    "VideoCreate": {"prompt": "a", "num_frames": 5},
}
"""A request that is served, for each Struct."""


def routes():
    """Path and Struct of each route that takes a body, without those that are served under `/v1` too."""
    server = Server(settings=ServerSettings(port=0))
    fields = {}
    for module_routes in app_module.ROUTES:
        for route in module_routes(server):
            body = route.body if isinstance(route, ApiRoute) else None
            if body is not None and f"/v1{route.path}" not in fields:
                fields[route.path] = body
    return fields


def places(kind):
    """Values of a type, each with the mark in place of one number."""
    match kind:
        case inspect.Metadata():
            yield from places(kind.type)
        case inspect.IntType() | inspect.FloatType():
            yield MARK
        case inspect.UnionType():
            for one in kind.types:
                yield from places(one)
        case inspect.ListType():
            yield from ([value] for value in places(kind.item_type))
        case inspect.DictType():
            yield from ({"1": value} for value in places(kind.value_type))
        case inspect.StructType():
            for field in kind.fields:
                yield from ({**smallest(kind), field.encode_name: value} for value in places(field.type))


def smallest(kind):
    """A value of a type, with nothing that it does not need."""
    match kind:
        case inspect.Metadata():
            return smallest(kind.type)
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.StrType():
            return "a"
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.ListType():
            return [smallest(kind.item_type)]
        case inspect.UnionType():
            return smallest(kind.types[0])
        case inspect.StructType():
            value = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return value | {field.encode_name: smallest(field.type) for field in kind.fields if field.required}
    return {}


def numbers_in(body):
    """Top field and value of each place of a number in a Struct."""
    for field in inspect.type_info(body).fields:
        for value in places(field.type):
            yield field.encode_name, value


CASES = [
    pytest.param(path, body, field, value, id=f"{path} {json.dumps(value).replace(json.dumps(MARK), 'N')} {field}")
    for path, body in routes().items()
    for field, value in numbers_in(body)
]


@pytest.fixture(scope="module")
def client(new_server, served_pipeline, tmp_path_factory):
    reranker = Reranker(tiny_reranker(tmp_path_factory.mktemp("reranker")))
    pipeline = InstantPipeline(served_pipeline)
    with (
        serving(new_server(reranker=reranker, pipeline=pipeline, max_queued_videos=1000)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def check(response, field, number):
    """Check that an answer is one, or one error that names the field."""
    if response.status_code == 200:
        assert number not in NO_NUMBERS or number in ('"1"', "[]", "{}"), response.text
        assert response.json()
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    param = error.get("param") or re.match(r"[\w.\[\]]+", error["message"])[0]
    no_json = number in ("NaN", "Infinity", "-Infinity")
    assert re.match(r"\w+", param)[0] == field or (no_json and param == "body"), (number, error)
    assert error["message"].startswith(param)
    assert len(error["message"]) < 1000


def test_each_struct_has_a_request_that_is_served(client):
    for path, body in routes().items():
        assert client.post(path, json=BASES[body.__name__]).status_code == 200, path


@pytest.mark.parametrize(("path", "body", "field", "value"), CASES)
def test_a_number_is_served_or_refused_by_the_name_of_its_field(client, path, body, field, value):
    for number in (*NUMBERS, *NO_NUMBERS):
        text = json.dumps({**BASES[body.__name__], field: value}).replace(json.dumps(MARK), number)
        response = client.post(path, content=text, headers={"content-type": "application/json"})
        check(response, field, number)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("field", [field for field, value in numbers_in(VideoCreate) if value == MARK])
def test_a_number_of_a_form_is_served_or_refused_by_the_name_of_its_field(client, field):
    numbers = ["-1", "1.5", str(2**64), "1e308", "1e400", "true", "NaN", "0x1", "1_0", "\N{ARABIC-INDIC DIGIT THREE}"]
    for number in numbers:
        response = client.post("/v1/videos", files={**dict(prompt=(None, "a")), field: (None, number)})
        if response.status_code != 200:
            check(response, field, number)
    assert client.get("/health").status_code == 200


def test_the_fields_are_found():
    fields = {(body, field) for path, body, field, _ in (case.values for case in CASES)}
    assert {(EmbeddingRequest, "dimensions"), (VideoCreate, "seed"), (VideoCreate, "seconds")} <= fields
    assert len(CASES) > 60
    assert msgspec.json.encode(smallest(inspect.type_info(EmbeddingRequest)))
