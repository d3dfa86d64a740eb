"""`/v1/embeddings` and `/v1/rerank`: texts to vectors and scores, through a queue that batches them."""

from __future__ import annotations

import asyncio
import base64
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import msgspec
import numpy as np
from jaxtyping import Float32
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.embed.buckets import Tokens
from verax.embed.encoder import Encoder
from verax.embed.pooling import cut
from verax.embed.reranker import Reranker
from verax.errors import EngineDeadError, InvalidParameterError, QueueFullError
from verax.serve.http.body import read_body
from verax.serve.http.errors import ApiError, JsonResponse
from verax.serve.http.openapi import api_route, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import unless_disconnected
from verax.serve.http.telemetry import record_of

__all__ = [
    "BatchQueue",
    "EmbeddingList",
    "EmbeddingRequest",
    "LazyQueue",
    "Ranking",
    "RerankRequest",
    "check_characters",
    "check_limit",
    "most_characters",
    "renamed",
    "rerank_routes",
    "routes",
    "too_long",
]


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """Vector of a text: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float] | str


class TextUsage(msgspec.Struct, kw_only=True):
    """Token counts of texts that are only read."""

    prompt_tokens: Annotated[int, Meta(ge=0)]
    total_tokens: Annotated[int, Meta(ge=0)]


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Vectors, in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: TextUsage


class RankedText(msgspec.Struct, kw_only=True):
    """Text of a document."""

    text: str


class RankedResult(msgspec.Struct, kw_only=True):
    """Document of a ranking: its number in the request, its score, and its text if that was asked for."""

    index: Annotated[int, Meta(ge=0)]
    relevance_score: float
    document: RankedText | None = None


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    usage: TextUsage
    results: list[RankedResult]


T = TypeVar("T")


Compute = Callable[[Sequence[T]], Float32[np.ndarray, "n ..."]]
"""Function from inputs to a result for each."""


@dataclass(eq=False)
class _Request:
    """Inputs that came together, and the future of their results."""

    results: list[Any]
    left: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


@dataclass(frozen=True)
class _Row(Generic[T]):
    """One input of a request."""

    request: _Request
    index: int
    value: T


class BatchQueue(Generic[T]):
    """Bounded queue in front of a model, whose programs only the queue's thread calls.

    Args:
        compute: function that calls the model.
        name: of the thread.
        batch_size: inputs that are computed together.
        max_inputs: inputs that may wait and run at once.
    """

    def __init__(self, compute: Compute[T], *, name: str, batch_size: int, max_inputs: int):
        self._compute = compute
        self._batch_size = batch_size
        self._max_inputs = max_inputs
        self._inputs = 0
        self._rows: deque[_Row[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Context that holds places for `count` inputs, to be taken before they are tokenised.

        Raises:
            QueueFullError: if there are not so many.
        """
        with self._changed:
            if self._inputs + count > self._max_inputs:
                raise QueueFullError(f"{self._inputs} inputs wait or run, and {self._max_inputs} may; try again later")
            self._inputs += count
        try:
            yield
        finally:
            with self._changed:
                self._inputs -= count

    async def run(self, inputs: Sequence[T], lengths: Sequence[int]) -> Float32[np.ndarray, "n ..."]:
        """Results of inputs, in their order. Cancelling the task leaves out those that still wait.

        Args:
            inputs: what the model takes, one or more.
            lengths: tokens of each: inputs of like length are computed together, which pads little.

        Raises:
            EngineDeadError: if the queue is closed.
        """
        loop = asyncio.get_running_loop()
        request = _Request([None] * len(inputs), len(inputs), loop, loop.create_future())
        order = sorted(range(len(inputs)), key=lambda i: -lengths[i])
        with self._changed:
            if self._closed:
                raise EngineDeadError("the model was shut down")
            self._rows.extend(_Row(request, i, inputs[i]) for i in order)
            self._changed.notify()
        await request.future
        return np.stack(request.results)

    def close(self) -> None:
        """End the thread after its batch. Requests that wait raise EngineDeadError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for request in {row.request for row in self._rows}:
            _finish(request, EngineDeadError("the model was shut down"))
        self._rows.clear()

    def _work(self) -> None:
        while (rows := self._next_batch()) is not None:
            if not rows:
                continue
            try:
                results = self._compute([row.value for row in rows])
            except Exception as error:  # the requests fail, not the thread
                for request in {row.request for row in rows}:
                    _finish(request, error)
                continue
            for row, result in zip(rows, results, strict=True):
                row.request.results[row.index] = result
                row.request.left -= 1
                if row.request.left == 0:
                    _finish(row.request)

    def _next_batch(self) -> list[_Row[T]] | None:
        """Next inputs, without those whose request has ended; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed)
            if self._closed:
                return None
            taken: list[_Row[T]] = []
            while self._rows and len(taken) < self._batch_size:
                row = self._rows.popleft()
                if not row.request.future.done():
                    taken.append(row)
            return taken


