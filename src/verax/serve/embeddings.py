"""`/v1/embeddings`: texts and token ids to vectors, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import msgspec
import numpy as np
from jaxtyping import Float32
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.embed.encoder import Encoder
from verax.errors import InvalidParameterError
from verax.serve.answers import EmbeddingList
from verax.serve.embedding_queue import EmbeddingQueue
from verax.serve.errors import ApiError
from verax.serve.fields import read_body
from verax.serve.json_response import JsonResponse
from verax.serve.record import record_of
from verax.serve.routing import api_routes
from verax.serve.server import Server
from verax.serve.sse import unless_disconnected

__all__ = ["EmbeddingRequest", "routes"]


_CHARACTERS = 64
"""Characters of a text that are read for each token of the model: tokenising megabytes takes many seconds."""


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
    """Route of the embeddings. Its queue ends with the server."""
    settings = server.settings
    queue: EmbeddingQueue | None = None

    async def embeddings(request: Request) -> Response:
        nonlocal queue
        body = await read_body(request, EmbeddingRequest)
        if server.encoder is None:
            raise ApiError(404, "model: no embedding model is served here", param="model", code="model_not_found")
        name = server.check_model(body.model, (server.encoder.name,))
        record = record_of(request)
        record.model = name
        inputs = _inputs(body, settings.max_embedding_inputs)
        encoder = await server.encoder.get()
        _check_sizes(body, encoder)
        if queue is None:
            queue = EmbeddingQueue(
                encoder,
                batch_size=settings.embedding_batch_size,
                max_inputs=settings.max_queued_embedding_inputs,
            )
        with queue.slots(len(inputs)):
            token_ids = await asyncio.to_thread(_token_ids, inputs, encoder, body.truncate_prompt_tokens)
            vectors = await unless_disconnected(request, queue.embed(token_ids))
        record.prompt_tokens = sum(map(len, token_ids))
        return JsonResponse(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": embedding}
                    for i, embedding in enumerate(_encoded(_cut(vectors, body.dimensions), body.encoding_format))
                ],
                "model": name,
                "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens},
            }
        )

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        nonlocal queue
        yield
        if queue is not None:
            await asyncio.to_thread(queue.close)
            queue = None

    server.contexts.append(running)
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


def _check_sizes(body: EmbeddingRequest, encoder: Encoder) -> None:
    limits = {"dimensions": encoder.dimension, "truncate_prompt_tokens": encoder.max_length}
    for name, most in limits.items():
        value = getattr(body, name)
        if value is not None and not 1 <= value <= most and (name, value) != ("truncate_prompt_tokens", -1):
            raise ApiError(400, f"{name}: expected 1 to {most}, got {value}", param=name)


def _token_ids(inputs: list[str] | list[list[int]], encoder: Encoder, kept: int | None) -> list[list[int]]:
    """Token ids of each text: as they are given, or with the special tokens of the tokenizer.

    Args:
        inputs: texts, or token ids of each.
        encoder: the model.
        kept: tokens that are kept of each; -1 for as many as the model reads; None to refuse longer ones.
    """
    limit = kept if kept is not None and kept > 0 else encoder.max_length
    if isinstance(inputs[0], str):
        texts, most = cast("list[str]", inputs), encoder.max_length * _CHARACTERS
        longest = max(map(len, texts))
        if kept is None and longest > most:
            raise _too_long(f"{longest} characters", -(-longest // _CHARACTERS), limit)
        try:
            found = encoder.tokenize([text[:most] for text in texts], max_length=limit)
        except InvalidParameterError as error:
            raise _renamed(error, {"max_length": "truncate_prompt_tokens", "sentences": "input"}) from error
    else:
        found = [(ids[:limit], len(ids) - limit) for ids in cast("list[list[int]]", inputs)]
    if kept is None:
        ids, cut = max(found, key=lambda one: one[1])
        if cut > 0:
            raise _too_long(f"{len(ids) + cut} tokens", len(ids) + cut, limit)
    try:
        return encoder.check_tokens([ids for ids, _ in found])
    except InvalidParameterError as error:
        raise _renamed(error, {"token_ids": "input"}) from error


def _too_long(what: str, size: int, limit: int) -> ApiError:
    return ApiError(
        400,
        f"input: {what} are more than the {limit} tokens that the model reads; see truncate_prompt_tokens",
        **{"param": "input", "code": "context_length_exceeded", "n_prompt_tokens": size, "n_ctx": limit},
    )


def _renamed(error: InvalidParameterError, names: Mapping[str, str]) -> ApiError:
    """Error of an argument as that of the field that it came from."""
    name, _, message = str(error).partition(": ")
    return ApiError(400, f"{names.get(name, name)}: {message}", param=names.get(name, name))


def _cut(vectors: Float32[np.ndarray, "n D"], dimensions: int | None) -> Float32[np.ndarray, "n d"]:
    """First numbers of each vector, of length 1 again."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _encoded(vectors: Float32[np.ndarray, "n d"], how: str) -> Sequence[Any]:
    """Each vector as a list of numbers, or as base64 of little-endian float32."""
    if how == "float":
        return vectors.tolist()
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
