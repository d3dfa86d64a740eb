"""`/openapi.json` describes every route of the API, and answers are what it says."""

import re

import pytest

from verax.serve.http.openapi import ApiRoute


@pytest.fixture(scope="module")
def description(api):
    return api.get("/openapi.json").json()


def resolved(description, schema):
    reference = schema.get("$ref")
    return description["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def test_the_description_is_valid_by_the_schema_of_openapi_3_1(description):
    schemathesis = pytest.importorskip("schemathesis")
    assert description["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(description).validate()


def test_every_route_but_the_pages_is_described(api, description):
    described = [route for route in api.app.routes if isinstance(route, ApiRoute)]
    assert set(description["paths"]) == {route.path_format for route in described}
    others = {route.path for route in api.app.routes} - {route.path for route in described}
    assert [path for path in others if not re.match(r"/page/|/static/|/(openapi\.json|v1/stream)?$", path)] == []


def test_every_operation_has_a_name_of_its_own_an_answer_and_errors(description):
    operations = [(path, operation) for path, methods in description["paths"].items() for operation in methods.values()]
    names = [operation["operationId"] for _, operation in operations]
    assert len(set(names)) == len(names)
    for path, operation in operations:
        answers = operation["responses"]
        assert answers["200"]["content"], path
        assert {"401", "404", "500", "503"} <= set(answers)
        assert {"400", "413", "415"} <= set(answers) or "requestBody" not in operation
        for status in set(answers) - {"200", "206"}:
            error = resolved(description, answers[status]["content"]["application/json"]["schema"])
            assert ("request_id" in error["properties"]) == ("/messages" in path)


def test_bodies_have_the_fields_that_are_taken(description):
    def fields(path, kind="application/json"):
        body = description["paths"][path]["post"]["requestBody"]["content"][kind]
        return resolved(description, body["schema"])["properties"]

    chat = fields("/v1/chat/completions")
    assert {"messages", "n", "tools", "response_format", "structured_outputs", "top_k"} <= set(chat)
    assert chat["function_call"]["type"] == "null"  # refused
    item = fields("/v1/responses")["input"]["anyOf"][1]["items"]["anyOf"]
    assert {"arguments", "call_id"} <= set(resolved(description, item[1])["properties"])
    form = fields("/v1/videos", "multipart/form-data")
    assert set(form) == set(fields("/v1/videos"))
    assert form["input_reference"]["anyOf"][0] == {"type": "string", "format": "binary"}
    assert form["fps"] == {"type": "integer", "minimum": 1, "maximum": 120}
