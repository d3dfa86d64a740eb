"""`/v1/rerank`: the scores of `Reranker.score`, in the shape of Jina's and Cohere's answers, and limits."""

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.support.tiny_encoder import random_sentences, tiny_reranker
from verax import Reranker
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings

QUERY = "who sat on the mat ?"
DOCUMENTS = random_sentences(6, seed=3, most=8)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return Reranker(tiny_reranker(tmp_path_factory.mktemp("reranker")), max_length=24)


@pytest.fixture(scope="module")
def client(reranker):
    settings = ServerSettings(max_embedding_inputs=8)
    server = Server(reranker=LazyModel("tiny", lambda: reranker), settings=settings)
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def rerank(client):
    def call(path="/v1/rerank", **body):
        return client.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body})

    return call


def answer_of(response):
    assert response.status_code == 200, response.text
    return response.json()


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_sorted_with_their_scores_and_tokens_are_counted(rerank, reranker, path):
    answer = answer_of(rerank(path, model="tiny"))
    expected = reranker.rank(QUERY, DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == [one.index for one in expected]
    assert [one["document"]["text"] for one in answer["results"]] == [one.text for one in expected]
    np.testing.assert_allclose(
        [one["relevance_score"] for one in answer["results"]], [one.score for one in expected], atol=2e-6
    )
    tokens = sum(len(pair.ids) for pair in reranker.tokenize(QUERY, DOCUMENTS))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("rerank-")


def test_only_the_best_documents_or_no_texts_if_that_is_asked_for(rerank):
    every = answer_of(rerank())["results"]
    assert answer_of(rerank(top_n=2))["results"] == every[:2]
    assert answer_of(rerank(top_n=100))["results"] == answer_of(rerank(top_n=0))["results"] == every
    without = answer_of(rerank(return_documents=False))["results"]
    assert without == [{key: one[key] for key in ("index", "relevance_score")} for one in every]


def test_documents_may_be_objects_with_a_text(rerank):
    objects = [{"text": text} for text in DOCUMENTS]
    assert answer_of(rerank(documents=objects))["results"] == answer_of(rerank())["results"]


def test_long_pairs_are_refused_or_cut_when_told(rerank, reranker):
    long = "the cat sat on the mat " * 10
    error = error_of(rerank(documents=["a cat", long]))
    assert (error["code"], error["param"], error["n_prompt_tokens"], error["n_ctx"]) == (
        *("context_length_exceeded", "documents", 69, 24),
    )
    (cut,) = answer_of(rerank(documents=[long], truncate_prompt_tokens=-1))["results"]
    np.testing.assert_allclose(cut["relevance_score"], reranker.score(QUERY, [long])[0], atol=2e-6)
    short = answer_of(rerank(documents=[long], truncate_prompt_tokens=12))
    assert short["usage"]["prompt_tokens"] == 12
    assert error_of(rerank(query="x" * 10000))["param"] == "query"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (dict(query=None), "query"),
        (dict(query=""), "query"),
        (dict(query=["a cat"]), "query"),
        (dict(documents=None), "documents"),
        (dict(documents="a cat"), "documents"),
        (dict(documents=[]), "documents"),
        (dict(documents=["a cat", ""]), "documents"),
        (dict(documents=["a cat", {"text": ""}]), "documents"),
        (dict(documents=["a cat"] * 9), "documents"),
        (dict(documents=["a cat", 3]), "documents[1]"),
        (dict(documents=[{"title": "a cat"}]), "documents[0].text"),
        (dict(top_n=-1), "top_n"),
        (dict(top_n=2.5), "top_n"),
        (dict(return_documents="yes"), "return_documents"),
        (dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (dict(truncate_prompt_tokens=4), "truncate_prompt_tokens"),
        (dict(truncate_prompt_tokens=25), "truncate_prompt_tokens"),
    ],
)
def test_wrong_fields_are_named(rerank, body, param):
    error = error_of(rerank(**body))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["type"] == "invalid_request_error"


def test_another_model_is_not_found(client, rerank):
    assert error_of(rerank(model="other"), 404)["code"] == "model_not_found"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    without = TestClient(create_app(Server()), base_url="http://127.0.0.1")
    body = {"query": QUERY, "documents": DOCUMENTS}
    error = error_of(without.post("/v1/rerank", json=body), 404)
    assert error["code"] == "model_not_found"
    assert "--reranker-model" in error["message"]


def test_a_full_queue_refuses_more(reranker):
    settings = ServerSettings(max_embedding_inputs=4, max_queued_embedding_inputs=4)
    server = Server(reranker=LazyModel("tiny", lambda: reranker), settings=settings)
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        body = {"query": QUERY, "documents": DOCUMENTS[:4]}
        assert client.post("/v1/rerank", json=body).status_code == 200
        assert client.post("/v1/rerank", json=body).status_code == 200  # places are given back
