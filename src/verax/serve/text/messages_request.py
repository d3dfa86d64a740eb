"""Request of Anthropic's `/v1/messages`, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from verax.serve.http.errors import ApiError
from verax.serve.http.fields import decode
from verax.serve.text.chat_request import ChatRequest
from verax.serve.text.sampling import MAX_INT, Positive, Refused, Text

__all__ = ["CountTokensRequest", "MessagesRequest", "chat_of"]


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
            raise ApiError(400, f"{name}: it is not supported here", param=name)
    values: dict[str, Any] = {"messages": _messages(request)}
    values |= {name: value for name in _SAME if (value := getattr(request, name, None)) is not None}
    if isinstance(request, MessagesRequest):
        if request.stop_sequences:
            values["stop"] = request.stop_sequences
        budget = request.thinking.budget_tokens if request.thinking else None
        if budget is not None and budget >= request.max_tokens:
            param = "thinking.budget_tokens"
            raise ApiError(400, f"{param}: expected less than max_tokens, got {budget}", param=param)
    if request.messages[-1].role == "assistant":
        if "tool_calls" in values["messages"][-1]:
            raise ApiError(400, "messages: the last one has a tool call without its result", param="messages")
        values["continue_final_message"] = True
    values |= {**_tools(request), **_reasoning(request)}
    output = request.output_config
    if output is not None and output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return decode(ChatRequest, values)


def _reasoning(request: CountTokensRequest) -> dict[str, Any]:
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
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                    **({} if tool.strict is None else {"strict": tool.strict}),
                },
            }
            for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is None:
        return values
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: it is missing", param="tool_choice.name")
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
                param = f"messages[{i}].content[{j}].type"
                raise ApiError(400, f"{param}: a message of role {message.role} has no such block", param=param)
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
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
