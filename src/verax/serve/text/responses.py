"""`/v1/responses`: OpenAI's responses without state, as a translation of the chat."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.errors import VeraxError
from verax.serve.http.errors import ApiError, api_error
from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.routing import api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import named_event, unless_disconnected
from verax.serve.text.answers import InputTokens, ResponseObject
from verax.serve.text.chat_run import ChatEvent, ChatRun, count_tokens, run_chat
from verax.serve.text.parts import Part, PartStep, PartTracker
from verax.serve.text.responses_request import INPUT_ITEMS, ResponsesRequest, chat_of

__all__ = ["routes"]

_IDS = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}
"""Beginnings of the ids of output items."""

_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields by their names in a chat."""


def routes(server: Server) -> list[Route]:
    """Routes of responses."""

    async def create(http: Request) -> Response:
        request = await read_body(http, ResponsesRequest)
        try:
            run = await unless_disconnected(http, run_chat(server, chat_of(request), record_of(http)))
            answer = _Answer(run, request)
            if request.stream:
                return server.stream(answer.events())
            return JsonResponse(await unless_disconnected(http, answer.whole()))
        except (ApiError, VeraxError) as error:
            raise _renamed(api_error(error)) from error

    async def count(http: Request) -> Response:
        request = await read_body(http, ResponsesRequest)
        try:
            tokens = await unless_disconnected(http, count_tokens(server, chat_of(request)))
        except (ApiError, VeraxError) as error:
            raise _renamed(api_error(error)) from error
        return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})

    return [
        *api_routes(
            "/responses",
            create,
            body=ResponsesRequest,
            parts=INPUT_ITEMS,
            answer=ResponseObject,
            streams=True,
            queued=True,
            summary="Answer, as OpenAI's responses do.",
        ),
        *api_routes(
            "/responses/input_tokens",
            count,
            body=ResponsesRequest,
            answer=InputTokens,
            summary="Count the tokens of a response's input.",
        ),
    ]


def _renamed(error: ApiError) -> ApiError:
    """The error with the field's name in this API."""
    name, dot, rest = (error.param or "").partition(".")
    if name not in _FIELDS:
        return error
    error.param = _FIELDS[name] + dot + rest
    error.message = error.message.replace(name, _FIELDS[name], 1)
    return error


class _Answer:
    """A response on its way."""

    def __init__(self, run: ChatRun, request: ResponsesRequest):
        self._run = run
        self._request = request
        self._tracker = PartTracker()
        self._key = uuid.uuid4().hex
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        """Body of the answer."""
        async with aclosing(self._run.events()) as events:
            last = await self._tracker.read(events)
        return self._response(_status(last))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        last = None
        try:
            async with aclosing(self._run.events()) as events:
                async for event in events:
                    if last is None:
                        yield self._event("response.created", response=self._response("in_progress"))
                        yield self._event("response.in_progress", response=self._response("in_progress"))
                    last = event
                    for step in self._tracker.steps(event):
                        for made in self._step(step, _status(event)):
                            yield made
        except Exception as error:
            if last is None:
                raise _renamed(api_error(error)) from error
            found = api_error(error)
            failure = {"code": found.code or "server_error", "message": found.message}
            yield self._event("response.failed", response={**self._response("failed"), "error": failure})
            return
        status = _status(last)
        yield self._event(f"response.{status}", response=self._response(status))

    def _event(self, kind: str, **values: Any) -> bytes:
        made = named_event(kind, {"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return made

    def _step(self, step: PartStep, status: str) -> Iterator[bytes]:
        """Events of a part that begins, goes on or ends."""
        part = step.part
        place: dict[str, Any] = {"output_index": part.index}
        item = {"item_id": self._item_id(part), **place}
        content = {**item, "content_index": 0}
        is_call = part.kind == "tool_call"
        name = {"reasoning": "reasoning_text", "text": "output_text", "tool_call": "function_call_arguments"}[part.kind]
        if step.step == "begin":
            yield self._event("response.output_item.added", **place, item=self._item(part, "in_progress"))
            if not is_call:
                yield self._event("response.content_part.added", **content, part=_content(part, empty=True))
        elif step.step == "delta":
            logprobs = {"logprobs": _logprobs(step.logprobs)} if part.kind == "text" else {}
            yield self._event(f"response.{name}.delta", **(item if is_call else content), delta=step.text, **logprobs)
        else:
            if is_call:
                yield self._event(f"response.{name}.done", **item, name=part.name, arguments=part.text)
            else:
                logprobs = {"logprobs": _logprobs(part.logprobs)} if part.kind == "text" else {}
                yield self._event(f"response.{name}.done", **content, text=part.text, **logprobs)
                yield self._event("response.content_part.done", **content, part=_content(part))
            ended = "incomplete" if status == "incomplete" else "completed"
            yield self._event("response.output_item.done", **place, item=self._item(part, ended))

    def _item_id(self, part: Part) -> str:
        return f"{_IDS[part.kind]}_{self._key}{part.index:04d}"

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(part), "status": status}
        empty = status == "in_progress"
        content = [] if empty else [_content(part)]
        match part.kind:
            case "text":
                return {**head, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        call = {"call_id": part.call_id, "name": part.name, "arguments": "" if empty else part.text}
        return {**head, "type": "function_call", **call}

    def _response(self, status: str) -> dict[str, Any]:
        request, run = self._request, self._run
        ended = status in ("completed", "incomplete")
        parts = self._tracker.parts if status != "in_progress" else []
        text = msgspec.to_builtins(request.text.format) if request.text and request.text.format else {"type": "text"}
        # The part that the limit cut off is the last one.
        last = len(parts) - 1 if status == "incomplete" else -1
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": run.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": run.model,
            "output": [self._item(part, "incomplete" if part.index == last else "completed") for part in parts],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {key: value for key, value in text.items() if value is not None}},
            "tool_choice": msgspec.to_builtins(request.tool_choice) or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(run) if ended else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _status(event: ChatEvent | None) -> str:
    return "incomplete" if event is not None and event.finish_reason == "length" else "completed"


def _content(part: Part, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else part.text
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if empty else _logprobs(part.logprobs)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(entries: Any) -> list[dict[str, Any]]:
    return [{"token": "", "logprob": 0.0, "bytes": [], "top_logprobs": [], **entry} for entry in entries]


def _usage(run: ChatRun) -> dict[str, Any]:
    usage = run.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
