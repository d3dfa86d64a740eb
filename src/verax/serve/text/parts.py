"""Parts of a chat's answer in their order: reasoning, text and tool calls, as the other APIs list them."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from verax.serve.text.chat_run import ChatEvent

__all__ = ["Part", "PartStep", "PartTracker"]


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