class LazyQueue(Generic[T]):
    """Queue that is made when its model is first needed, and ends with the server.

    Args:
        server: the server, with the limits of its encoder and its reranker.
        name: of the queue's thread.
    """

    def __init__(self, server: Server, name: str):
        self._settings = server.settings
        self._name = name
        self._queue: BatchQueue[T] | None = None
        server.contexts.append(self._running)

    def get(self, compute: Compute[T]) -> BatchQueue[T]:
        """The queue; `compute` is that of the first call."""
        if self._queue is None:
            self._queue = BatchQueue(
                compute,
                name=self._name,
                batch_size=self._settings.embedding_batch_size,
                max_inputs=self._settings.max_queued_embedding_inputs,
            )
        return self._queue

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        yield
        if self._queue is not None:
            await asyncio.to_thread(self._queue.close)
            self._queue = None


def _finish(request: _Request, error: Exception | None = None) -> None:
    """Give a request its result, on its own event loop."""

    def finish() -> None:
        if request.future.done():
            return
        if error is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(error)

    if not request.loop.is_closed():
        request.loop.call_soon_threadsafe(finish)


CHARACTERS = 64
"""Characters of a text that are read for each token of the model: tokenising megabytes takes many seconds."""


def most_characters(max_length: int) -> int:
    """Characters that are tokenised of a text for a model that reads `max_length` tokens."""
    return CHARACTERS * max_length


