"""`/v1/rerank`: documents in the order in which they answer a query, as the APIs of Jina and Cohere have it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.embed.buckets import Tokens
from verax.embed.reranker import Reranker
from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError
from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.routing import api_route, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import unless_disconnected
from verax.serve.text.answers import RankedText, Ranking
from verax.serve.text.batch_queue import LazyQueue
from verax.serve.text.text_inputs import check_characters, check_limit, most_characters, renamed, too_long

__all__ = ["RerankRequest", "routes"]


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


def routes(server: Server) -> list[Route]:
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
            pairs = await asyncio.to_thread(_tokens, body.query, documents, reranker, body.truncate_prompt_tokens)
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


def _tokens(query: str, documents: Sequence[str], reranker: Reranker, kept: int | None) -> list[Tokens]:
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
