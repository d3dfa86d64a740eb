"""`/v1/responses`: OpenAI's responses without state, as a translation of the chat."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.routing import Route

from verax.serve.http.body import decode
from verax.serve.http.errors import ApiError, api_error, field_error
from verax.serve.http.openapi import json_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import named_event
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.chat import CHAT_FIELDS, ChatRequest, Translation, count_tokens, joined_text, run_chat
from verax.serve.text.run import Part, PartStep, PartTracker, Run, RunEvent, text_routes
from verax.serve.text.sampling import Positive, Refused

S = TypeVar("S", bound=msgspec.Struct)

LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` that asks for log-probabilities."""

_INCLUDE = (
    *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "web_search_call.results"),
    *("web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs"),
    "computer_call_output.output.image_url",
)
"""Entries of `include`. Reasoning comes in the open, and what tools of OpenAI's server find is never there."""

_NEEDS_STATE = ("previous_response_id", "background", "conversation", "prompt")
"""Fields that need a server that keeps responses."""

_TOOLS_ITEM = "additional_tools"
"""Type of the item in which newer coding agents give their tools."""

_OTHER_ITEM = re.compile(r"[a-z_]{1,40}_(call|output)")
"""Types of items of tools that this server does not know; a conversation keeps them as text."""


class InputText(msgspec.Struct, kw_only=True):
    """Text of a message, or of a call's result."""

    type: Literal["input_text", "output_text", "refusal", "text"]
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """Item of the input. Ids and states of earlier responses mean nothing here."""

    id: str | None = None
    status: str | None = None


class ResponseMessage(Item, kw_only=True):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    type: Literal["message"] = "message"


class InputCall(Item, kw_only=True):
    """Call of a function in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputCallOutput(Item, kw_only=True):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class ReasoningText(msgspec.Struct, kw_only=True):
    """Text of a reasoning."""

    type: str
    text: str


class InputReasoning(Item, kw_only=True):
    """Reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": ResponseMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}

INPUT_ITEMS = tuple(_ITEMS.values())

_SCHEMAS = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in INPUT_ITEMS]

InputItem = Annotated[dict[str, Any], Meta(extra_json_schema={"anyOf": _SCHEMAS})]
"""Item whose `type` names its kind; a message may lack it."""

AnyTool = Annotated[
    dict[str, Any], Meta(extra_json_schema={"required": ["type"], "properties": {"type": {"type": "string"}}})
]
"""`ResponseTool`, or a tool of another type."""

Off = Annotated[bool, Meta(extra_json_schema={"const": False})]
"""Switch of what needs a server that keeps responses."""


class ResponseTool(msgspec.Struct, kw_only=True):
    """Function that the model may call. Tools of other types are left out."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the tool of type `namespace` that it stands in, such as an MCP server's."""

    @property
    def full_name(self) -> str:
        """Name by which the model calls it."""
        return _full_name(self.namespace, self.name)


def _full_name(namespace: Any, name: str) -> str:
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) else name


class TextFormat(msgspec.Struct, kw_only=True):
    """Form of the answer: any text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream. Nothing is obfuscated."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/responses`."""

    elsewhere: ClassVar = CHAT_FIELDS

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Annotated[str, Meta(extra_json_schema={"enum": _INCLUDE})]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    store: bool | None = None
    background: Off | None = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    max_tool_calls: Refused = None


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}


def chat_of(request: ResponsesRequest) -> tuple[ChatRequest, dict[str, str]]:
    """The chat of a request, and this API's names of its fields, as `renamed` takes them."""
    _check(request)
    translation = Translation(_NAMES)
    translation.copy(request, "model", "temperature", "top_p", "stream", "parallel_tool_calls")
    values = translation.values
    if request.instructions:
        translation.add("instructions", "system", content=request.instructions)
    if isinstance(request.input, str):
        translation.add("input", "user", content=request.input)
    else:
        for i, item in enumerate(request.input):
            _add_item(translation, item, f"input[{i}]")
    if request.max_output_tokens is not None:
        values["max_completion_tokens"] = request.max_output_tokens
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        values |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.reasoning is not None and request.reasoning.effort is not None:
        values["reasoning_effort"] = request.reasoning.effort
    (functions, _), choice = _functions(request), request.tool_choice
    if isinstance(choice, dict):
        match choice:
            case {"type": "function", "name": str(name)}:
                choice = {"type": "function", "function": {"name": _full_name(choice.get("namespace"), name)}}
            case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
                chosen = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
                functions = {place: tool for place, tool in functions.items() if tool.name in chosen}
                if not functions:
                    raise field_error("tool_choice", "none of the allowed tools is a function of tools")
                choice = mode
            case _:
                raise field_error("tool_choice", "expected a function by name, or allowed_tools with mode and tools")
    for place, tool in functions.items():
        translation.add_tool(place, "parameters", msgspec.structs.replace(tool, name=tool.full_name))
    if choice is not None:
        values["tool_choice"] = choice
    form = request.text.format if request.text else None
    if form is not None:
        if form.type == "json_schema" and form.schema is None:
            raise field_error("text.format.schema", "it is missing")
        values["response_format"] = {"type": form.type, "schema": form.schema}
    return translation.chat(), translation.names


