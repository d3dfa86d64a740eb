"""`ChatRun`: one chat in the engine, as parsed events. Every API for chats is a translation of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verax.errors import ContextLengthError, InvalidParameterError, QueueFullError, StructuredOutputError
from verax.serve.http.errors import ApiError, context_error
from verax.serve.http.record import RequestRecord
from verax.serve.http.server import Server
from verax.serve.text.chat_request import ChatRequest, NamedToolChoice, template_messages, template_options
from verax.serve.text.logprobs import chat_logprobs
from verax.serve.text.sampling import check_room, form_error, sampling_params
from verax.serve.text.usage import Usage
from verax.text.engine.outputs import CompletionOutput, Logprob, RequestOutput
from verax.text.features.chat_format import AnswerParser, parser_for, tool_grammar
from verax.text.features.tool_calls import Delta, WholeAnswer, join

__all__ = ["ChatAnswer", "ChatEvent", "ChatRun", "count_tokens", "render_chat", "run_chat"]


@dataclass(frozen=True)
class ChatEvent:
    """New part of one answer of a chat."""

    index: int
    """Number of the answer, below `n`."""
    delta: Delta
    finish_reason: str | None = None
    """`"stop"`, `"length"` or `"tool_calls"` in an answer's last event, whose delta is empty."""
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] | None = None
    """Entries of OpenAI's `logprobs.content`, if the request wants them."""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChatAnswer:
    """One whole answer of a chat."""

    index: int
    message: WholeAnswer
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[str, Any]] | None
    token_ids: tuple[int, ...]


@dataclass
class _Sample:
    """Answer on its way: its parser, and the tokens whose text is not certain yet."""

    parser: AnswerParser
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    has_calls: bool = False


