"""`/v1/chat/completions`: OpenAI's chat, whole and streamed, and the number of a chat's input tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.fields import read_body
from verax.serve.http.json_response import JsonResponse
from verax.serve.http.record import record_of
from verax.serve.http.resume import ID_PATTERN
from verax.serve.http.routing import Parameter, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, data_event, unless_disconnected
from verax.serve.text.answers import ChatCompletion, InputTokens
from verax.serve.text.chat_request import ChatRequest
from verax.serve.text.chat_run import ChatAnswer, ChatEvent, ChatRun, count_tokens, run_chat
from verax.serve.text.logprobs import prompt_logprobs
from verax.serve.text.usage import SYSTEM_FINGERPRINT
from verax.text.features.tool_calls import Delta, ToolCallDelta

__all__ = ["routes"]

CONVERSATION_ID = Parameter(
    "X-Conversation-Id",
    {"type": "string", "pattern": f"^{ID_PATTERN}$"},
    "header",
    "keeps a stream running while its page is reloaded",
)


def routes(server: Server) -> list[Route]:
    """Routes of the chat."""

    async def complete(http: Request) -> Response:
        request = await read_body(http, ChatRequest)
        record = record_of(http)
        run = await unless_disconnected(http, run_chat(server, request, record))
        if request.stream:
            conversation = http.headers.get("x-conversation-id")
            return server.stream(server.streams.start(conversation, _chunks(run, request)))
        return JsonResponse(await unless_disconnected(http, _whole(run, request)))

    async def count(http: Request) -> Response:
        request = await read_body(http, ChatRequest)
        tokens = await unless_disconnected(http, count_tokens(server, request))
        return JsonResponse({"object": "response.input_tokens", "input_tokens": tokens})

    return [
        *api_routes(
            "/chat/completions",
            complete,
            body=ChatRequest,
            answer=ChatCompletion,
            parameters=(CONVERSATION_ID,),
            streams=True,
            queued=True,
            summary="Answer a conversation.",
        ),
        *api_routes(
            "/chat/completions/input_tokens",
            count,
            body=ChatRequest,
            answer=InputTokens,
            summary="Count a chat's tokens.",
        ),
    ]


async def _whole(run: ChatRun, request: ChatRequest) -> dict[str, Any]:
    answers = await run.answers()
    body = {
        **_head(run, "chat.completion"),
        "choices": [_choice(answer, request) for answer in answers],
        "usage": run.usage.body(),
        "timings": run.usage.timings(),
    }
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(run.prompt_logprobs)
    if request.return_token_ids:
        body["prompt_token_ids"] = run.prompt_token_ids
    return body


async def _chunks(run: ChatRun, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    """Events of a stream, the last one included."""
    options = request.stream_options
    last_usage = options is not None and bool(options.include_usage)
    each_usage = options is not None and bool(options.continuous_usage_stats)
    head = _head(run, "chat.completion.chunk")
    started: set[int] = set()

    def chunk(choice: dict[str, Any], **more: Any) -> bytes:
        body = {**head, "choices": [choice], **more}
        if each_usage:
            body["usage"] = run.usage.body()
        elif last_usage:
            body["usage"] = None
        return data_event(body)

    async with aclosing(run.events()) as events:
        async for event in events:
            if event.index not in started:
                more = {"prompt_token_ids": run.prompt_token_ids} if request.return_token_ids and not started else {}
                started.add(event.index)
                first = {"role": "assistant", "content": _echoed(request)}
                yield chunk({"index": event.index, "delta": first, "logprobs": None, "finish_reason": None}, **more)
            more = {"timings": run.usage.timings()} if event.finish_reason is not None else {}
            yield chunk(_chunk_choice(event, request), **more)
    if last_usage:
        yield data_event({**head, "choices": [], "usage": run.usage.body(), "timings": run.usage.timings()})
    yield DONE


def _head(run: ChatRun, kind: str) -> dict[str, Any]:
    return {
        "id": run.id,
        "object": kind,
        "created": run.created,
        "model": run.model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


def _choice(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    message = answer.message
    content = _echoed(request) + message.content
    made: dict[str, Any] = {
        "role": "assistant",
        "content": None if message.tool_calls and not content else content,
        "refusal": None,
    }
    if message.reasoning:
        made |= _reasoning(message.reasoning)
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    choice = {
        "index": answer.index,
        "message": made,
        "logprobs": None if answer.logprobs is None else {"content": answer.logprobs, "refusal": None},
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    return {**choice, "token_ids": answer.token_ids} if request.return_token_ids else choice


def _chunk_choice(event: ChatEvent, request: ChatRequest) -> dict[str, Any]:
    choice = {
        "index": event.index,
        "delta": _delta(event.delta),
        "logprobs": None if event.logprobs is None else {"content": event.logprobs, "refusal": None},
        "finish_reason": event.finish_reason,
    }
    if event.finish_reason is not None:
        choice["stop_reason"] = event.stop_reason
    return {**choice, "token_ids": event.token_ids} if request.return_token_ids else choice


def _delta(delta: Delta) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if delta.content:
        made["content"] = delta.content
    if delta.reasoning:
        made |= _reasoning(delta.reasoning)
    if delta.tool_calls:
        made["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return made


def _reasoning(text: str) -> dict[str, str]:
    # llama.cpp's and SGLang's clients read the first name, vLLM's the second.
    return {"reasoning_content": text, "reasoning": text}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _echoed(request: ChatRequest) -> str:
    """Text that the answer goes on with, if the request wants it to be part of the answer."""
    last = request.messages[-1]
    return last.content if request.echo and last.role == "assistant" and isinstance(last.content, str) else ""
