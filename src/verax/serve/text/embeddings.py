"""`/v1/embeddings` and `/v1/rerank`: texts to vectors and scores, through a queue that batches them.

Embeddings are as OpenAI's API has them, rankings as the APIs of Jina and Cohere.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec
import numpy as np
from jaxtyping import Float32
from starlette.routing import Route

from verax.embed.buckets import Tokens
from verax.embed.encoder import Encoder
from verax.embed.modules import check_finite, cut
from verax.embed.reranker import Reranker
from verax.errors import EngineDeadError, QueueFullError
from verax.serve.http.errors import ApiError, field_error, model_error, renamed
from verax.serve.http.openapi import json_routes
from verax.serve.http.server import LazyModel, Server
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.sampling import Refused

CHARACTERS = 64
"""Characters of a text that are read for each token of the model: tokenising megabytes takes many seconds."""

T = TypeVar("T")


class VectorFields(msgspec.Struct, kw_only=True):
    """Fields of vLLM, llama.cpp, Jina, Cohere, Voyage and TEI that change vectors. Only their defaults are taken."""

    add_special_tokens: bool = True
    normalize: bool = True
    normalized: bool = True
    """Jina's name of `normalize`."""
    embd_normalize: int = 2
    """llama.cpp's name of it: the Euclidean norm."""
    use_activation: bool = True
    late_chunking: bool = False
    return_multivector: bool = False
    output_dtype: str = "float"
    output_dimension: Refused = None
    pooling: Refused = None
    messages: Refused = None
    instruction: Refused = None
    prompt: Refused = None
    task: Refused = None
    input_type: Refused = None
    prompt_name: Refused = None
    truncation_side: Refused = None


class EmbeddingRequest(VectorFields, kw_only=True):
    """Body of `/v1/embeddings`."""

    input: str | list[str | int | list[int]]
    """A text, texts, the token ids of a text, or of several texts."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    """`"base64"` is little-endian float32, the default of openai-python."""
    dimensions: int | None = None
    """First numbers of each vector that are kept, and normalised again; all of them if absent."""
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of a text, special ones included; -1 for as many as the model reads."""
    user: str | None = None
    embedding_type: Literal["float"] = "float"
    embedding_types: list[Literal["float"]] | None = None
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"


class RankedText(msgspec.Struct, kw_only=True):
    """Text of a document."""

    text: str


class ScoreFields(msgspec.Struct, kw_only=True):
    """Fields of vLLM, Jina, Cohere and TEI that change scores. Values other than the defaults are refused."""

    raw_scores: bool = False
    use_activation: bool = True
    """True: scores are the activation function's."""
    instruction: Refused = None
    top_k: Refused = None
    max_tokens_per_doc: Refused = None
    max_chunks_per_doc: Refused = None
    rank_fields: Refused = None