class ChatRun:
    """A chat that the engine has queued.

    Attributes:
        id: id of the answer.
        model: name of the model for the answer.
        created: seconds since 1970.
        usage: token counts and times so far; complete behind the last event.
        prompt: the rendered prompt.
        prompt_token_ids: its tokens, known from the first event on.
        prompt_logprobs: log-probabilities of these tokens, if the request wants them.
    """

    def __init__(
        self,
        server: Server,
        request: ChatRequest,
        *,
        model: str,
        prompt: str,
        parsers: Sequence[AnswerParser],
        outputs: AsyncGenerator[RequestOutput, None],
        record: RequestRecord | None,
    ):
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())
        self.usage = Usage()
        self.prompt = prompt
        self.prompt_token_ids: tuple[int, ...] = ()
        self.prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
        self._server = server
        self._request = request
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._samples = [_Sample(parser) for parser in parsers]
        self._outputs = outputs
        self._record = record

    async def events(self) -> AsyncGenerator[ChatEvent, None]:
        """Events of all answers. An answer's last one has its finish reason.

        Joined, the deltas of an answer are what `answers` gives. Closing the generator aborts the request.

        Raises:
            ApiError: if the prompt is too long, or the request was aborted.
            VeraxError: if the engine refuses the request or fails.
        """
        try:
            async for output in self._outputs:
                self._note(output)
                for part in output.outputs:
                    for event in self._events_of(part):
                        yield event
            await self._count_reasoning()
        except ContextLengthError as error:
            raise context_error(error, "messages") from error
        except (InvalidParameterError, StructuredOutputError) as error:
            raise form_error(error, self._request) from error
        finally:
            await self._outputs.aclose()

    async def answers(self) -> list[ChatAnswer]:
        """The whole answers, in their order.

        Raises:
            ApiError, VeraxError: as `events`.
        """
        found: list[list[ChatEvent]] = [[] for _ in self._samples]
        async for event in self.events():
            found[event.index].append(event)
        return [self._joined(events) for events in found]

    async def close(self) -> None:
        """Abort the request, if it has not ended."""
        await self._outputs.aclose()

    def _note(self, output: RequestOutput) -> None:
        self.usage.add(output)
        self.prompt_token_ids = output.prompt_token_ids
        self.prompt_logprobs = output.prompt_logprobs
        if self._record is not None:
            if self.usage.completion_tokens:
                self._record.first_token()
            self._record.prompt_tokens = self.usage.prompt_tokens
            self._record.completion_tokens = self.usage.completion_tokens

    def _events_of(self, part: CompletionOutput) -> list[ChatEvent]:
        sample = self._samples[part.index]
        sample.token_ids += part.token_ids
        sample.logprobs += part.logprobs or []
        deltas = [sample.parser.feed(part.text)]
        if part.finish_reason is not None:
            deltas.append(sample.parser.finish())
        events = []
        for delta in deltas:
            if delta:
                sample.has_calls = sample.has_calls or bool(delta.tool_calls)
                sample.reasoning.append(delta.reasoning)
                events.append(self._event(part.index, delta))
        if part.finish_reason is not None:
            reason: str = part.finish_reason
            if reason == "abort":
                raise ApiError(503, "the request was aborted: the server is shutting down", code="aborted")
            reason = "tool_calls" if reason == "stop" and sample.has_calls else reason
            events.append(self._event(part.index, Delta(), reason, part.stop_reason))
        return events

    def _event(
        self, index: int, delta: Delta, finish_reason: str | None = None, stop_reason: int | str | None = None
    ) -> ChatEvent:
        sample = self._samples[index]
        logprobs = None
        if self._num_top is not None:
            assert self._server.engine.tokenizer is not None
            logprobs = chat_logprobs(self._server.engine.tokenizer, sample.token_ids, sample.logprobs, self._num_top)
        event = ChatEvent(index, delta, finish_reason, stop_reason, logprobs, tuple(sample.token_ids))
        sample.token_ids, sample.logprobs = [], []
        return event

    async def _count_reasoning(self) -> None:
        # The text is tokenised again: how the answer was cut into events does not change the count.
        for sample in self._samples:
            if text := "".join(sample.reasoning):
                self.usage.reasoning_tokens += len(await self._server.engine.encode(text, add_special_tokens=False))

    def _joined(self, events: Sequence[ChatEvent]) -> ChatAnswer:
        last = events[-1]
        assert last.finish_reason is not None
        entries = [entry for event in events for entry in event.logprobs or ()]
        return ChatAnswer(
            index=last.index,
            message=join(event.delta for event in events),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=None if self._num_top is None else entries,
            token_ids=tuple(token for event in events for token in event.token_ids),
        )


async def run_chat(server: Server, request: ChatRequest, record: RequestRecord | None = None) -> ChatRun:
    """Check a chat and queue it.

    Args:
        server: with a text engine.
        request: the chat.
        record: of the HTTP request, for its log line.

    Raises:
        ApiError: 400, 404 for another model, 429 if the queue is full.
        VeraxError: for what the engine or the template refuses.
    """
    model = server.text_model(request.model)
    _check(server, request)
    if record is not None:
        record.model = model
        record.prompt = msgspec.to_builtins(request.messages) if server.settings.log_prompts else None
    prompt = await render_chat(server, request)
    tools = _tools(request)
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
    parsers = [
        parser_for(form, tools=tools, prompt=prompt, parse_tool_calls=choice != "none", parse_reasoning=True)
        for _ in range(params.n)
    ]
    adapter = server.adapters.get(model)
    outputs = server.engine.generate(prompt, params, add_special_tokens=False, lora_request=adapter)
    return ChatRun(server, request, model=model, prompt=prompt, parsers=parsers, outputs=outputs, record=record)


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
    check_room(server, request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs: it needs logprobs to be true", param="top_logprobs")
    demanded = isinstance(request.tool_choice, NamedToolChoice) or request.tool_choice == "required"
    if demanded and request.tools is None:
        raise ApiError(400, "tool_choice: there are no tools to choose from", param="tool_choice")
    # Templates and tokenizers cost time, which a full queue has none of.
    waiting, most = server.engine.stats().num_requests_waiting, server.engine.max_queued_requests
    if waiting >= most > 0:
        raise QueueFullError(f"max_queued_requests: {waiting} requests wait, which is the most; try again later")
