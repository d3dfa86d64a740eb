"""`/v1/chat/completions`: OpenAI's chat, whole and streamed, and the number of a chat's input tokens.

The bodies of `/v1/messages` and `/v1/responses` become a `ChatRequest` too, which `run_chat` puts into the engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.errors import QueueFullError
from verax.serve.http.body import Size, read_body
from verax.serve.http.errors import ApiError, JsonResponse, field_error
from verax.serve.http.openapi import Parameter, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import DONE, ID_PATTERN, data_event, unless_disconnected
from verax.serve.http.telemetry import RequestRecord, record_of
from verax.serve.text.run import (
    Choice,
    Generated,
    PromptLogprobs,
    Run,
    RunAnswer,
    RunEvent,
    TokenLogprob,
    prompt_logprobs,
)
from verax.serve.text.sampling import GenerationRequest, Positive, sampling_params
from verax.text.features.chat_format import parser_for, tool_grammar
from verax.text.features.tool_calls import Delta, ToolCallDelta

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "InputTokens",
    "ToolDefinition",
    "count_tokens",
    "function_call",
    "function_tool",
    "render_chat",
    "routes",
    "run_chat",
]

CONVERSATION_ID = Parameter(
    "X-Conversation-Id",
    {"type": "string", "pattern": f"^{ID_PATTERN}$"},
    "header",
    "keeps a stream running while its page is reloaded",
)

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


def function_tool(name: str, parameters: Any, description: str | None, strict: bool | None) -> dict[str, Any]:
    """Entry of a chat's `tools` for a function, as another API describes it."""
    function = FunctionDefinition(name=name, parameters=parameters, description=description, strict=strict)
    return {"type": "function", "function": msgspec.to_builtins(function)}


def function_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Entry of a message's `tool_calls` for a call of an earlier answer, as another API has it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text as one string, developer as system.

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
        raise field_error("continue_final_message", "it contradicts add_generation_prompt: one of them ends the prompt")
    if continued and request.messages[-1].role != "assistant":
        raise field_error("continue_final_message", "the last message is not the assistant's")
    announced = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    options: dict[str, Any] = {"add_generation_prompt": announced, "continue_final_message": continued}
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            options["enable_thinking"] = False
    given = request.chat_template_kwargs or {}
    if len(given) > MAX_TEMPLATE_OPTIONS:
        raise field_error("chat_template_kwargs", f"expected at most {MAX_TEMPLATE_OPTIONS}")
    for name in given:
        if not _FREE_NAME.fullmatch(name) or name in _RESERVED or name.endswith("_token"):
            raise field_error("chat_template_kwargs", f"{name[:64]!r} cannot be set by a request")
    return {**options, **given}


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and not (role == "assistant" and (message.tool_calls or _reasoning_of(message))):
        raise ApiError(400, f"{where}.content: it is missing", param=f"{where}.content")
    content = None if message.content is None else _text(message.content, f"{where}.content")
    made: dict[str, Any] = {"role": role, "content": content}
    made |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    if (reasoning := _reasoning_of(message)) is not None:
        made["reasoning_content"] = reasoning
    if message.tool_calls:
        made["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return made


def _reasoning_of(message: ChatMessage) -> str | None:
    return message.reasoning if message.reasoning_content is None else message.reasoning_content


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    pieces = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            raise field_error(
                f"{where}[{i}].type", f"expected text, which is what this model reads, got {part.type[:50]!r}"
            )
        if text is None:
            raise field_error(f"{where}[{i}].text", "it is missing")
        pieces.append(text)
    return "\n".join(pieces)


def _template_call(call: ToolCallInput) -> dict[str, Any]:
    # A cut answer's arguments are not whole JSON, and come back: the template's part of the engine reads any text.
    arguments = call.function.arguments
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of an answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Function that an answer calls, and its arguments as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, kw_only=True):
    """Tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """One of several answers to a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Generated, kw_only=True):
    """Whole answer of `/v1/chat/completions`. A stream has OpenAI's `chat.completion.chunk`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: Sequence[Size] | UnsetType = UNSET


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of tokens of a chat, or of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: Size


async def run_chat(server: Server, request: ChatRequest, record: RequestRecord | None = None) -> Run:
    """Check a chat and queue it.

    Args:
        server: with a text engine.
        request: the chat.
        record: of the HTTP request, for its log line.

    Raises:
        ApiError: 400, 404 for another model, 429 if the queue is full.
        VeraxError: for what the engine or the template refuses.
    """
    model, tools = server.text_model(request.model), _tools(request)
    _check(server, request)
    if record is not None:
        record.model = model
        record.prompt = msgspec.to_builtins(request.messages) if server.settings.log_prompts else None
    prompt = await render_chat(server, request)
    choice = msgspec.to_builtins(request.tool_choice) or ("auto" if tools else "none")
    form = server.chat_format
    grammar = tool_grammar(form, tools, choice, request.parallel_tool_calls is not False, prompt=prompt)
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
        model=model,
        prompts=[prompt],
        params=params,
        add_special_tokens=False,
        field="messages",
        new_parser=parser,
    )


async def render_chat(server: Server, request: ChatRequest) -> str:
    """Prompt of a chat, by the checkpoint's template.

    Raises:
        ApiError: 400, naming the field.
        VeraxError: for what the template refuses.
    """
    options = template_options(request)
    return await server.engine.render(template_messages(request.messages), tools=_tools(request), **options)


async def count_tokens(server: Server, request: ChatRequest) -> int:
    """Number of tokens of a chat's prompt.

    Raises:
        ApiError: 400, naming the field; 404 for another model.
        VeraxError: for what the template refuses.
    """
    server.text_model(request.model)
    prompt = await render_chat(server, request)
    return len(await server.engine.encode(prompt, add_special_tokens=False))


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Functions that the model may call."""
    if request.tools is None or request.tool_choice == "none":
        return None
    return [msgspec.to_builtins(tool) for tool in request.tools]


