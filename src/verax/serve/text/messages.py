"""`/v1/messages`: Anthropic's API as a translation of the chat, for clients such as coding agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.errors import anthropic_error
from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.routing import api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import named_event, unless_disconnected
from verax.serve.text.answers import MessageObject, MessageTokens
from verax.serve.text.chat_run import ChatEvent, ChatRun, count_tokens, run_chat
from verax.serve.text.messages_request import CountTokensRequest, MessagesRequest, chat_of
from verax.serve.text.parts import Part, PartStep, PartTracker

__all__ = ["routes"]

NO_SIGNATURE = ""
"""Signature of reasoning, which clients expect: only the API that signed a thought could check one."""


def routes(server: Server) -> list[Route]:
    """Routes of messages."""

    async def create(http: Request) -> Response:
        request, record = await read_body(http, MessagesRequest), record_of(http)
        run = await unless_disconnected(http, run_chat(server, chat_of(request), record))
        if request.stream:
            return server.stream(
                _events(run),
                error_event=lambda error: named_event("error", anthropic_error(error, record.request_id)),
            )
        return JsonResponse(await unless_disconnected(http, _whole(run)))

    async def count(http: Request) -> Response:
        request = await read_body(http, CountTokensRequest)
        return JsonResponse({"input_tokens": await unless_disconnected(http, count_tokens(server, chat_of(request)))})

    return [
        *api_routes(
            "/messages",
            create,
            body=MessagesRequest,
            answer=MessageObject,
            streams=True,
            queued=True,
            summary="Answer, as Anthropic's API does.",
        ),
        *api_routes(
            "/messages/count_tokens",
            count,
            body=CountTokensRequest,
            answer=MessageTokens,
            summary="Count a message's tokens.",
        ),
    ]


async def _whole(run: ChatRun) -> dict[str, Any]:
    tracker = PartTracker()
    async with aclosing(run.events()) as events:
        last = await tracker.read(events)
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