def check_characters(field: str, texts: Iterable[str], max_length: int) -> None:
    """Check that texts are short enough to be tokenised whole.

    Raises:
        ApiError: 400, with the field's name.
    """
    longest = max(map(len, texts), default=0)
    if longest > most_characters(max_length):
        raise too_long(field, f"{longest} characters", -(-longest // CHARACTERS), max_length)


def check_limit(name: str, value: int | None, most: int) -> None:
    """Check a number of tokens that a request asks for: 1 to `most`, or -1 for as many as the model reads.

    Raises:
        ApiError: 400, with the field's name.
    """
    if value is not None and not 1 <= value <= most and value != -1:
        raise ApiError(400, f"{name}: expected 1 to {most}, got {value}", param=name)


def too_long(field: str, what: str, size: int, limit: int) -> ApiError:
    """Error of a text that is longer than the model reads.

    Args:
        field: the field of the request.
        what: the text's size, in words.
        size: the same in tokens.
        limit: tokens that the model reads.
    """
    return ApiError(
        400,
        f"{field}: {what} are more than the {limit} tokens that the model reads; see truncate_prompt_tokens",
        **{"param": field, "code": "context_length_exceeded", "n_prompt_tokens": size, "n_ctx": limit},
    )


def renamed(error: InvalidParameterError, names: Mapping[str, str]) -> ApiError:
    """Error of an argument as that of the field that it came from."""
    name, _, message = str(error).partition(": ")
    return ApiError(400, f"{names.get(name, name)}: {message}", param=names.get(name, name))


class EmbeddingRequest(msgspec.Struct):
    """Body of a request."""

    input: str | list[str | int | list[int]]
    """A text, texts, the token ids of a text, or those of several."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    """`"base64"` is little-endian float32; openai-python asks for it unless told otherwise."""
    dimensions: int | None = None
    """First numbers of each vector that are kept, and normalised again; all of them if absent."""
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of a text, special ones included; -1 for as many as the model reads."""
    user: str | None = None


def routes(server: Server) -> list[Route]:
    """Routes of the embeddings. Their queue ends with the server."""
    settings = server.settings
    queues: LazyQueue[list[int]] = LazyQueue(server, "verax-embeddings")

    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingRequest)
        if server.encoder is None:
            raise ApiError(404, "model: no embedding model is served here", param="model", code="model_not_found")
        name = server.check_model(body.model, (server.encoder.name,))
        record = record_of(request)
        record.model = name
        inputs = _inputs(body, settings.max_embedding_inputs)
        encoder = await server.encoder.get()
        dimensions = _dimensions(body, encoder)
        check_limit("truncate_prompt_tokens", body.truncate_prompt_tokens, encoder.max_length)
        queue = queues.get(lambda ids: encoder.encode_tokens(ids, batch_size=settings.embedding_batch_size))
        with queue.slots(len(inputs)):
            token_ids = await asyncio.to_thread(_token_ids, inputs, encoder, body.truncate_prompt_tokens)
            lengths = [len(ids) for ids in token_ids]
            vectors = await unless_disconnected(request, queue.run(token_ids, lengths))
        record.prompt_tokens = sum(lengths)
        return JsonResponse(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": embedding}
                    for i, embedding in enumerate(_encoded(cut(vectors, dimensions), body.encoding_format))
                ],
                "model": name,
                "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens},
            }
        )

    return api_routes(
        "/embeddings",
        embeddings,
        body=EmbeddingRequest,
        answer=EmbeddingList,
        queued=True,
        summary="Vectors of texts.",
    )


