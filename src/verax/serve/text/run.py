"""`ChatRun`: one chat in the engine, as parsed events. Every API for chats renders them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from verax.errors import ContextLengthError, InvalidParameterError, StructuredOutputError
from verax.serve.http.errors import ApiError, context_error
from verax.serve.http.server import Server
from verax.serve.http.telemetry import RequestRecord
from verax.serve.text.sampling import GenerationRequest, form_error
from verax.text.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from verax.text.features.chat_format import AnswerParser
from verax.text.features.tool_calls import Delta, WholeAnswer, join
from verax.text.tokens.tokenizer import Tokenizer

__all__ = [
    "SYSTEM_FINGERPRINT",
    "ChatAnswer",
    "ChatEvent",
    "ChatRun",
    "CompletionLogprobs",
    "Part",
    "PartStep",
    "PartTracker",
    "Usage",
    "chat_logprobs",
    "merged",
    "prompt_logprobs",
    "token_bytes",
]

Size = Annotated[int, Meta(ge=0)]


class TokenUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: Size
    completion_tokens: Size
    total_tokens: Size
    prompt_tokens_details: dict[Literal["cached_tokens"], Size]
    completion_tokens_details: dict[Literal["reasoning_tokens"], Size]


class TopLogprob(msgspec.Struct, kw_only=True):
    """Token at a place, its log-probability in nats, and its bytes."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class TokenLogprob(TopLogprob, kw_only=True):
    """Token of an answer, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class Choice(msgspec.Struct, kw_only=True):
    """One of several answers."""

    index: Size
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    """Stop string or stop token that ended it."""
    token_ids: list[Size] | None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Log-probability of a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Generated(msgspec.Struct, kw_only=True):
    """Fields that chats and completions share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: TokenUsage
    timings: dict[str, float | None] | None = None


SYSTEM_FINGERPRINT = f"verax-{version('verax')}"


@dataclass
class Usage:
    """Token counts and times of a request so far; of several prompts, their sums.

    Attributes:
        prompt_tokens: number of prompt tokens.
        completion_tokens: number of generated tokens of all answers.
        cached_tokens: number of prompt tokens that were in the prefix cache.
        reasoning_tokens: number of generated tokens of the reasoning.
        num_samples: number of answers that have begun.
        metrics: times of the request.
    """

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
        """The object `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def timings(self) -> dict[str, Any] | None:
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
    """Quotient for JSON, which has no infinity: 0 of nothing."""
    return round(value / by, 3) if by > 0 else 0.0


_SPACE = "\u2581"
"""Character that stands for a space in vocabularies of sentencepiece."""


_UNDECODABLE = "\ufffd"


def _byte_characters() -> dict[str, int]:
    """Byte of each character in GPT-2's byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> list[int]:
    """Bytes of a token, exact for those that are a part of a character.

    Args:
        tokenizer: of the vocabulary.
        token_id: the token.
        text: the token by itself, decoded.
    """
    if token_id in tokenizer.byte_tokens:
        return [tokenizer.byte_tokens[token_id]]
    spelled = tokenizer.token(token_id) or ""
    if _UNDECODABLE in text and all(char in _BYTES for char in spelled):
        return [_BYTES[char] for char in spelled]
    if spelled.startswith(_SPACE) and not text.startswith(" "):
        text = " " + text  # a decoder strips the first space of a text
    return list(text.encode("utf-8", "replace"))


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], num_top: int
) -> list[dict[str, Any]]:
    """Entries of `logprobs.content`: each token with its bytes and the likeliest ones at its place."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": logprob.logprob, "bytes": token_bytes(tokenizer, token, text)}

    return [
        {
            **entry(token, found[token]),
            "top_logprobs": [entry(other, logprob) for other, logprob in _best(found, num_top)],
        }
        for token, found in zip(token_ids, entries, strict=True)
    ]


def prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Log-probabilities of a prompt's tokens in vLLM's form, by token id."""
    if entries is None:
        return None
    return [
        None
        if found is None
        else {
            str(token): {"logprob": item.logprob, "rank": item.rank, "decoded_token": item.decoded_token}
            for token, item in found.items()
        }
        for found in entries
    ]


@dataclass
class CompletionLogprobs:
    """Log-probabilities of a completion in OpenAI's old form: four lists, and where each token begins in the text."""

    num_top: int
    offset: int = 0
    """Number of the text's characters before the next token."""
    _lists: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Add tokens of an answer, or of a prompt behind its first."""
        for token, found in zip(token_ids, entries, strict=True):
            self._add(found[token].decoded_token or "", found[token].logprob, found)

    def add_first(self, text: str) -> None:
        """Add the first token of a prompt, which has no context that would give it a probability."""
        self._add(text, None, None)

    def take(self) -> dict[str, list[Any]]:
        """The lists since the last call."""
        taken, self._lists = self._lists, {}
        return {name: taken.get(name, []) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def _add(self, text: str, logprob: float | None, found: Mapping[int, Logprob] | None) -> None:
        best = None
        if found is not None:
            best = {item.decoded_token or "": item.logprob for _, item in _best(found, self.num_top)}
        values = {"tokens": text, "token_logprobs": logprob, "top_logprobs": best, "text_offset": self.offset}
        for name, value in values.items():
            self._lists.setdefault(name, []).append(value)
        self.offset += len(text)


def _best(found: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a place, in their order."""
    ranked = [(token, item) for token, item in found.items() if item.rank is not None and item.rank <= num_top]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)


T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
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
        request: GenerationRequest,
        *,
        num_top: int | None,
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
        self._num_top = num_top
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


@dataclass
class Part:
    """Part of an answer.

    Attributes:
        kind: what it is.
        index: its number in the answer.
        call_id: id of a tool call.
        name: name of the function of a tool call.
        text: text so far; arguments as JSON text of a tool call.
        logprobs: entries of OpenAI's `logprobs.content` so far.
        ended: True once the part is complete.
    """

    kind: Literal["reasoning", "text", "tool_call"]
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class PartStep:
    """Step of an answer: a part begins, goes on with some text, or ends."""

    step: Literal["begin", "delta", "end"]
    part: Part
    text: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()


class PartTracker:
    """Parts of one answer, made of a chat's events."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def steps(self, event: ChatEvent) -> Iterator[PartStep]:
        """Steps that an event makes. The last event ends the last part."""
        delta = event.delta
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("text", delta.content, tuple(event.logprobs or ()))
        for call in delta.tool_calls:
            if call.id is not None:
                yield from self._begin(Part("tool_call", len(self.parts), call.id, call.name or ""))
            if call.arguments:
                yield from self._add("tool_call", call.arguments)
        if event.finish_reason is not None:
            yield from self._end()

    async def read(self, events: AsyncIterable[ChatEvent]) -> ChatEvent | None:
        """Take all events of an answer, without their steps; the last event."""
        last = None
        async for last in events:
            for _ in self.steps(last):
                pass
        return last

    def _add(
        self, kind: Literal["reasoning", "text", "tool_call"], text: str, logprobs: tuple[dict[str, Any], ...] = ()
    ) -> Iterator[PartStep]:
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