class RerankRequest(ScoreFields, kw_only=True):
    """Body of `/v1/rerank`."""

    query: str
    documents: list[str | RankedText]
    """Texts, or objects with a `text`."""
    model: str | None = None
    top_n: int | None = None
    """Documents of the answer, the best ones; all of them if absent or 0."""
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of the query and a document, special ones included; -1 for as many as the model reads."""
    user: str | None = None


def routes(server: Server) -> list[Route]:
    """Routes of embeddings and rankings. Their queues end with the server."""
    settings = server.settings

    def queue(model: LazyModel[Any] | None, method: str, name: str) -> BatchQueue[Any]:
        def compute(inputs: Sequence[Any]) -> np.ndarray:
            assert model is not None
            return getattr(model.loaded, method)(inputs, batch_size=settings.embedding_batch_size)

        size, limit = settings.embedding_batch_size, settings.max_queued_embedding_inputs
        new = BatchQueue(compute, name=name, batch_size=size, max_inputs=limit)
        server.contexts.append(new.running)
        return new

    vectors_queue: BatchQueue[list[int]] = queue(server.encoder, "encode_tokens", "verax-embeddings")
    scores_queue: BatchQueue[Tokens] = queue(server.reranker, "score_tokens", "verax-rerank")

    async def embeddings(body: EmbeddingRequest, record: RequestRecord) -> dict[str, Any]:
        if server.encoder is None:
            raise model_error("no embedding model is served here")
        record.model = name = server.check_model(body.model, (server.encoder.name,), server.encoder.root)
        _check_fixed(body, VectorFields)
        inputs = _inputs(body, settings.max_embedding_inputs)
        encoder = await server.encoder.get()
        dimensions = encoder.check_dimensions(body.dimensions)
        limit = _limit(body.truncate_prompt_tokens, encoder.max_length)
        with vectors_queue.slots(len(inputs)):
            token_ids = await asyncio.to_thread(_token_ids, inputs, encoder, limit, body.truncate_prompt_tokens is None)
            lengths = [len(ids) for ids in token_ids]
            vectors = await vectors_queue.run(token_ids, lengths)
        check_finite(vectors)
        record.prompt_tokens = sum(lengths)
        encoded = enumerate(_encoded(cut(vectors, dimensions), body.encoding_format))
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in encoded]
        return {"object": "list", "data": data, "model": name, "usage": _usage(lengths)}

    async def rerank(body: RerankRequest, record: RequestRecord) -> dict[str, Any]:
        if server.reranker is None:
            raise model_error("no reranker is served here; verax serve --reranker-model serves one")
        record.model = name = server.check_model(body.model, (server.reranker.name,), server.reranker.root)
        _check_fixed(body, ScoreFields)
        documents = _documents(body, settings.max_embedding_inputs)
        reranker = await server.reranker.get()
        limit, whole = _limit(body.truncate_prompt_tokens, reranker.max_length), body.truncate_prompt_tokens is None
        with scores_queue.slots(len(documents)):
            pairs = await asyncio.to_thread(_pairs, body.query, documents, reranker, limit, whole)
            lengths = [len(pair.ids) for pair in pairs]
            scores = await scores_queue.run(pairs, lengths)
        check_finite(scores)
        record.prompt_tokens = sum(lengths)
        results: list[dict[str, Any]] = []
        for i in np.argsort(-scores, kind="stable").tolist()[: body.top_n or None]:
            text = {"document": {"text": documents[i]}} if body.return_documents else {}
            results.append({"index": i, "relevance_score": float(scores[i]), **text})
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": name, "usage": _usage(lengths), "results": results}

    ranks = {"prefixes": ("/v1", "", "/v2"), "queued": True, "summary": "Documents by a query."}  # /v2: Cohere's
    return [
        *json_routes("/embeddings", EmbeddingRequest, embeddings, queued=True, summary="Vectors of texts."),
        *json_routes("/rerank", RerankRequest, rerank, **ranks),
    ]


# Checks and tokens of the texts.


def _check_fixed(body: VectorFields | ScoreFields, fixed: type[msgspec.Struct]) -> None:
    """Check that the fields of the Struct `fixed` have no other value than their default."""
    for field in msgspec.structs.fields(fixed):
        if (given := getattr(body, field.name)) != field.default:
            raise field_error(field.name, f"{given!r} is not supported here; leave it out")


def _inputs(body: EmbeddingRequest, limit: int) -> list[str] | list[list[int]]:
    """Texts, or token ids of each text."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= limit:
        raise field_error("input", f"expected 1 to {limit} texts, got {len(given)}")
    for number, item in enumerate(given):
        tokens = isinstance(item, list) and all(isinstance(token, int) for token in item)
        if type(item) is not type(given[0]) or not (tokens or isinstance(item, str)):
            raise field_error("input", "expected a text, texts, token ids or lists of token ids, got a mixture of them")
        if not item:
            raise field_error("input", f"text {number} is empty")
    return given


def _documents(body: RerankRequest, limit: int) -> list[str]:
    """Texts of the documents."""
    if not 1 <= len(body.documents) <= limit:
        raise field_error("documents", f"expected 1 to {limit} texts, got {len(body.documents)}")
    if body.top_n is not None and body.top_n < 0:
        raise field_error("top_n", f"expected 0 or more, got {body.top_n}")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    if not body.query:
        raise field_error("query", "it is empty")
    if "" in texts:
        raise field_error("documents", f"text {texts.index('')} is empty")
    return texts


def _limit(kept: int | None, longest: int) -> int:
    """Tokens that are read of a text: the field `truncate_prompt_tokens`, or as many as the model reads."""
    if kept is not None and not 1 <= kept <= longest and kept != -1:
        raise field_error("truncate_prompt_tokens", f"expected 1 to {longest}, got {kept}")
    return kept if kept is not None and kept > 0 else longest


def _token_ids(inputs: list[str] | list[list[int]], encoder: Encoder, limit: int, whole: bool) -> list[list[int]]:
    """Token ids of each text: unchanged if they are given, or with the special tokens of the tokenizer.

    `limit`: tokens that are kept of each. `whole`: refuse longer texts.
    """
    if isinstance(inputs[0], str):
        texts = cast("list[str]", inputs)
        if whole:
            _check_characters("input", texts, limit)
        with renamed({"max_length": "truncate_prompt_tokens", "sentences": "input", "texts": "input"}):
            cut_texts = [text[: CHARACTERS * encoder.max_length] for text in texts]
            pairs = encoder.tokenize(cut_texts, max_length=limit)
    else:
        pairs = [(ids[:limit], len(ids) - limit) for ids in cast("list[list[int]]", inputs)]
    if whole:
        ids, left_out = max(pairs, key=lambda pair: pair[1])
        if left_out > 0:
            raise _too_long("input", f"{len(ids) + left_out} tokens", len(ids) + left_out, limit)
    with renamed({"token_ids": "input"}):
        return encoder.check_tokens([ids for ids, _ in pairs])


