"""`/v1/chat/completions`: OpenAI's chat, whole and streamed, and the number of a chat's input tokens.

The bodies of `/v1/messages` and `/v1/responses` become a `ChatRequest` too, which `run_chat` puts into the engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.routing import Route

from verax.errors import InvalidParameterError, QueueFullError
from verax.serve.http.body import decode
from verax.serve.http.errors import field_error, renamed
from verax.serve.http.openapi import json_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, data_event
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.run import Run, RunAnswer, RunEvent, prompt_logprobs, text_routes
from verax.serve.text.sampling import GenerationRequest, Positive, Refused, form_error, sampling_params, text_form
from verax.text.features.chat_format import parser_for, tool_grammar
from verax.text.features.tool_calls import ToolCallDelta

MAX_TEMPLATE_OPTIONS = 64

_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
"""Types of the parts of a message that are read: OpenAI's, then the names of its responses."""

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
    arguments: str | dict[str, Any] | None = "{}"


class ToolCallInput(msgspec.Struct, kw_only=True):
    """Tool call of an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = "function"


class ThoughtText(msgspec.Struct, kw_only=True):
    """Text of a reasoning."""

    text: str


class ContentPart(msgspec.Struct, kw_only=True):
    """Part of a message. Text is read."""

    type: Annotated[str, Meta(extra_json_schema={"enum": [*_TEXT_PARTS]})]
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ThoughtText] | None = None
    """Reasoning of an earlier answer, in a part of type `thinking`, as Mistral's clients have it."""


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallInput] | None = None
    tool_call_id: str | None = None
    audio: Refused = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    """The one call of an answer, as OpenAI's API had it before tools."""
    prefix: bool | None = None
    """True to continue the message, as DeepSeek and Mistral name it. Refused: use `continue_final_message`."""
    partial: bool | None = None
    """Qwen's and Kimi's name of `prefix`."""
    images: Refused = None
    """Pictures, as Ollama's clients give them."""


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


class NamedToolChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """Function that must be called."""

    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Functions that may be called, of those in `tools`."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Choice among some of the functions."""

    allowed_tools: AllowedTools


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of `/v1/chat/completions`."""

    elsewhere: ClassVar = frozenset(("prompt", "suffix", "best_of", "input", "instructions", "system"))

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Annotated[list[ToolDefinition], Meta(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    max_completion_tokens: Positive | None = None
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


CHAT_FIELDS = frozenset(ChatRequest.__struct_fields__) - {"user", "priority", "stream_options"}
"""Fields of a chat that change its answer, which the other APIs refuse where they lack them."""


class Translation:
    """Chat that is made of another API's request."""

    def __init__(self, names: Mapping[str, str]):
        self.names = dict(names)
        """Names of the chat's fields in the client's API, for errors."""
        self.values: dict[str, Any] = {"messages": []}
        """Fields of the chat so far."""

    def copy(self, request: msgspec.Struct, *names: str) -> None:
        """Take over the fields that have the same name and meaning."""
        self.values |= {name: value for name in names if (value := getattr(request, name, None)) is not None}

    def add(self, where: str, role: str, **fields: Any) -> dict[str, Any]:
        """Add a message, which is made of the request's field `where`."""
        self.names[f"messages[{len(self.values['messages'])}]"] = where
        self.values["messages"].append({"role": role, **fields})
        return self.values["messages"][-1]

    def add_call(self, where: str, field: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a tool call to the last message; its arguments are the field `field` of `where`."""
        last = len(self.values["messages"]) - 1
        calls = self.values["messages"][last].setdefault("tool_calls", [])
        path = f"messages[{last}].tool_calls[{len(calls)}]"
        self.names |= {path: where, f"{path}.function": where, f"{path}.function.arguments": f"{where}.{field}"}
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_tool(self, where: str, field: str, tool: Any) -> None:
        """Add a function, whose JSON schema is the field `field` of a tool."""
        tools = self.values.setdefault("tools", [])
        path = f"tools[{len(tools)}]"
        self.names |= {path: where, f"{path}.function": where, f"{path}.function.parameters": f"{where}.{field}"}
        function = FunctionDefinition(
            name=tool.name, parameters=getattr(tool, field), description=tool.description, strict=tool.strict
        )
        tools.append({"type": "function", "function": msgspec.to_builtins(function)})

    def chat(self) -> ChatRequest:
        """The chat."""
        with renamed(self.names):
            return decode(ChatRequest, self.values)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text as one string, developer as system, function as tool."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_options(request: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, and how it ends. `defaults`: variables that the request may leave out."""
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        raise field_error("continue_final_message", "it contradicts add_generation_prompt: one of them ends the prompt")
    if continued and request.messages[-1].role != "assistant":
        raise field_error("continue_final_message", "the last message is not the assistant's")
    announced = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    options = {**defaults, "add_generation_prompt": announced, "continue_final_message": continued}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            options["enable_thinking"] = False
    given = request.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_OPTIONS:
        raise field_error("chat_template_kwargs", f"expected at most {MAX_TEMPLATE_OPTIONS}")
    for name in (*defaults, *given):
        if not _FREE_NAME.fullmatch(name) or name in _RESERVED or name.endswith("_token"):
            raise field_error("chat_template_kwargs", f"{name[:64]!r} cannot be set by a request")
    return {**options, **given}


_ROLES = {"developer": "system", "function": "tool"}


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role)
    given = message.refusal if message.content is None else message.content
    reasonings = [message.reasoning_content, message.reasoning, message.thinking]
    thoughts = [part for part in given or () if isinstance(part, ContentPart) and part.type == "thinking"]
    if role == "assistant" and isinstance(given, list) and thoughts:
        told = [part.thinking or "" for part in thoughts]
        texts = (text if isinstance(text, str) else "\n".join(piece.text for piece in text) for text in told)
        reasonings.append("\n".join(texts))
        given = [part for part in given if part.type != "thinking"] or None
    reasoning = next((text for text in reasonings if text is not None), None)
    if given is None and role != "assistant":
        raise field_error(f"{where}.content", "it is missing")
    for name in ("audio", "images"):
        if getattr(message, name):
            raise field_error(f"{where}.{name}", "it is not supported here; give its text as content")
    for name in ("prefix", "partial"):
        if getattr(message, name):
            raise field_error(f"{where}.{name}", "it is not supported here; set the request's continue_final_message")
    content = None if given is None else joined_text(given, f"{where}.content")
    fields: dict[str, Any] = {"role": role, "content": content}
    others = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    fields |= {name: value for name, value in others.items() if value is not None}
    calls = message.tool_calls or ([ToolCallInput(function=message.function_call)] if message.function_call else ())
    if calls:
        fields["tool_calls"] = [_template_call(call) for call in calls]
    return fields


