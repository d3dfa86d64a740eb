"""`/v1/embeddings`: texts and token ids to vectors, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
import numpy as np
from jaxtyping import Float32
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.embed.encoder import Encoder
from verax.embed.pooling import cut
from verax.errors import InvalidParameterError
from verax.serve.http.errors import ApiError
from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.routing import api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import unless_disconnected
from verax.serve.text.answers import EmbeddingList
from verax.serve.text.batch_queue import LazyQueue
from verax.serve.text.text_inputs import check_characters, check_limit, most_characters, renamed, too_long

__all__ = ["EmbeddingRequest", "routes"]


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