def _inputs(body: EmbeddingRequest, most: int) -> list[str] | list[list[int]]:
    """Texts, or token ids of each text."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= most:
        raise ApiError(400, f"input: expected 1 to {most} texts, got {len(given)}", param="input")
    for number, one in enumerate(given):
        tokens = isinstance(one, list) and all(isinstance(token, int) for token in one)
        if type(one) is not type(given[0]) or not (tokens or isinstance(one, str)):
            message = "input: expected a text, texts, token ids or lists of token ids, got a mixture of them"
            raise ApiError(400, message, param="input")
        if not one:
            raise ApiError(400, f"input: text {number} is empty", param="input")
    return given


def _dimensions(body: EmbeddingRequest, encoder: Encoder) -> int:
    try:
        return encoder.check_dimensions(body.dimensions)
    except InvalidParameterError as error:
        raise renamed(error, {}) from error


def _token_ids(inputs: list[str] | list[list[int]], encoder: Encoder, kept: int | None) -> list[list[int]]:
    """Token ids of each text: as they are given, or with the special tokens of the tokenizer.

    Args:
        inputs: texts, or token ids of each.
        encoder: the model.
        kept: tokens that are kept of each; -1 for as many as the model reads; None to refuse longer ones.
    """
    limit = kept if kept is not None and kept > 0 else encoder.max_length
    if isinstance(inputs[0], str):
        texts, most = cast("list[str]", inputs), most_characters(encoder.max_length)
        if kept is None:
            check_characters("input", texts, limit)
        try:
            found = encoder.tokenize([text[:most] for text in texts], max_length=limit)
        except InvalidParameterError as error:
            raise renamed(error, {"max_length": "truncate_prompt_tokens", "sentences": "input"}) from error
    else:
        found = [(ids[:limit], len(ids) - limit) for ids in cast("list[list[int]]", inputs)]
    if kept is None:
        ids, left_out = max(found, key=lambda one: one[1])
        if left_out > 0:
            raise too_long("input", f"{len(ids) + left_out} tokens", len(ids) + left_out, limit)
    try:
        return encoder.check_tokens([ids for ids, _ in found])
    except InvalidParameterError as error:
        raise renamed(error, {"token_ids": "input"}) from error


def _encoded(vectors: Float32[np.ndarray, "n d"], how: str) -> Sequence[Any]:
    """Each vector as a list of numbers, or as base64 of little-endian float32."""
    if how == "float":
        return vectors.tolist()
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


class RerankRequest(msgspec.Struct):
    """Body of a request."""

    query: str
    documents: list[str | RankedText]
    """Texts, or objects with a `text`."""
    model: str | None = None
    top_n: int | None = None
    """Documents of the answer, the best ones; all of them if absent or 0."""
    return_documents: bool = True
    """The documents' texts are in the answer."""
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of the query and a document, special ones included; -1 for as many as the model reads."""
    user: str | None = None


def rerank_routes(server: Server) -> list[Route]:
    """Routes of the ranking. Their queue ends with the server."""
    settings = server.settings
    queues: LazyQueue[Tokens] = LazyQueue(server, "verax-rerank")

    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankRequest)
        if server.reranker is None:
            raise ApiError(
                404,
                "model: no reranker is served here; verax serve --reranker-model serves one",
                param="model",
                code="model_not_found",
            )
        name = server.check_model(body.model, (server.reranker.name,))
        record = record_of(request)
        record.model = name
        documents = _documents(body, settings.max_embedding_inputs)
        reranker = await server.reranker.get()
        check_limit("truncate_prompt_tokens", body.truncate_prompt_tokens, reranker.max_length)
        queue = queues.get(lambda pairs: reranker.score_tokens(pairs, batch_size=settings.embedding_batch_size))
        with queue.slots(len(documents)):
            pairs = await asyncio.to_thread(_pairs, body.query, documents, reranker, body.truncate_prompt_tokens)
            lengths = [len(pair.ids) for pair in pairs]
            scores = await unless_disconnected(request, queue.run(pairs, lengths))
        record.prompt_tokens = sum(lengths)
        best = np.argsort(-scores, kind="stable").tolist()[: body.top_n or None]
        results = [{"index": i, "relevance_score": float(scores[i])} for i in best]
        if body.return_documents:
            results = [{**result, "document": {"text": documents[result["index"]]}} for result in results]
        return JsonResponse(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": name,
                "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens},
                "results": results,
            }
        )

    described = {"body": RerankRequest, "answer": Ranking, "queued": True, "summary": "Documents by a query."}
    # Cohere's newer client calls its second version.
    return [*api_routes("/rerank", rerank, **described), api_route("/v2/rerank", rerank, **described)]


def _documents(body: RerankRequest, most: int) -> list[str]:
    """Texts of the documents."""
    if not 1 <= len(body.documents) <= most:
        raise ApiError(400, f"documents: expected 1 to {most} texts, got {len(body.documents)}", param="documents")
    if body.top_n is not None and body.top_n < 0:
        raise ApiError(400, f"top_n: expected 0 or more, got {body.top_n}", param="top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not body.query:
        raise ApiError(400, "query: it is empty", param="query")
    if "" in texts:
        raise ApiError(400, f"documents: text {texts.index('')} is empty", param="documents")
    return texts


def _pairs(query: str, documents: Sequence[str], reranker: Reranker, kept: int | None) -> list[Tokens]:
    """Tokens of the query with each document.

    Args:
        query, documents: texts.
        reranker: the model.
        kept: tokens that are kept of each pair; -1 for as many as the model reads; None to refuse longer ones.
    """
    limit = kept if kept is not None and kept > 0 else reranker.max_length
    most = most_characters(reranker.max_length)
    if kept is None:
        check_characters("query", [query], limit)
        check_characters("documents", documents, limit)
    try:
        pairs = reranker.tokenize(query[:most], [text[:most] for text in documents], max_length=limit)
    except InvalidParameterError as error:
        raise renamed(error, {"max_length": "truncate_prompt_tokens"}) from error
    if kept is None:
        longest = max(pairs, key=lambda pair: pair.left_out)
        if longest.left_out > 0:
            size = len(longest.ids) + longest.left_out
            raise too_long("documents", f"{size} tokens, the query's included,", size, limit)
    return pairs