def _pairs(query: str, documents: Sequence[str], reranker: Reranker, limit: int, whole: bool) -> list[Tokens]:
    """Tokens of the query with each document; `limit` and `whole` as in `_token_ids`."""
    if whole:
        _check_characters("query", [query], limit)
        _check_characters("documents", documents, limit)
    length = CHARACTERS * reranker.max_length
    with renamed({"max_length": "truncate_prompt_tokens", "texts": "documents"}):
        pairs = reranker.tokenize(query[:length], [text[:length] for text in documents], max_length=limit)
    longest = max(pairs, key=lambda pair: pair.left_out)
    if whole and longest.left_out > 0:
        size = len(longest.ids) + longest.left_out
        raise _too_long("documents", f"{size} tokens, the query's included,", size, limit)
    return pairs


def _check_characters(field: str, texts: Iterable[str], max_length: int) -> None:
    """Check that texts are short enough to be tokenised whole."""
    longest = max(map(len, texts), default=0)
    if longest > CHARACTERS * max_length:
        raise _too_long(field, f"{longest} characters", -(-longest // CHARACTERS), max_length)


def _too_long(field: str, size: str, num_tokens: int, limit: int) -> ApiError:
    """Error of a text that is longer than the model reads."""
    return ApiError(
        400,
        f"{field}: {size} are more than the {limit} tokens that the model reads; see truncate_prompt_tokens",
        **{"param": field, "code": "context_length_exceeded", "n_prompt_tokens": num_tokens, "n_ctx": limit},
    )


def _usage(lengths: Sequence[int]) -> dict[str, int]:
    return {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


def _encoded(vectors: Float32[np.ndarray, "n d"], encoding: str) -> Sequence[Any]:
    """Each vector as a list of numbers, or as base64 of little-endian float32."""
    if encoding == "float":
        return vectors.tolist()
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


# The queue.


@dataclass(frozen=True)
class _Row(Generic[T]):
    """Input that waits, and the future of its result."""

    value: T
    result: asyncio.Future[np.ndarray]


class BatchQueue(Generic[T]):
    """Bounded queue in front of a model: all inputs that wait when its thread becomes free are one batch.

    It is used on one event loop. Only its thread, which begins with the first input, calls the model's programs.

    `compute`: function from inputs to a result for each, `[n, ...]`.
    """

    def __init__(self, compute: Callable[[Sequence[T]], np.ndarray], *, name: str, batch_size: int, max_inputs: int):
        self._compute = compute
        self._name = name
        self._batch_size = batch_size
        self._max_inputs = max_inputs
        self._inputs = 0
        self._rows: deque[_Row[T]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._closed = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context of the running server, at whose end the queue is closed."""
        self._closed = False
        yield
        await self.close()

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Context that holds places for `count` inputs, to be taken before they are tokenised."""
        if self._inputs + count > self._max_inputs:
            raise QueueFullError(f"{self._inputs} inputs wait or run, and {self._max_inputs} may; try again later")
        self._inputs += count
        try:
            yield
        finally:
            self._inputs -= count

    async def run(self, inputs: Sequence[T], lengths: Sequence[int]) -> Float32[np.ndarray, "n ..."]:
        """Results of inputs, in their order. Cancelling the task leaves out the inputs that still wait.

        `inputs`: arguments of the model, one or more. `lengths`: tokens of each: inputs of like length are computed
        together, which pads little.

        Raises:
            EngineDeadError: if the queue is closed.
        """
        if self._closed:
            raise EngineDeadError("the model was shut down")
        loop = asyncio.get_running_loop()
        rows = [_Row(value, loop.create_future()) for value in inputs]
        self._rows.extend(rows[i] for i in sorted(range(len(rows)), key=lambda i: -lengths[i]))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return np.stack(await asyncio.gather(*(row.result for row in rows)))

    async def close(self) -> None:
        """End the thread after its batch. Requests that wait raise EngineDeadError."""
        self._closed = True
        for row in self._rows:
            if not row.result.done():
                row.result.set_exception(EngineDeadError("the model was shut down"))
        self._rows.clear()
        if self._worker is not None and not self._worker.done():
            await asyncio.wait([self._worker])
        if self._thread is not None:
            self._thread.shutdown()
        self._worker = self._thread = None

    async def _work(self) -> None:
        while self._rows:
            rows: list[_Row[T]] = []
            while self._rows and len(rows) < self._batch_size:
                row = self._rows.popleft()
                if not row.result.done():  # a request that has ended
                    rows.append(row)
            if rows:
                await self._answer(rows)

    async def _answer(self, rows: Sequence[_Row[T]]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        values, loop = [row.value for row in rows], asyncio.get_running_loop()
        error: Exception | None = None
        results: Any
        try:
            results = await loop.run_in_executor(self._thread, self._compute, values)
            if len(results) != len(rows):
                raise RuntimeError(f"the model gave {len(results)} results for {len(rows)} inputs")
        except Exception as failure:  # the requests fail, not the queue
            results, error = values, failure
        for row, result in zip(rows, results, strict=True):
            if row.result.done():
                continue
            if error is None:
                row.result.set_result(result)
            else:
                row.result.set_exception(error)
