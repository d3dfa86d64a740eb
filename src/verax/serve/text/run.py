"""`Run`: the prompts of one request in the engine, as neutral events. Every API for text renders these.

Each API is one file: it checks its body, makes prompts and sampling parameters of it, starts a `Run`, and writes its
events as OpenAI's or Anthropic's JSON. This is the only file that puts requests into the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verax.errors import ContextLengthError, InvalidParameterError, StructuredOutputError
from verax.serve.http.body import read_body
from verax.serve.http.errors import ApiError, JsonResponse, context_error, renamed
from verax.serve.http.openapi import EVENTS, JSON, Parameter, api_routes
from verax.serve.http.server import Server
from verax.serve.http.sse import ID_PATTERN, unless_disconnected
from verax.serve.http.telemetry import RequestRecord, record_of
from verax.serve.text.sampling import GenerationRequest, form_error
from verax.text.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from verax.text.engine.request import Prompt
from verax.text.engine.sampling_params import SamplingParams
from verax.text.features.tool_calls import AnswerParser, Delta, ToolCallDelta, WholeAnswer, join
from verax.text.tokens.tokenizer import Tokenizer

SYSTEM_FINGERPRINT = f"verax-{version('verax')}"

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)


@dataclass
class Usage:
    """Token counts and times of a request so far; of several prompts, their sums."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    num_samples: int = 0
    metrics: RequestMetrics | None = None

    def add(self, output: RequestOutput) -> None:
        """Count what is new in one prompt's answers."""
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens
        for part in output.outputs:
            self.completion_tokens += len(part.token_ids)
            self.num_samples = max(self.num_samples, part.index + 1)
        self.metrics = output.metrics

    def body(self) -> dict[str, Any]:
        """The object `usage` of chats and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, float] | None:
        """The object `timings` of llama.cpp's server, in milliseconds; None before the end."""
        metrics = self.metrics
        if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
            return None
        prompt_n, predicted_n = self.prompt_tokens - self.cached_tokens, self.completion_tokens
        prompt_ms = (metrics.first_token_time - metrics.arrival_time) * 1e3
        predicted_ms = (metrics.finished_time - metrics.first_token_time) * 1e3
        # The first token of an answer comes from the prompt's step.
        later = max(predicted_n - self.num_samples, 0)
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": _quotient(prompt_ms, prompt_n),
            "prompt_per_second": _quotient(1e3 * prompt_n, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": _quotient(predicted_ms, later),
            "predicted_per_second": _quotient(1e3 * later, predicted_ms),
        }


def _quotient(value: float, by: float) -> float:
    """Quotient for JSON, which lacks infinity: 0 for a divisor of 0."""
    return round(value / by, 3) if by > 0 else 0.0


# The run.


