"""`/v1/messages`: Anthropic's API as a translation of the chat, for clients such as coding agents."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.routing import Route

from verax.serve.http.errors import field_error
from verax.serve.http.openapi import json_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import named_event
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.chat import CHAT_FIELDS, ChatRequest, Translation, count_tokens, run_chat
from verax.serve.text.run import Part, PartStep, PartTracker, Run, RunEvent, text_routes
from verax.serve.text.sampling import MAX_INT, Positive, Refused, Text


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


class RedactedThinkingBlock(Block, kw_only=True, tag="redacted_thinking"):
    """Reasoning that only the API which made it can read; left out."""

    data: str


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    """Tool call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(Block, kw_only=True, tag="tool_reference"):
    """Tool that a search among the tools has found. The prompt has it as all others."""

    tool_name: str

    @property
    def text(self) -> str:
        """Its name."""
        return self.tool_name


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    """Result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation, or instructions within it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]


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

    elsewhere: ClassVar = CHAT_FIELDS | {"output_format"}

    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    mcp_servers: Refused = None
    container: Refused = None


_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structured_outputs": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "tool_choice.function": "tool_choice",
}


def chat_of(request: CountTokensRequest) -> tuple[ChatRequest, dict[str, str]]:
    """The chat of a request, and this API's names of its fields, as `renamed` takes them."""
    for name in ("mcp_servers", "container"):
        if getattr(request, name, None):
            raise field_error(name, "it is not supported here")
    translation = Translation(_NAMES)
    translation.copy(request, "model", "max_tokens", "temperature", "top_p", "top_k", "stream")
    _add_messages(translation, request)
    values = translation.values
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
    values |= _reasoning_options(request)
    for i, tool in enumerate(request.tools or ()):
        translation.add_tool(f"tools[{i}]", "input_schema", tool)
    if request.tool_choice is not None:
        values |= _choice(request.tool_choice)
    output = request.output_config
    if output is not None and output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return translation.chat(), translation.names


def _reasoning_options(request: CountTokensRequest) -> dict[str, Any]:
    """Reasoning is off unless the request turns it on, as in Anthropic's API."""
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    values: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinks}}
    effort = request.output_config.effort if request.output_config else None
    return values if effort is None else {**values, "reasoning_effort": "xhigh" if effort == "max" else effort}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise field_error("tool_choice.name", "it is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    values: dict[str, Any] = {
        "tool_choice": named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
    }
    if choice.disable_parallel_tool_use is not None:
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return values


def _add_messages(translation: Translation, request: CountTokensRequest) -> None:
    # Instructions within a conversation go to its beginning, where templates want the only message of the system.
    within = [message.content for message in request.messages if message.role == "system"]
    texts = [_BILLING.sub("", _joined(content)) for content in (request.system, *within) if content]
    if instructions := [text for text in texts if text]:
        translation.add("system", "system", content="\n".join(instructions))
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        content = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        blocks = [(f"{where}.content[{j}]", block) for j, block in enumerate(content)]
        for place, block in blocks:
            role = {TextBlock: None, ToolResultBlock: "user"}.get(type(block), "assistant")
            if role not in (None, message.role):
                raise field_error(f"{place}.type", f"a message of role {message.role} has no such block")
        if message.role == "assistant":
            answer = translation.add(where, "assistant", content=_joined(content))
            if thoughts := [block.thinking for block in content if isinstance(block, ThinkingBlock)]:
                answer["reasoning_content"] = "\n".join(thoughts)
            for place, block in blocks:
                if isinstance(block, ToolUseBlock):
                    translation.add_call(place, "input", block.id, block.name, block.input)
            continue
        # Results of tools, each a message of its own, and then the text.
        for place, block in blocks:
            if isinstance(block, ToolResultBlock):
                text = f"{'Error: ' if block.is_error else ''}{_joined(block.content or '')}"
                translation.add(place, "tool", tool_call_id=block.tool_use_id, content=text)
        has_text = not content or any(isinstance(block, TextBlock) for block in content)
        if message.role == "user" and has_text:
            translation.add(where, "user", content=_joined(content))


def _joined(content: str | Sequence[Block]) -> str:
    """Text of the blocks that are text, and names of tools."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock | ToolReferenceBlock))


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Line before Claude Code's instructions, which has another number in each request: no prefix would be in the cache."""

NO_SIGNATURE = ""
"""Signature of reasoning, which clients expect: only the API that signed a thought could check one."""


def routes(server: Server) -> list[Route]:
    """Routes of messages."""

    async def start(request: MessagesRequest, record: RequestRecord) -> Run:
        return await run_chat(server, record, *chat_of(request))

    async def count(request: CountTokensRequest, record: RequestRecord) -> dict[str, int]:
        return {"input_tokens": await count_tokens(server, *chat_of(request))}

    path, answers = "/messages", "Answer, as Anthropic's API does."
    return [
        *text_routes(server, path, MessagesRequest, start, _Answer, summary=answers),
        *json_routes(f"{path}/count_tokens", CountTokensRequest, count, summary="Count a message's tokens."),
    ]


class _Answer:
    """A message on its way."""

    def __init__(self, run: Run, request: MessagesRequest):
        self._run = run
        self._tracker = PartTracker()

    async def whole(self) -> dict[str, Any]:
        """The answer, whose blocks are `text`, `thinking` and `tool_use`."""
        async with aclosing(self._run.events()) as events:
            last = await self._tracker.read(events)
        return self._message([_block(part) for part in self._tracker.parts], self._usage(), **_stop(last))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        last = None
        async with aclosing(self._run.events()) as events:
            async for event in events:
                if last is None:
                    yield _event("message_start", message=self._message([], {**self._usage(), "output_tokens": 0}))
                    yield _event("ping")
                last = event
                for step in self._tracker.steps(event):
                    if step.step == "end" and step.part.kind == "reasoning":
                        yield _delta_event(step.part, type="signature_delta", signature=NO_SIGNATURE)
                    yield _block_event(step)
        assert last is not None
        yield _event("message_delta", delta=_stop(last), usage=self._usage())
        yield _event("message_stop")

    def _message(self, content: list[Any], usage: dict[str, int], **stop: str | None) -> dict[str, Any]:
        head = {"id": f"msg_{self._run.id}", "type": "message", "role": "assistant", "model": self._run.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, **stop, "usage": usage}

    def _usage(self) -> dict[str, int]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


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
