"""`/v1/messages`: Anthropic's API as a translation of the chat, for clients such as coding agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verax.errors import VeraxError
from verax.serve.chat_run import ChatEvent, ChatRun, render_chat, run_chat
from verax.serve.errors import ApiError, api_error
from verax.serve.fields import read_body
from verax.serve.json_response import JsonResponse
from verax.serve.messages_request import CountTokensRequest, MessagesRequest, chat_of
from verax.serve.parts import Part, PartStep, PartTracker
from verax.serve.record import record_of
from verax.serve.routing import api_routes
from verax.serve.server import Server
from verax.serve.sse import named_event, unless_disconnected

__all__ = ["error_body", "routes"]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's names of errors by their status."""

NO_SIGNATURE = ""
"""Signature of reasoning, which clients expect: only the API that signed a thought could check one."""

_FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields by their names in a chat."""


def routes(server: Server) -> list[Route]:
    """Routes of messages."""

    async def create(http: Request) -> Response:
        request = await read_body(http, MessagesRequest)
        run = await unless_disconnected(http, run_chat(server, chat_of(request), record_of(http)))
        if request.stream:
            return server.stream(_events(run), error_event=lambda error: named_event("error", error_body(error)))
        return JsonResponse(await unless_disconnected(http, _whole(run)))

    async def count(http: Request) -> Response:
        request = await read_body(http, CountTokensRequest)
        server.text_model(request.model)
        prompt = await unless_disconnected(http, render_chat(server, chat_of(request)))
        tokens = await server.engine.encode(prompt, add_special_tokens=False)
        return JsonResponse({"input_tokens": len(tokens)})

    return [
        *api_routes("/messages", _in_shape(create), body=MessagesRequest, summary="Answer, as Anthropic's API does."),
        *api_routes(
            "/messages/count_tokens", _in_shape(count), body=CountTokensRequest, summary="Count a message's tokens."
        ),
    ]


def error_body(error: ApiError) -> dict[str, Any]:
    """The error object in Anthropic's shape. The message begins with the field's name."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.param in _FIELDS:
        message = message.replace(error.param, _FIELDS[error.param], 1)
    return {"type": "error", "error": {"type": kind, "message": message}}


class _Answer(Response):
    """Another answer, whose errors have Anthropic's shape."""

    def __init__(self, answer: Response):
        self._answer = answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except (ApiError, VeraxError) as error:
            await _error_response(error)(scope, receive, send)


def _error_response(error: Exception) -> Response:
    found = api_error(error)
    return JsonResponse(error_body(found), found.status, found.headers)


def _in_shape(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose errors have Anthropic's shape."""

    async def guarded(http: Request) -> Response:
        try:
            return _Answer(await endpoint(http))
        except (ApiError, VeraxError) as error:
            return _error_response(error)

    return guarded


async def _whole(run: ChatRun) -> dict[str, Any]:
    tracker, last = PartTracker(), None
    async with aclosing(run.events()) as events:
        async for last in events:
            for _ in tracker.steps(last):
                pass
    assert last is not None
    return {**_message(run), "content": [_block(part) for part in tracker.parts], **_stop(last), "usage": _usage(run)}


async def _events(run: ChatRun) -> AsyncGenerator[bytes, None]:
    """Events of a stream, the last one included."""
    tracker, last = PartTracker(), None
    async with aclosing(run.events()) as events:
        async for event in events:
            if last is None:
                start = {**_message(run), "content": [], "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**start, "usage": {**_usage(run), "output_tokens": 0}})
                yield _event("ping")
            last = event
            for step in tracker.steps(event):
                if step.step == "end" and step.part.kind == "reasoning":
                    yield _delta_event(step.part, type="signature_delta", signature=NO_SIGNATURE)
                yield _block_event(step)
    assert last is not None
    yield _event("message_delta", delta=_stop(last), usage=_usage(run))
    yield _event("message_stop")


def _event(kind: str, **values: Any) -> bytes:
    return named_event(kind, {"type": kind, **values})


def _block_event(step: PartStep) -> bytes:
    part = step.part
    match step.step:
        case "begin":
            return _event("content_block_start", index=part.index, content_block=_block(part, empty=True))
        case "end":
            return _event("content_block_stop", index=part.index)
    kind, name = {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "tool_call": ("input_json_delta", "partial_json"),
    }[part.kind]
    return _delta_event(part, **{"type": kind, name: step.text})


def _delta_event(part: Part, **delta: str) -> bytes:
    return _event("content_block_delta", index=part.index, delta=delta)


def _message(run: ChatRun) -> dict[str, Any]:
    return {
        "id": f"msg_{run.id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": run.model,
    }


def _block(part: Part, *, empty: bool = False) -> dict[str, Any]:
    """A part as a block; `empty` as it begins."""
    text = "" if empty else part.text
    match part.kind:
        case "text":
            return {"type": "text", "text": text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": NO_SIGNATURE}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments of a call. Those that are no JSON, as of a call that was cut short, are given as Anthropic advises."""
    try:
        read = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        read = None
    return read if isinstance(read, dict) else {"INVALID_JSON": arguments}


def _stop(last: ChatEvent) -> dict[str, Any]:
    sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
    if last.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if last.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}


def _usage(run: ChatRun) -> dict[str, Any]:
    usage = run.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
