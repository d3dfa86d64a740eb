"""Parts of an answer: content, reasoning and tool calls, whole or as they stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Delta", "ToolCall", "ToolCallDelta", "WholeAnswer", "join"]


@dataclass(frozen=True)
class ToolCall:
    """Call of a function by the model."""

    id: str
    name: str
    arguments: str
    """JSON text of the arguments, as the model wrote it. Cut short if the answer was, and not checked by a schema."""


@dataclass(frozen=True)
class ToolCallDelta:
    """Part of a tool call. The first part of a call has its id and name, and no later part has."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """Next piece of the JSON text of the arguments."""


@dataclass(frozen=True)
class Delta:
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """True if anything is new."""
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True)
class WholeAnswer:
    """Whole answer of a model, parsed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def join(deltas: Iterable[Delta]) -> WholeAnswer:
    """The whole answer that deltas make together."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for part in delta.tool_calls:
            _, _, arguments = calls.setdefault(part.index, (part.id or "", part.name or "", []))
            arguments.append(part.arguments)
    joined = (ToolCall(key, name, "".join(parts)) for key, name, parts in calls.values())
    return WholeAnswer("".join(content), "".join(reasoning), tuple(joined))
