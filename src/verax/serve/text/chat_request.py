"""Request of a chat: OpenAI's fields, vLLM's, and their translation to what chat templates read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from verax.serve.http.errors import ApiError
from verax.serve.text.sampling import GenerationRequest, Positive

__all__ = ["ChatRequest", "template_messages", "template_options"]

MAX_TEMPLATE_OPTIONS = 64

_FREE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "template", "chat_template", "variables", "self"),
        *("template_options", "add_generation_prompt", "continue_final_message", "tokenize", "raise_exception"),
        *("strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner"),
    )
)
"""Names that have a meaning to the renderer or in every template."""


class FunctionCall(msgspec.Struct, kw_only=True):
    """Call of a function: its name, and its arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCallInput(msgspec.Struct, kw_only=True):
    """Tool call of an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message. Text is read."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallInput] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """Tool that a model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct, kw_only=True):
    """Name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """Function that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Annotated[list[ToolDefinition], Meta(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text as one string, arguments of calls as objects, developer as system.

    Raises:
        ApiError: 400, naming the message.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_options(request: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template, and how it ends.

    Raises:
        ApiError: 400 for a name that has another meaning, and for a contradiction.
    """
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message: it contradicts add_generation_prompt; one of them ends the prompt",
            param="continue_final_message",
        )
    if continued and request.messages[-1].role != "assistant":
        raise ApiError(
            400, "continue_final_message: the last message is not the assistant's", param="continue_final_message"
        )
    announced = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    options: dict[str, Any] = {"add_generation_prompt": announced, "continue_final_message": continued}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            options["enable_thinking"] = False
    given = request.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_OPTIONS:
        raise ApiError(
            400, f"chat_template_kwargs: expected at most {MAX_TEMPLATE_OPTIONS}", param="chat_template_kwargs"
        )
    for name in given:
        if not _FREE_NAME.fullmatch(name) or name in _RESERVED or name.endswith("_token"):
            raise ApiError(
                400,
                f"chat_template_kwargs: {name[:64]!r} cannot be set by a request",
                param="chat_template_kwargs",
            )
    return {**options, **given}


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and not (role == "assistant" and (message.tool_calls or _reasoning(message))):
        raise ApiError(400, f"{where}.content: it is missing", param=f"{where}.content")
    made: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    made |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    if (reasoning := _reasoning(message)) is not None:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            _template_call(call, f"{where}.tool_calls[{i}].function.arguments")
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def _reasoning(message: ChatMessage) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            param = f"{where}[{i}].type"
            raise ApiError(
                400, f"{param}: expected text, which is what this model reads, got {part.type[:50]!r}", param=param
            )
        if text is None:
            param = f"{where}[{i}].text"
            raise ApiError(400, f"{param}: it is missing", param=param)
        pieces.append(text)
    return "\n".join(pieces)


def _template_call(call: ToolCallInput, where: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise ApiError(400, f"{where}: it is not valid JSON: {error}", param=where) from error
    if not isinstance(arguments, Mapping):
        raise ApiError(400, f"{where}: expected a JSON object", param=where)
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}
