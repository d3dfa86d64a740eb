"""`/v1/embeddings`: the vectors of `Encoder.encode`, in every form of input and output, and limits."""

import base64

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.support.tiny_encoder import random_sentences
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings

SENTENCES = random_sentences(5, seed=3, most=12)


@pytest.fixture
def encoder(served_encoder):
    return served_encoder


@pytest.fixture(scope="module")
def client(served_encoder):
    settings = ServerSettings(max_embedding_inputs=8)
    server = Server(encoder=LazyModel("tiny", lambda: served_encoder), settings=settings)
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def embed(client):
    def call(**body):
        return client.post("/v1/embeddings", json={"model": "tiny", **body})

    return call


def vectors_of(response):
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list"
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    assert {one["object"] for one in body["data"]} == {"embedding"}
    return np.asarray([one["embedding"] for one in body["data"]], np.float32)


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


def test_texts_give_the_vectors_of_the_encoder_and_their_tokens_are_counted(embed, encoder):
    response = embed(input=SENTENCES)
    np.testing.assert_allclose(vectors_of(response), encoder.encode(SENTENCES), atol=2e-6)
    tokens = sum(encoder.token_counts(SENTENCES))
    assert response.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert response.json()["model"] == "tiny"


def test_one_text_is_a_list_of_one_vector(embed, encoder):
    np.testing.assert_allclose(vectors_of(embed(input="the cat")), encoder.encode(["the cat"]), atol=2e-6)


def test_equal_texts_have_equal_vectors_of_length_one(embed):
    vectors = vectors_of(embed(input=["the cat sat"] * 5))
    np.testing.assert_allclose(vectors, vectors[:1].repeat(5, 0), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_token_ids_give_the_vectors_of_their_text(embed, encoder):
    ids = [tokens for tokens, _ in encoder.tokenize(SENTENCES)]
    expected = encoder.encode(SENTENCES)
    np.testing.assert_allclose(vectors_of(embed(input=ids)), expected, atol=2e-6)
    np.testing.assert_allclose(vectors_of(embed(input=ids[2])), expected[2:3], atol=2e-6)


def test_base64_is_little_endian_float32(embed, encoder):
    (one,) = embed(input="the cat", encoding_format="base64").json()["data"]
    vector = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    np.testing.assert_allclose(vector, encoder.encode("the cat"), atol=2e-6)


def test_fewer_dimensions_are_the_first_ones_of_length_one(embed, encoder):
    expected = encoder.encode(SENTENCES)[:, :7]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors_of(embed(input=SENTENCES, dimensions=7)), expected, atol=2e-6)


def test_long_texts_are_refused_or_cut_when_told(embed, encoder):
    long = "the cat sat on the mat " * 10
    error = error_of(embed(input=["a cat", long]))
    assert (error["code"], error["param"], error["n_prompt_tokens"], error["n_ctx"]) == (
        *("context_length_exceeded", "input", 62, 16),
    )
    np.testing.assert_allclose(
        vectors_of(embed(input=long, truncate_prompt_tokens=-1)), encoder.encode([long]), atol=2e-6
    )
    short = embed(input=long, truncate_prompt_tokens=6)
    np.testing.assert_allclose(vectors_of(short), encoder.encode(["the cat sat on"]), atol=2e-6)
    assert short.json()["usage"]["prompt_tokens"] == 6
    ids = encoder.tokenize([long], max_length=16)[0][0] * 2
    np.testing.assert_allclose(
        vectors_of(embed(input=ids, truncate_prompt_tokens=16)), encoder.encode_tokens([ids[:16]]), atol=2e-6
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (dict(), "input"),
        (dict(input=None), "input"),
        (dict(input=""), "input"),
        (dict(input=[]), "input"),
        (dict(input=[[]]), "input"),
        (dict(input=["a cat", ""]), "input"),
        (dict(input=["a cat", 3]), "input"),
        (dict(input=[3, "a cat"]), "input"),
        (dict(input=[[3], "a cat"]), "input"),
        (dict(input=[True]), "input[0]"),
        (dict(input=[-1]), "input"),
        (dict(input=[10**6]), "input"),
        (dict(input=[10**30]), "input"),
        (dict(input=[2**63]), "input"),
        (dict(input=["a cat"] * 9), "input"),
        (dict(input={"text": "a cat"}), "input"),
        (dict(input=["a cat", {"content": [{"type": "text", "text": "a dog"}]}]), "input[1]"),
        (dict(input="a cat", dimensions=0), "dimensions"),
        (dict(input="a cat", dimensions=49), "dimensions"),
        (dict(input="a cat", dimensions=-(10**30)), "dimensions"),
        (dict(input="a cat", dimensions=2.5), "dimensions"),
        (dict(input="a cat", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (dict(input="a cat", truncate_prompt_tokens=2), "truncate_prompt_tokens"),
        (dict(input="a cat", truncate_prompt_tokens=17), "truncate_prompt_tokens"),
        (dict(input="a cat", encoding_format="int8"), "encoding_format"),
    ],
)
def test_wrong_fields_are_named(embed, body, param):
    error = error_of(embed(**body))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


def test_another_model_is_not_found(client, embed):
    assert error_of(embed(input="a cat", model="other"), 404)["code"] == "model_not_found"
    without = TestClient(create_app(Server()), base_url="http://127.0.0.1")
    assert error_of(without.post("/v1/embeddings", json={"input": "a cat"}), 404)["code"] == "model_not_found"


def test_text_that_is_no_unicode_is_refused(client):
    response = client.post("/v1/embeddings", content=b'{"input": "\\ud800"}')
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("how", [{}, {"encoding_format": "float"}])
def test_openai_python(client, encoder, how):
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=client, max_retries=0)
    found = api.embeddings.create(model="tiny", input=SENTENCES, **how)
    np.testing.assert_allclose([one.embedding for one in found.data], encoder.encode(SENTENCES), atol=2e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions: expected 1 to 48, got 49"):
        api.embeddings.create(model="tiny", input="a cat", dimensions=49)
