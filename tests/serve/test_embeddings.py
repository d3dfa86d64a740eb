"""Embeddings and rankings, and the queue that batches them."""

import asyncio
import base64
import threading

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import error_of, named
from tests.support.tiny_encoder import random_sentences, tiny_reranker
from verax import Reranker
from verax.errors import EngineDeadError
from verax.serve.app import create_app
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.settings import ServerSettings
from verax.serve.text.embeddings import BatchQueue

SENTENCES = random_sentences(5, seed=3, most=12)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return Reranker(tiny_reranker(tmp_path_factory.mktemp("reranker")), max_length=24)


@pytest.fixture(scope="module")
def client(served_encoder, reranker):
    models = {"encoder": LazyModel("tiny", lambda: served_encoder), "reranker": LazyModel("pairs", lambda: reranker)}
    server = Server(**models, settings=ServerSettings(max_embedding_inputs=8))
    with TestClient(create_app(server), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def embed(client):
    def call(**body):
        return client.post("/v1/embeddings", json={"model": "tiny", **body})

    return call


def vectors_of(response):
    body = ok(response)
    assert body["object"] == "list"
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    assert {one["object"] for one in body["data"]} == {"embedding"}
    return np.asarray([one["embedding"] for one in body["data"]], np.float32)


def ok(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_texts_give_the_vectors_of_the_encoder_and_their_tokens_are_counted(embed, served_encoder):
    response = embed(input=SENTENCES)
    np.testing.assert_allclose(vectors_of(response), served_encoder.encode(SENTENCES), atol=2e-6)
    tokens = sum(served_encoder.token_counts(SENTENCES))
    assert response.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert response.json()["model"] == "tiny"


def test_token_ids_give_the_vectors_of_their_text(embed, served_encoder):
    ids = [tokens for tokens, _ in served_encoder.tokenize(SENTENCES)]
    expected = served_encoder.encode(SENTENCES)
    np.testing.assert_allclose(vectors_of(embed(input=ids)), expected, atol=2e-6)
    np.testing.assert_allclose(vectors_of(embed(input=ids[2])), expected[2:3], atol=2e-6)


def test_base64_is_little_endian_float32(embed, served_encoder):
    (one,) = embed(input="the cat", encoding_format="base64").json()["data"]
    vector = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    np.testing.assert_allclose(vector, served_encoder.encode("the cat"), atol=2e-6)


def test_vectors_have_as_many_dimensions_as_asked_for(embed, served_encoder):
    expected = served_encoder.encode(SENTENCES, dimensions=7)
    np.testing.assert_allclose(vectors_of(embed(input=SENTENCES, dimensions=7)), expected, atol=2e-6)


def test_long_texts_are_refused_or_cut_on_request(embed, served_encoder):
    long = "the cat sat on the mat " * 10
    facts = {"code": "context_length_exceeded", "param": "input", "n_prompt_tokens": 62, "n_ctx": 16}
    assert facts.items() <= error_of(embed(input=["a cat", long])).items()
    cut = embed(input=long, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(vectors_of(cut), served_encoder.encode([long]), atol=2e-6)
    short = embed(input=long, truncate_prompt_tokens=6)
    np.testing.assert_allclose(vectors_of(short), served_encoder.encode(["the cat sat on"]), atol=2e-6)
    assert short.json()["usage"]["prompt_tokens"] == 6
    ids = served_encoder.tokenize([long], max_length=16)[0][0] * 2
    cut = embed(input=ids, truncate_prompt_tokens=16)
    np.testing.assert_allclose(vectors_of(cut), served_encoder.encode_tokens([ids[:16]]), atol=2e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (dict(), "input"),
        *named("input", None, "", [], [[]], ["a cat", ""], ["a cat", 3], [3, "a cat"], [[3], "a cat"]),
        *named("input", [-1], [10**6], [10**30], [2**63], ["a cat"] * 9, {"text": "a cat"}),
        (dict(input=[True]), "input[0]"),
        (dict(input=["a cat", {"content": [{"type": "text", "text": "a dog"}]}]), "input[1]"),
        *((dict(input="a cat", dimensions=size), "dimensions") for size in (0, 49)),
        *((dict(input="a cat", truncate_prompt_tokens=size), "truncate_prompt_tokens") for size in (2, 17)),
        (dict(input="a cat", encoding_format="int8"), "encoding_format"),
        *((dict(input="a cat", **{name: False}), name) for name in ("normalize", "normalized", "add_special_tokens")),
        *((dict(input="a cat", **{name: "query"}), name) for name in ("task", "input_type", "prompt_name")),
        *(
            (dict(input="a cat", **{name: "query"}), name)
            for name in ("prompt", "instruction", "pooling", "output_dtype")
        ),
        (dict(input="a cat", embedding_type="binary"), "embedding_type"),
        (dict(input="a cat", embedding_types=["int8"]), "embedding_types[0]"),
        (dict(input="a cat", endianness="big"), "endianness"),
        (dict(input="a cat", embd_normalize=-1), "embd_normalize"),
        (dict(input="a cat", output_dimension=4), "output_dimension"),
        (dict(input="a cat", messages=[{"role": "user", "content": "a dog"}]), "messages"),
        (dict(input="a cat", late_chunking=True), "late_chunking"),
    ],
)
def test_wrong_fields_are_named(embed, body, param):
    assert error_of(embed(**body))["param"] == param


QUERY = "who sat on the mat ?"
DOCUMENTS = random_sentences(6, seed=3, most=8)


@pytest.fixture
def rerank(client):
    def call(path="/v1/rerank", **body):
        return client.post(path, json={"query": QUERY, "documents": DOCUMENTS, **body})

    return call


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_sorted_with_their_scores_and_tokens_are_counted(rerank, reranker, path):
    answer = ok(rerank(path, model="pairs"))
    expected = reranker.rank(QUERY, DOCUMENTS)
    assert [one["index"] for one in answer["results"]] == [one.index for one in expected]
    assert [one["document"]["text"] for one in answer["results"]] == [one.text for one in expected]
    scores = [one["relevance_score"] for one in answer["results"]]
    np.testing.assert_allclose(scores, [one.score for one in expected], atol=2e-6)
    tokens = sum(len(pair.ids) for pair in reranker.tokenize(QUERY, DOCUMENTS))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["model"] == "pairs"
    assert answer["id"].startswith("rerank-")


def test_only_the_best_documents_or_no_texts_if_that_is_asked_for(rerank):
    every = ok(rerank())["results"]
    assert ok(rerank(top_n=2))["results"] == every[:2]
    assert ok(rerank(top_n=100))["results"] == ok(rerank(top_n=0))["results"] == every
    without = ok(rerank(return_documents=False))["results"]
    assert without == [{key: one[key] for key in ("index", "relevance_score")} for one in every]


def test_documents_may_be_objects_with_a_text(rerank):
    objects = [{"text": text} for text in DOCUMENTS]
    assert ok(rerank(documents=objects))["results"] == ok(rerank())["results"]


def test_long_pairs_are_refused_or_cut_on_request(rerank, reranker):
    long = "the cat sat on the mat " * 10
    facts = {"code": "context_length_exceeded", "param": "documents", "n_prompt_tokens": 69, "n_ctx": 24}
    assert facts.items() <= error_of(rerank(documents=["a cat", long])).items()
    (cut,) = ok(rerank(documents=[long], truncate_prompt_tokens=-1))["results"]
    np.testing.assert_allclose(cut["relevance_score"], reranker.score(QUERY, [long])[0], atol=2e-6)
    short = ok(rerank(documents=[long], truncate_prompt_tokens=12))
    assert short["usage"]["prompt_tokens"] == 12
    assert error_of(rerank(query="x" * 10000))["param"] == "query"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *named("query", None, "", ["a cat"]),
        *named("documents", None, "a cat", [], ["a cat", ""], ["a cat", {"text": ""}], ["a cat"] * 9),
        (dict(documents=["a cat", 3]), "documents[1]"),
        (dict(documents=[{"title": "a cat"}]), "documents[0].text"),
        *named("top_n", -1, 2.5),
        *named("return_documents", "yes"),
        *named("truncate_prompt_tokens", 0, 4, 25),
        *named("raw_scores", True),
        *named("top_k", 2),
        *named("use_activation", False),
        *named("instruction", "find cats"),
        *named("max_tokens_per_doc", 8),
        *named("rank_fields", ["title"]),
    ],
)
def test_wrong_fields_of_a_ranking_are_named(rerank, body, param):
    assert error_of(rerank(**body))["param"] == param


