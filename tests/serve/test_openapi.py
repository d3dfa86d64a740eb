"""`/openapi.json` describes every route of the API."""

import json


def test_every_path_of_the_api_is_described_with_its_body_and_errors(api):
    made = api.get("/openapi.json").json()
    assert made["openapi"].startswith("3.1")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health"):
        assert path in made["paths"]
    chat = made["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert "429" in chat["responses"]
    properties = made["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "n", "tools", "response_format", "structured_outputs", "top_k"} <= set(properties)
    identifiers = [operation["operationId"] for path in made["paths"].values() for operation in path.values()]
    assert len(set(identifiers)) == len(identifiers)


def test_every_reference_leads_somewhere(api):
    made = api.get("/openapi.json").json()
    text = json.dumps(made)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        assert reference.removeprefix("#/components/schemas/") in made["components"]["schemas"]