def joined_text(content: str | Sequence[Any], where: str) -> str:
    """Text of a message, or of its parts, each with `type`, `text` and `refusal`. `where`: its field."""
    if isinstance(content, str):
        return content
    pieces = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS:
            problem = f"expected text, which is what this model reads, got {part.type[:50]!r}"
            raise field_error(f"{where}[{i}].type", problem)
        if text is None:
            raise field_error(f"{where}[{i}].text", "it is missing")
        pieces.append(text)
    return "\n".join(pieces)


def _template_call(call: ToolCallInput) -> dict[str, Any]:
    # A cut answer's arguments are not whole JSON, and come back: the template's part of the engine reads any text.
    arguments = call.function.arguments
    fields = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return fields if call.id is None else {"id": call.id, **fields}


async def run_chat(
    server: Server, record: RequestRecord, request: ChatRequest, names: Mapping[str, str] | None = None
) -> Run:
    """Check a chat and queue it.

    `record`: of the HTTP request, for its log line. `names`: the client's names of a chat's fields in errors, as
    `renamed` takes them.

    Raises:
        ApiError: 400, 404 for another model, 429 if the queue is full, and for what the engine or the template refuses.
    """
    with renamed(names or {}):
        record.model, tools = server.text_model(request.model), _tools(request)
        _check(server, request)
        record.prompt = msgspec.to_builtins(request.messages) if server.settings.log_prompts else None
        prompt = await render_chat(server, request)
        given = request.tool_choice
        mode = given.allowed_tools.mode if isinstance(given, AllowedToolsChoice) else msgspec.to_builtins(given)
        choice = mode or ("auto" if tools else "none")
        form = server.chat_format
        try:
            grammar = tool_grammar(
                form, tools, choice, request.parallel_tool_calls is not False, prompt=prompt, form=text_form(request)
            )
        except InvalidParameterError as error:
            raise form_error(error, request) from error
        params = sampling_params(
            server,
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            structured_outputs=grammar,
            after=form.structured_after(prompt),
            **({} if request.skip_special_tokens is not None else form.sampling_overrides),
        )
        parser = functools.partial(
            parser_for, form, tools=tools, prompt=prompt, parse_tool_calls=choice != "none", parse_reasoning=True
        )
        return Run(
            server,
            request,
            record,
            model=record.model,
            prompts=[prompt],
            params=params,
            add_special_tokens=request.add_special_tokens is True,
            continues_prompt=request.continue_final_message is True,
            field="messages",
            new_parser=parser,
            names=names,
        )


async def render_chat(server: Server, request: ChatRequest) -> str:
    """Prompt of a chat, by the checkpoint's template."""
    form, tools = server.chat_format, _tools(request)
    messages = form.history(template_messages(request.messages), tools)
    options = template_options(request, server.settings.template_variables)
    return await server.engine.render(messages, tools=form.functions(tools), **options)