@dataclass(frozen=True)
class RunEvent:
    """New part of one answer.

    Attributes:
        index: number of the answer: sample k of prompt p is `p * n + k`.
        finish_reason: `"stop"`, `"length"` or `"tool_calls"` in an answer's last event.
        logprobs: a new token each, if the request wants them.
        ranked: the engine's log-probabilities by token id at the place of each new token.
    """

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] | None = None
    ranked: tuple[Mapping[int, Logprob], ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunAnswer:
    """One whole answer; the fields of its events, joined."""

    index: int
    message: WholeAnswer
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    logprobs: list[dict[str, Any]] | None
    ranked: list[Mapping[int, Logprob]]
    token_ids: list[int]


@dataclass
class _Sample:
    """Answer on its way: its parser, and the tokens whose text is not certain yet."""

    parser: AnswerParser | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    has_calls: bool = False
    call: int = 0
    """Number of the last call."""
    arguments: str = ""
    """Its arguments so far."""


class Run:
    """Prompts of one request, which the engine has queued.

    Args:
        model: name of the model for the answer, which may be an adapter's.
        add_special_tokens, continues_prompt: arguments of `AsyncLLM.generate`.
        new_parser: makes the parser of one answer; None if all text is content.
        names: the client's names of fields in errors, as `renamed` takes them.
        drop: leave the generated tokens out: only the prompt counts.

    Attributes:
        id: id of the answer, without the API's prefix.
        usages: token counts and times of each prompt so far; complete after the last event.
        outputs: the engine's latest output of each prompt: its tokens and their log-probabilities.
    """

    def __init__(
        self,
        server: Server,
        request: GenerationRequest,
        record: RequestRecord,
        *,
        model: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        add_special_tokens: bool,
        continues_prompt: bool | None = None,
        field: str,
        new_parser: Callable[[], AnswerParser] | None = None,
        names: Mapping[str, str] | None = None,
        drop: bool = False,
    ):
        self.id = uuid.uuid4().hex
        self.model = model
        self.created = int(time.time())
        self.usages = [Usage() for _ in prompts]
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self.params = params
        self.tokenizer = server.engine.tokenizer
        self.n = params.n
        self._engine = server.engine
        self._request = request
        self._record = record
        self._field = field
        self._names = names or {}
        self._drop = drop
        self._samples = [_Sample(new_parser and new_parser()) for _ in range(len(prompts) * params.n)]
        # Each prompt joins the queue here. If one finds it full, dropping the others takes them out again.
        self._streams = [
            server.engine.generate(
                prompt,
                params,
                add_special_tokens=add_special_tokens,
                continues_prompt=continues_prompt,
                lora_request=server.adapters.get(model),
            )
            for prompt in prompts
        ]

    @property
    def usage(self) -> Usage:
        """Token counts of all prompts so far; with the times of a single one."""
        if len(self.usages) == 1:
            return self.usages[0]
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        sums: dict[str, Any] = {name: sum(getattr(usage, name) for usage in self.usages) for name in names}
        return Usage(**sums)

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Fields of OpenAI's answers and chunks that are the same in all of a run's.

        `prefix`: beginning of the id. `kind`: value of `object`.
        """
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def timings(self) -> dict[str, Any]:
        """Field `timings` of a single prompt. Several prompts are answered at once, so that their times have no sum."""
        return {"timings": self.usages[0].timings()} if len(self.usages) == 1 else {}

    def chunk_usage(self) -> dict[str, Any]:
        """Field `usage` of a chunk: the usage so far, or null if only the last chunk has it, or none."""
        options = self._request.stream_options
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return {}
        return {"usage": self.usage.body() if options.continuous_usage_stats else None}

    def last_usage(self) -> dict[str, Any] | None:
        """Fields of a stream's last chunk, if the request wants one with the usage."""
        options = self._request.stream_options
        wanted = options is not None and options.include_usage
        return {"choices": [], "usage": self.usage.body(), **self.timings()} if wanted else None

    async def events(self) -> AsyncGenerator[RunEvent, None]:
        """Events of all answers. An answer's last event has its finish reason.

        Joined, the deltas of an answer are what `answers` gives. Closing the generator aborts the request.

        Raises:
            ApiError: if a prompt is too long, or the request was aborted.
            VeraxError: if the engine refuses the request or fails.
        """
        with renamed(self._names):
            try:
                async with aclosing(_merged(self._streams)) as outputs:
                    async for prompt, output in outputs:
                        for part in self._note(prompt, output).outputs:
                            for event in self._events_of(prompt * self.n + part.index, part):
                                yield event
                await self._count_reasoning()
            except ContextLengthError as error:
                raise context_error(error, self._field) from error
            except (InvalidParameterError, StructuredOutputError) as error:
                raise form_error(error, self._request) from error

    async def answers(self) -> list[RunAnswer]:
        """The whole answers, in their order."""
        lists: list[list[RunEvent]] = [[] for _ in self._samples]
        async for event in self.events():
            lists[event.index].append(event)
        return [self._joined(events) for events in lists]

    def _note(self, prompt: int, output: RequestOutput) -> RequestOutput:
        if self._drop:
            output = replace(output, outputs=[_without_tokens(part) for part in output.outputs])
        self.outputs[prompt] = output
        usage, record = self.usages[prompt], self._record
        before = usage.prompt_tokens, usage.completion_tokens
        usage.add(output)
        if usage.completion_tokens:
            record.first_token()
        # New tokens alone: a sum over all prompts for the output of each would take longer than a step.
        record.prompt_tokens = (record.prompt_tokens or 0) + usage.prompt_tokens - before[0]
        record.completion_tokens = (record.completion_tokens or 0) + usage.completion_tokens - before[1]
        return output

    def _events_of(self, index: int, part: CompletionOutput) -> Iterator[RunEvent]:
        sample, reason = self._samples[index], part.finish_reason
        sample.token_ids += part.token_ids
        sample.logprobs += part.logprobs or []
        if reason == "abort":
            raise ApiError(503, "the request was aborted: the server is shutting down", code="aborted")
        if sample.parser is None:
            if part.text or reason is not None:
                yield self._event(index, Delta(part.text), reason, part.stop_reason)
            return
        deltas = [sample.parser.feed(part.text)]
        if reason is not None:
            deltas.append(sample.parser.finish())
        for delta in filter(None, deltas):
            for call in delta.tool_calls:
                sample.has_calls, sample.call = True, call.index
                sample.arguments = call.arguments if call.id is not None else sample.arguments + call.arguments
            sample.reasoning.append(delta.reasoning)
            yield self._event(index, delta)
        if reason == "stop" and part.stop_reason is None and sample.has_calls and not sample.arguments.strip():
            sample.arguments = "{}"  # which models leave out where there are none
            yield self._event(index, Delta(tool_calls=(ToolCallDelta(sample.call, arguments="{}"),)))
        if reason is not None:
            # A stop string within a call cuts it, as max_tokens does.
            whole = not isinstance(part.stop_reason, str) or _is_json(sample.arguments)
            reason = "tool_calls" if reason == "stop" and sample.has_calls and whole else reason
            yield self._event(index, Delta(), reason, part.stop_reason)

    def _event(self, index: int, delta: Delta, reason: Any = None, stop_reason: int | str | None = None) -> RunEvent:
        """Event with the tokens that came since the answer's last event."""
        sample = self._samples[index]
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = token_logprobs(self.tokenizer, sample.token_ids, sample.logprobs, self.params.logprobs)
        ranked = tuple(sample.logprobs)
        event = RunEvent(index, delta, reason, stop_reason, logprobs, ranked, tuple(sample.token_ids))
        sample.token_ids, sample.logprobs = [], []
        return event

    async def _count_reasoning(self) -> None:
        # The text is tokenised again: how the answer was cut into events does not change the count.
        for sample in self._samples:
            if text := "".join(sample.reasoning):
                self.usage.reasoning_tokens += len(await self._engine.encode(text, add_special_tokens=False))

    def _joined(self, events: Sequence[RunEvent]) -> RunAnswer:
        last = events[-1]
        parser = self._samples[last.index].parser
        message = join((event.delta for event in events), "" if parser is None else parser.text)
        assert last.finish_reason is not None
        no_calls = last.finish_reason == "tool_calls" and not message.tool_calls
        return RunAnswer(
            index=last.index,
            message=message,
            finish_reason="stop" if no_calls else last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=None
            if self.params.logprobs is None
            else [entry for event in events for entry in event.logprobs or ()],
            ranked=[entry for event in events for entry in event.ranked],
            token_ids=[token for event in events for token in event.token_ids],
        )


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _without_tokens(part: CompletionOutput) -> CompletionOutput:
    reason = "length" if part.finish_reason not in (None, "abort") else part.finish_reason
    return replace(part, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with the number of its stream.

    The next item of a stream is fetched once the one before was taken. An error of one stream ends all. Closing the
    generator closes the streams.
    """
    if len(streams) == 1:  # without a task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield i, item
                waiting[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


# Log-probabilities, with the bytes of each token.

_SPACE = "\u2581"
"""Character that stands for a space in vocabularies of sentencepiece."""

_UNDECODABLE = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """Byte of each character in GPT-2's byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """Bytes of a token, exact for those that are a part of a character."""
    if token_id in tokenizer.byte_tokens:
        return [tokenizer.byte_tokens[token_id]]
    spelled = tokenizer.token(token_id) or ""
    if _UNDECODABLE in text and all(char in _BYTES for char in spelled):
        return [_BYTES[char] for char in spelled]
    if spelled.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text  # a decoder strips the first space of a text
    return list(text.encode("utf-8", "replace"))


def token_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], num_top: int
) -> list[dict[str, Any]]:
    """Each token with its log-probability and its bytes, and the likeliest tokens at its place, the best first."""
    assert tokenizer is not None

    def fields(token: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": logprob.logprob, "bytes": _token_bytes(tokenizer, token, text)}

    tokens = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = [(other.rank, key, other) for key, other in entry.items() if other.rank and other.rank <= num_top]
        best = [fields(key, other) for _, key, other in sorted(ranked, key=lambda item: item[0])]
        tokens.append({**fields(token, entry[token]), "top_logprobs": best})
    return tokens


def prompt_logprobs(output: RequestOutput | None) -> list[dict[str, Any] | None] | None:
    """Log-probabilities of a prompt's tokens in vLLM's form, by token id."""
    if output is None or output.prompt_logprobs is None:
        return None
    names = ("logprob", "rank", "decoded_token")
    return [
        None
        if entry is None
        else {str(token): {name: getattr(item, name) for name in names} for token, item in entry.items()}
        for entry in output.prompt_logprobs
    ]


# Parts of an answer in their order, as Anthropic's messages and OpenAI's responses list them.

PartKind = Literal["reasoning", "text", "tool_call"]


@dataclass
class Part:
    """Part of an answer.

    `text`: text so far; arguments as JSON text of a tool call. `logprobs`: tokens so far, if the request wants their
    log-probabilities.
    """

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class PartStep:
    """Step of an answer: a part begins, gets some text, or ends."""

    step: Literal["begin", "delta", "end"]
    part: Part
    text: str = ""
    logprobs: Sequence[dict[str, Any]] = ()


class PartTracker:
    """Parts of one answer, made of a run's events."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def steps(self, event: RunEvent) -> Iterator[PartStep]:
        """Steps that an event makes. The last event ends the last part."""
        delta = event.delta
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("text", delta.content, event.logprobs or ())
        for call in delta.tool_calls:
            if call.id is not None:
                yield from self._begin(Part("tool_call", len(self.parts), call.id, call.name or ""))
            if call.arguments:
                yield from self._add("tool_call", call.arguments)
        if event.finish_reason is not None:
            yield from self._end()

    async def read(self, events: AsyncIterable[RunEvent]) -> RunEvent:
        """Take all events of an answer, without their steps; the last event."""
        last = None
        async for last in events:
            for _ in self.steps(last):
                pass
        assert last is not None
        return last

    def _add(self, kind: PartKind, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[PartStep]:
        if not self.parts or self.parts[-1].kind != kind:
            yield from self._begin(Part(kind, len(self.parts)))
        part = self.parts[-1]
        part.text += text
        part.logprobs += logprobs
        yield PartStep("delta", part, text, logprobs)

    def _begin(self, part: Part) -> Iterator[PartStep]:
        yield from self._end()
        self.parts.append(part)
        yield PartStep("begin", part)

    def _end(self) -> Iterator[PartStep]:
        if self.parts and not self.parts[-1].ended:
            self.parts[-1].ended = True
            yield PartStep("end", self.parts[-1])


# Routes.


class TextAnswer(Protocol):
    """Answer on its way, in the form of one API."""

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream, the last one included."""
        ...


_CONVERSATION_ID = Parameter(
    "X-Conversation-Id",
    {"type": "string", "pattern": f"^{ID_PATTERN}$"},
    "header",
    "keeps a stream running while its page is reloaded",
)


def text_routes(
    server: Server,
    path: str,
    body: type[B],
    start: Callable[[B, RequestRecord], Coroutine[Any, Any, Run]],
    answer: Callable[[Run, B], TextAnswer],
    *,
    resumable: bool = False,
    **described: Any,
) -> list[Route]:
    """Routes of an API for text.

    Args:
        body: Struct of the body; its field `stream` asks for events.
        start: checks a request and puts its prompts into the engine.
        resumable: keep a stream for a page that is reloaded, if the request has an `X-Conversation-Id`.
    """

    async def respond(http: Request) -> Response:
        request = await read_body(http, body)
        run = await unless_disconnected(http, start(request, record_of(http.scope)))
        result = answer(run, request)
        if not getattr(request, "stream", None):
            return JsonResponse(await unless_disconnected(http, result.whole()))
        conversation = http.headers.get("x-conversation-id") if resumable else None
        return server.stream(server.streams.start(conversation, result.events()))

    parameters = (_CONVERSATION_ID,) if resumable else ()
    options = {"body": body, "media": (JSON, EVENTS), "parameters": parameters, "queued": True, **described}
    return api_routes(path, respond, **options)
