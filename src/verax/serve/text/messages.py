"""`/v1/messages`: Anthropic's API as a translation of the chat, for clients such as coding agents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.serve.http.body import Size, decode, read_body
from verax.serve.http.errors import JsonResponse, anthropic_error, field_error
from verax.serve.http.openapi import api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import named_event, unless_disconnected
from verax.serve.http.telemetry import record_of
from verax.serve.text.chat import ChatRequest, count_tokens, function_call, function_tool, run_chat
from verax.serve.text.run import Part, PartStep, PartTracker, Run, RunEvent
from verax.serve.text.sampling import MAX_INT, Positive, Refused, Text

__all__ = ["MessagesRequest", "chat_of", "routes"]


class Block(msgspec.Struct, kw_only=True, tag_field="type"):
    """Block of a message. The prefix cache needs no marks."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block, kw_only=True, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Block, kw_only=True, tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    """Tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    """Result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class Tool(msgspec.Struct, kw_only=True):
    """Function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Calls that the answer may or must have."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Switch of the reasoning before the answer. The budget is a wish."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """Form of the answer: JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Form of the answer, and the effort of the reasoning."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    mcp_servers: Refused = None
    container: Refused = None


_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
"""Fields that a chat has under the same name."""


def chat_of(request: CountTokensRequest) -> ChatRequest:
    """The chat of a request.

    Raises:
        ApiError: 400, naming the field.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name, None):
            raise field_error(name, "it is not supported here")
    values: dict[str, Any] = {"messages": _messages(request)}
    values |= {name: value for name in _SAME if (value := getattr(request, name, None)) is not None}
    if isinstance(request, MessagesRequest):
        if request.stop_sequences:
            values["stop"] = request.stop_sequences
        budget = request.thinking.budget_tokens if request.thinking else None
        if budget is not None and budget >= request.max_tokens:
            raise field_error("thinking.budget_tokens", f"expected less than max_tokens, got {budget}")
    if request.messages[-1].role == "assistant":
        if "tool_calls" in values["messages"][-1]:
            raise field_error("messages", "the last one has a tool call without its result")
        values["continue_final_message"] = True
    values |= {**_tools(request), **_reasoning_options(request)}
    output = request.output_config
    if output is not None and output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return decode(ChatRequest, values)


def _reasoning_options(request: CountTokensRequest) -> dict[str, Any]:
    """Reasoning is off unless the request turns it on, as in Anthropic's API."""
    if request.thinking is None or request.thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    values: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    effort = request.output_config.effort if request.output_config else None
    return values if effort is None else {**values, "reasoning_effort": "xhigh" if effort == "max" else effort}


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if request.tools:
        values["tools"] = [
            function_tool(tool.name, tool.input_schema, tool.description, tool.strict) for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is None:
        return values
    if choice.type == "tool" and choice.name is None:
        raise field_error("tool_choice.name", "it is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    values["tool_choice"] = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use is not None:
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return values


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if request.system:
        made.append({"role": "system", "content": _joined(request.system)})
    for i, message in enumerate(request.messages):
        content = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        for j, block in enumerate(content):
            theirs = isinstance(block, ToolResultBlock)
            if (theirs and message.role != "user") or (_is_answer(block) and message.role != "assistant"):
                raise field_error(
                    f"messages[{i}].content[{j}].type", f"a message of role {message.role} has no such block"
                )
        made += _user(content) if message.role == "user" else [_assistant(content)]
    return made


def _is_answer(block: Block) -> bool:
    return isinstance(block, (ThinkingBlock, ToolUseBlock))


def _user(content: Sequence[Block]) -> list[dict[str, Any]]:
    """Results of tools, each a message of its own, and then the text."""
    made: list[dict[str, Any]] = []
    for block in content:
        if isinstance(block, ToolResultBlock):
            text = _joined(block.content or "")
            text = f"Error: {text}" if block.is_error else text
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    texts = [block for block in content if isinstance(block, TextBlock)]
    return [*made, {"role": "user", "content": _joined(texts)}] if texts or not made else made


def _assistant(content: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _joined([block for block in content if isinstance(block, TextBlock)]),
    }
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in content if isinstance(block, ToolUseBlock)]
    if calls:
        message["tool_calls"] = [function_call(call.id, call.name, call.input) for call in calls]
    return message


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts of a message."""

    input_tokens: Size
    cache_creation_input_tokens: Size
    cache_read_input_tokens: Size
    output_tokens: Size


class MessageObject(msgspec.Struct, kw_only=True):
    """Whole answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Anthropic's blocks: `text`, `thinking` and `tool_use`."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    """Null at the beginning of a stream."""
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(msgspec.Struct, kw_only=True):
    """Number of a message's tokens."""

    input_tokens: Size


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
        tokens = await unless_disconnected(http, count_tokens(server, chat_of(request)))
        return JsonResponse(MessageTokens(input_tokens=tokens))

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


async def _whole(run: Run) -> MessageObject:
    tracker = PartTracker()
    async with aclosing(run.events()) as events:
        last = await tracker.read(events)
    return _message(run, content=[_block(part) for part in tracker.parts], **_stop(last), usage=_usage(run))


async def _events(run: Run) -> AsyncGenerator[bytes, None]:
    """Events of a stream, the last one included."""
    tracker, last = PartTracker(), None
    async with aclosing(run.events()) as events:
        async for event in events:
            if last is None:
                usage = msgspec.structs.replace(_usage(run), output_tokens=0)
                start = _message(run, content=[], stop_reason=None, stop_sequence=None, usage=usage)
                yield _event("message_start", message=start)
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


def _message(run: Run, **fields: Any) -> MessageObject:
    return MessageObject(id=f"msg_{run.id}", type="message", role="assistant", model=run.model, **fields)


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
    """Arguments of a call. Text that is not JSON, such as a call that was cut short, is given as Anthropic advises."""
    try:
        read = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        read = None
    return read if isinstance(read, dict) else {"INVALID_JSON": arguments}


def _stop(last: RunEvent) -> dict[str, Any]:
    """Fields that say why an answer ended."""
    if last.finish_reason in ("tool_calls", "length"):
        reason = "tool_use" if last.finish_reason == "tool_calls" else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}
    sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
    return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}


def _usage(run: Run) -> MessageUsage:
    usage = run.usage
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