def _check(request: ResponsesRequest) -> None:
    """Refuse what this server does not have."""
    for name in _NEEDS_STATE:
        if getattr(request, name):
            raise field_error(name, "it is not supported here, as this server keeps no responses")
    if request.max_tool_calls is not None:
        raise field_error("max_tool_calls", "it is for built-in tools, which this server lacks")
    if request.truncation == "auto":
        raise field_error("truncation", "expected disabled; no part of a conversation is dropped")
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDE:
            raise field_error(f"include[{i}]", f"expected {' or '.join(_INCLUDE)}, got {name[:100]!r}")


def _tools(tools: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tools of a list with their places, and those within namespaces, of which `functions` has no name."""
    if not isinstance(tools, list):
        raise field_error(where, "expected a list")
    for i, tool in enumerate(tools):
        place = f"{where}[{i}]"
        if not isinstance(tool, dict):
            raise field_error(place, "expected an object")
        if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            own = {} if tool.get("name") == "functions" else {"namespace": tool.get("name")}
            yield from ((inner, {**each, **own}) for inner, each in _tools(tool["tools"], f"{place}.tools"))
        else:
            yield place, tool


def _functions(request: ResponsesRequest) -> tuple[dict[str, ResponseTool], dict[str, str]]:
    """The tools that are functions, and the types of the others, by their places in the request."""
    tools = dict(_tools(request.tools or [], "tools"))
    for i, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if item.get("type") == _TOOLS_ITEM:
            tools |= _tools(item.get("tools"), f"input[{i}].tools")
    types = {place: str(tool.get("type") or "function") for place, tool in tools.items()}
    functions = {place: _read(ResponseTool, tools[place], place) for place, type in types.items() if type == "function"}
    return functions, {place: type[:50] for place, type in types.items() if type != "function"}


def _warnings(request: ResponsesRequest, others: Mapping[str, str]) -> list[str]:
    """Warnings of what is left out of a request, by the field's name; coding agents send such requests.

    `others`: types of the tools that are not functions, by their places.
    """
    warnings = [f"{place}: {type!r} is left out; the model can call functions only" for place, type in others.items()]
    if request.store:
        warnings.append("store: the response is not kept")
    if request.reasoning is not None and (request.reasoning.summary or request.reasoning.generate_summary):
        warnings.append("reasoning.summary: the reasoning comes whole, without a summary")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        warnings.append("text.verbosity: it has no effect here")
    return warnings


def _read(kind: type[S], value: Mapping[str, Any], where: str) -> S:
    try:
        return decode(kind, value)
    except ApiError as error:
        raise ApiError(error.status, f"{where}.{error.message}", param=f"{where}.{error.param}") from error


def _add_item(translation: Translation, given: Mapping[str, Any], where: str) -> None:
    """Add an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    type = str(given.get("type", "message"))

    def answer(*without: str) -> dict[str, Any]:
        """The message that the item belongs to: the last one, or a new one if that has one of these keys."""
        messages = translation.values["messages"]
        if messages and messages[-1]["role"] == "assistant" and not any(key in messages[-1] for key in without):
            return messages[-1]
        return translation.add(where, "assistant")

    if type == _TOOLS_ITEM:
        return
    if type not in _ITEMS:
        if not _OTHER_ITEM.fullmatch(type):
            raise field_error(f"{where}.type", f"expected {', '.join(_ITEMS)}, got {type[:50]!r}")
        text = json.dumps({name: value for name, value in given.items() if name not in ("id", "status")})
        if type.endswith("_output"):
            translation.add(where, "user", content=text)
        else:
            message = answer("tool_calls")
            message["content"] = "\n".join(filter(None, (message.get("content"), text)))
        return
    match item := _read(_ITEMS[type], given, where):
        case InputCallOutput():
            output = joined_text(item.output, f"{where}.output")
            translation.add(where, "tool", tool_call_id=item.call_id, content=output)
        case InputCall():
            answer()
            name = _full_name(item.namespace, item.name)
            translation.add_call(where, "arguments", item.call_id, name, item.arguments)
        case InputReasoning():
            thoughts = item.content or item.summary or []
            message = answer("content", "tool_calls", "reasoning_content")
            message["reasoning_content"] = "\n".join(thought.text for thought in thoughts)
        case ResponseMessage(role="assistant"):
            answer("content", "tool_calls")["content"] = joined_text(item.content, f"{where}.content")
        case ResponseMessage():
            translation.add(where, item.role, content=joined_text(item.content, f"{where}.content"))


_IDS = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}
"""Beginnings of the ids of output items."""