def _check(server: Server, request: ChatRequest) -> None:
    """Refuse what can be refused without a template or a tokenizer."""
    if request.top_logprobs is not None and not request.logprobs:
        raise field_error("top_logprobs", "it needs logprobs to be true")
    demanded = isinstance(request.tool_choice, NamedToolChoice) or request.tool_choice == "required"
    if demanded and request.tools is None:
        raise field_error("tool_choice", "there are no tools to choose from")
    # Templates and tokenizers cost time, which a full queue lacks.
    waiting, limit = server.engine.stats().num_requests_waiting, server.engine.max_queued_requests
    if waiting >= limit > 0:
        raise QueueFullError(f"max_queued_requests: {waiting} requests wait, which is the limit; try again later")


def routes(server: Server) -> list[Route]:
    """Routes of the chat."""

    async def complete(http: Request) -> Response:
        request = await read_body(http, ChatRequest)
        run = await unless_disconnected(http, run_chat(server, request, record_of(http)))
        if request.stream:
            conversation = http.headers.get("x-conversation-id")
            return server.stream(server.streams.start(conversation, _chunks(run, request)))
        return JsonResponse(await unless_disconnected(http, _whole(run, request)))

    async def count(http: Request) -> Response:
        request = await read_body(http, ChatRequest)
        tokens = await unless_disconnected(http, count_tokens(server, request))
        return JsonResponse(InputTokens(object="response.input_tokens", input_tokens=tokens))

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


async def _whole(run: Run, request: ChatRequest) -> ChatCompletion:
    answers = await run.answers()
    (output,) = run.outputs
    return ChatCompletion(
        **run.head("chatcmpl"),
        object="chat.completion",
        choices=[_choice(answer, request) for answer in answers],
        usage=run.usage.body(),
        **run.timings(),
        prompt_logprobs=UNSET if request.prompt_logprobs is None else prompt_logprobs(output),
        prompt_token_ids=output.prompt_token_ids if request.return_token_ids and output else UNSET,
    )


def _choice(answer: RunAnswer, request: ChatRequest) -> ChatChoice:
    message = answer.message
    content = _echoed(request) + message.content
    calls = [
        AnswerToolCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    return ChatChoice(
        index=answer.index,
        message=AnswerMessage(
            role="assistant",
            content=None if calls and not content else content,
            refusal=None,
            **_reasoning(message.reasoning),
            tool_calls=calls or UNSET,
        ),
        logprobs=_logprobs(answer.logprobs),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        token_ids=answer.token_ids if request.return_token_ids else UNSET,
    )


async def _chunks(run: Run, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    """Events of a stream, the last one included."""
    head = {**run.head("chatcmpl"), "object": "chat.completion.chunk"}
    started: set[int] = set()

    def chunk(choice: dict[str, Any], **more: Any) -> bytes:
        return data_event({**head, "choices": [choice], **more, **run.chunk_usage()})

    async with aclosing(run.events()) as events:
        async for event in events:
            if event.index not in started:
                (output,) = run.outputs
                ids = {"prompt_token_ids": output.prompt_token_ids} if request.return_token_ids and output else {}
                first = {"role": "assistant", "content": _echoed(request)}
                empty = {"index": event.index, "delta": first, "logprobs": None, "finish_reason": None}
                yield chunk(empty, **({} if started else ids))
                started.add(event.index)
            yield chunk(_chunk_choice(event, request), **(run.timings() if event.finish_reason is not None else {}))
    if (last := run.last_usage()) is not None:
        yield data_event({**head, **last})
    yield DONE


def _chunk_choice(event: RunEvent, request: ChatRequest) -> dict[str, Any]:
    choice = {
        "index": event.index,
        "delta": _delta(event.delta),
        "logprobs": _logprobs(event.logprobs),
        "finish_reason": event.finish_reason,
    }
    if event.finish_reason is not None:
        choice["stop_reason"] = event.stop_reason
    return {**choice, "token_ids": event.token_ids} if request.return_token_ids else choice


def _delta(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {"content": delta.content} if delta.content else {}
    fields |= _reasoning(delta.reasoning)
    if delta.tool_calls:
        fields["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return fields


def _reasoning(text: str) -> dict[str, str]:
    # llama.cpp's and SGLang's clients read the first name, vLLM's the second.
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _logprobs(entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
    return None if entries is None else ChatLogprobs(content=entries)


def _call(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _echoed(request: ChatRequest) -> str:
    """Text that the answer continues, if the request wants it to be part of the answer."""
    last = request.messages[-1]
    return last.content if request.echo and last.role == "assistant" and isinstance(last.content, str) else ""