def test_numbers_that_are_not_finite_are_an_error(embed, rerank, served_encoder, reranker, monkeypatch):
    numbers = np.asarray([1, np.nan], np.float32)
    monkeypatch.setattr(served_encoder, "encode_tokens", lambda rows, **_: np.tile(numbers[:, None], 48))
    monkeypatch.setattr(reranker, "score_tokens", lambda rows, **_: numbers)
    for answer in (embed(input=["a cat", "a dog"]), rerank(documents=["a cat", "a dog"])):
        assert "no finite numbers for text 1" in error_of(answer, 500)["message"]


def test_another_model_is_not_found(embed, rerank):
    for answer in (embed(input="a cat", model="other"), rerank(model="other")):
        assert error_of(answer, 404)["code"] == "model_not_found"


class SlowEncoder:
    """Stands in for an encoder: a vector is the sentence's tokens, and a batch waits for permission."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Semaphore(0)
        self.started = threading.Semaphore(0)

    def encode_tokens(self, token_ids):
        self.batches.append([ids[0] for ids in token_ids])
        self.started.release()
        assert self.may_go.acquire(timeout=10)
        if any(ids[0] < 0 for ids in token_ids):
            raise ValueError("negative")
        return np.asarray([[ids[0], len(ids)] for ids in token_ids], np.float32)


@pytest.fixture
def slow_encoder():
    return SlowEncoder()


@pytest.fixture
async def queue(slow_encoder):
    queue = BatchQueue(slow_encoder.encode_tokens, name="test", batch_size=4, max_inputs=8)
    yield queue
    await queue.close()


def queued(queue, token_ids):
    return queue.run(token_ids, [len(ids) for ids in token_ids])


async def started(slow_encoder):
    assert await asyncio.to_thread(slow_encoder.started.acquire, timeout=10)


async def test_what_waits_when_the_thread_becomes_free_is_one_batch(queue, slow_encoder):
    first = asyncio.create_task(queued(queue, [[1]]))
    await started(slow_encoder)
    rest = [asyncio.create_task(queued(queue, [[10 * i, 0], [10 * i + 1]])) for i in (1, 2, 3)]
    await asyncio.sleep(0)
    slow_encoder.may_go.release(3)
    results = await asyncio.gather(first, *rest)
    assert slow_encoder.batches == [[1], [10, 11, 20, 21], [30, 31]]
    assert [result.tolist() for result in results] == [[[1, 1]], *([[10 * i, 2], [10 * i + 1, 1]] for i in (1, 2, 3))]


async def test_a_request_that_was_cancelled_is_left_out(queue, slow_encoder):
    first = asyncio.create_task(queued(queue, [[1]]))
    await started(slow_encoder)
    gone, rest = (asyncio.create_task(queued(queue, [[number]])) for number in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    slow_encoder.may_go.release(2)
    await asyncio.gather(first, rest)
    assert slow_encoder.batches == [[1], [3]]


async def test_closing_fails_those_who_wait(slow_encoder):
    queue = BatchQueue(slow_encoder.encode_tokens, name="test", batch_size=1, max_inputs=8)
    tasks = [asyncio.create_task(queued(queue, [[i]])) for i in (1, 2)]
    await started(slow_encoder)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    slow_encoder.may_go.release()
    await closing
    assert (await tasks[0]).tolist() == [[1, 1]]
    with pytest.raises(EngineDeadError):
        await tasks[1]
    with pytest.raises(EngineDeadError):
        await queued(queue, [[3]])