def routes(server: Server) -> list[Route]:
    """Routes of responses."""

    async def start(request: ResponsesRequest, record: RequestRecord) -> Run:
        return await run_chat(server, record, *chat_of(request))

    async def count(request: ResponsesRequest, record: RequestRecord) -> dict[str, Any]:
        tokens = await count_tokens(server, *chat_of(request))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    path = "/responses"
    items: dict[str, Any] = {"parts": INPUT_ITEMS}
    answers, counts = "Answer, as OpenAI's responses do.", "Count the tokens of a response's input."
    return [
        *text_routes(server, path, ResponsesRequest, start, _Answer, summary=answers, **items),
        *json_routes(f"{path}/input_tokens", ResponsesRequest, count, summary=counts, **items),
    ]


class _Answer:
    """A response on its way."""

    def __init__(self, run: Run, request: ResponsesRequest):
        self._run = run
        self._request = request
        functions, others = _functions(request)
        self._functions = {tool.full_name: tool for tool in functions.values()}
        self._warnings = _warnings(request, others)
        self._tracker = PartTracker()
        self._key = uuid.uuid4().hex
        self._number = 0

    async def whole(self) -> dict[str, Any]:
        """The answer."""
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
                        for encoded in self._step(step, _status(event)):
                            yield encoded
        except Exception as error:
            if last is None:
                raise
            http = api_error(error)
            failure = {"code": http.code or "server_error", "message": http.message}
            yield self._event("response.failed", response=self._response("failed", failure))
            return
        status = _status(last)
        yield self._event(f"response.{status}", response=self._response(status))

    def _event(self, kind: str, **values: Any) -> bytes:
        encoded = named_event(kind, {"type": kind, "sequence_number": self._number, **values})
        self._number += 1
        return encoded

    def _step(self, step: PartStep, status: str) -> Iterator[bytes]:
        """Events of a part that begins, grows or ends."""
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
            logprobs = {"logprobs": step.logprobs} if part.kind == "text" else {}
            yield self._event(f"response.{name}.delta", **(item if is_call else content), delta=step.text, **logprobs)
        else:
            if is_call:
                yield self._event(f"response.{name}.done", **item, **self._called(part), arguments=part.text)
            else:
                logprobs = {"logprobs": part.logprobs} if part.kind == "text" else {}
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
        call = {"call_id": part.call_id, **self._called(part), "arguments": "" if empty else part.text}
        return {**head, "type": "function_call", **call}

    def _called(self, part: Part) -> dict[str, Any]:
        """Name of the function that is called, and its namespace if it has one."""
        tool = self._functions.get(part.name)
        if tool is None or tool.namespace is msgspec.UNSET:
            return {"name": part.name}
        return {"name": tool.name, "namespace": tool.namespace}

    def _response(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        request, run = self._request, self._run
        parts = self._tracker.parts if status != "in_progress" else []
        form = msgspec.to_builtins(request.text.format) if request.text and request.text.format else {"type": "text"}
        # The part that the limit cut off is the last one.
        last = len(parts) - 1 if status == "incomplete" else -1
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": run.created,
            "status": status,
            "background": False,
            "error": error,
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
            "text": {"format": {key: value for key, value in form.items() if value is not None}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in self._functions.values()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": _usage(run) if status in ("completed", "incomplete") else None,
            "user": request.user,
            "metadata": request.metadata or {},
            **({"warnings": self._warnings} if self._warnings else {}),
        }


def _status(event: RunEvent | None) -> str:
    return "incomplete" if event is not None and event.finish_reason == "length" else "completed"


def _content(part: Part, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else part.text
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if empty else part.logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(run: Run) -> dict[str, Any]:
    usage = run.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