async def count_tokens(server: Server, request: ChatRequest, names: Mapping[str, str] | None = None) -> int:
    """Number of tokens of a chat's prompt; arguments and errors as in `run_chat`."""
    with renamed(names or {}):
        server.text_model(request.model)
        prompt = await render_chat(server, request)
        return len(await server.engine.encode(prompt, add_special_tokens=request.add_special_tokens is True))


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Functions that the model may call."""
    choice = request.tool_choice
    if request.tools is None or choice == "none":
        return None
    tools = request.tools
    if isinstance(choice, AllowedToolsChoice):
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        if not (tools := [tool for tool in tools if tool.function.name in names]):
            raise field_error("tool_choice", "none of the allowed tools is a function of tools")
    return [msgspec.to_builtins(tool) for tool in tools]


def _check(server: Server, request: ChatRequest) -> None:
    """Refuse what can be refused without a template or a tokenizer."""
    if request.top_logprobs and not request.logprobs:
        raise field_error("top_logprobs", "it needs logprobs to be true")
    effort = request.reasoning_effort
    if server.chat_format.tools == "harmony" and effort not in (None, "low", "medium", "high"):
        raise field_error("reasoning_effort", f"this model has low, medium and high, got {effort}")
    demanded = isinstance(request.tool_choice, NamedToolChoice) or request.tool_choice == "required"
    if demanded and request.tools is None:
        raise field_error("tool_choice", "there are no tools to choose from")
    # Templates and tokenizers cost time, which a full queue lacks.
    waiting, limit = server.engine.stats().num_requests_waiting, server.engine.max_queued_requests
    if waiting >= limit > 0:
        raise QueueFullError(f"max_queued_requests: {waiting} requests wait, which is the limit; try again later")


def routes(server: Server) -> list[Route]:
    """Routes of the chat."""

    async def start(request: ChatRequest, record: RequestRecord) -> Run:
        return await run_chat(server, record, request)

    async def count(request: ChatRequest, record: RequestRecord) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": await count_tokens(server, request)}

    path, paged = "/chat/completions", not server.settings.disable_page  # the page's routes resume a stream
    return [
        *text_routes(server, path, ChatRequest, start, _Answer, resumable=paged, summary="Answer a conversation."),
        *json_routes(f"{path}/input_tokens", ChatRequest, count, summary="Count a chat's tokens."),
    ]


class _Answer:
    """A chat's answer on its way."""

    def __init__(self, run: Run, request: ChatRequest):
        self._run = run
        self._request = request
        last = template_messages(request.messages[-1:])[0]
        self._echoed = last["content"] or "" if request.echo and last["role"] == "assistant" else ""
        """Text that the answer continues, if the request wants it to be part of the answer."""

    async def whole(self) -> dict[str, Any]:
        """The answer."""
        run, request = self._run, self._request
        choices = [self._choice(answer) for answer in await run.answers()]
        (output,) = run.outputs
        body = {**run.head("chatcmpl", "chat.completion"), "choices": choices, "usage": run.usage.body()}
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output)
        if request.return_token_ids and output is not None:
            body["prompt_token_ids"] = output.prompt_token_ids
        return {**body, **run.timings()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        run, request = self._run, self._request
        head = run.head("chatcmpl", "chat.completion.chunk")
        started: set[int] = set()

        def chunk(choice: dict[str, Any], **more: Any) -> bytes:
            return data_event({**head, "choices": [choice], **more, **run.chunk_usage()})

        async with aclosing(run.events()) as events:
            async for event in events:
                if event.index not in started:
                    (output,) = run.outputs
                    ids = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids and output else {}
                    first = {"role": "assistant", "content": self._echoed}
                    empty = {"index": event.index, "delta": first, "logprobs": None, "finish_reason": None}
                    yield chunk(empty, **({} if started else ids))
                    started.add(event.index)
                choice = {"delta": _delta(event), **self._common(event)}
                if event.finish_reason is None:
                    del choice["stop_reason"]
                yield chunk(choice, **(run.timings() if event.finish_reason is not None else {}))
        if (last := run.last_usage()) is not None:
            yield data_event({**head, **last})
        yield DONE

    def _choice(self, answer: RunAnswer) -> dict[str, Any]:
        message = answer.message
        content = self._echoed + message.content
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
        fields = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        fields |= _reasoning(message.reasoning) | ({"tool_calls": calls} if calls else {})
        return {"message": fields, **self._common(answer)}

    def _common(self, new: RunAnswer | RunEvent) -> dict[str, Any]:
        """Fields of a choice that whole answers and chunks share."""
        fields = {
            "index": new.index,
            "logprobs": None if new.logprobs is None else {"content": new.logprobs, "refusal": None},
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        return {**fields, "token_ids": new.token_ids} if self._request.return_token_ids else fields


def _delta(event: RunEvent) -> dict[str, Any]:
    delta = event.delta
    fields: dict[str, Any] = {"content": delta.content} if delta.content else {}
    fields |= _reasoning(delta.reasoning)
    return {**fields, "tool_calls": [_call(call) for call in delta.tool_calls]} if delta.tool_calls else fields


def _reasoning(text: str) -> dict[str, str]:
    # llama.cpp's and SGLang's clients read the first name, vLLM's the second.
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
