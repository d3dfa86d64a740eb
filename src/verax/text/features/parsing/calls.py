"""Readers of a tool call's text: what they give back, and where they put what they found."""

from __future__ import annotations

import uuid
from enum import Enum
from typing import Protocol

from verax.text.features.parsing.deltas import ToolCallDelta

__all__ = ["CallReader", "CallSink", "Outcome"]


class Outcome(Enum):
    """State of a call after a piece of its text."""

    OPEN = "open"
    """The call goes on: more text is needed."""
    REFUSED = "refused"
    """The text is no call. Nothing of it was put into the sink."""
    DONE = "done"
    """The call is over."""


class CallSink:
    """Tool calls of an answer, as they are found."""

    def __init__(self) -> None:
        self._new: list[ToolCallDelta] = []
        self.count = 0
        """Number of calls so far."""

    def start(self, name: str) -> None:
        """Begin the next call."""
        self._new.append(ToolCallDelta(self.count, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """Go on with the arguments of the last call."""
        if not arguments:
            return
        if self._new and self._new[-1].index == self.count - 1:
            last = self._new.pop()
            self._new.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + arguments))
        else:
            self._new.append(ToolCallDelta(self.count - 1, arguments=arguments))

    def take(self) -> tuple[ToolCallDelta, ...]:
        """Parts that were added since the last time."""
        new, self._new = tuple(self._new), []
        return new


class CallReader(Protocol):
    """Reader of one call's text.

    It decides once whether the text is a call. Until then it holds everything back. From then on the call stands, and
    its arguments stream.
    """

    @property
    def committed(self) -> bool:
        """True if the text is a call."""
        ...

    def read(self, text: str, calls: CallSink, *, final: bool) -> tuple[int, Outcome]:
        """Read what was not read before.

        Args:
            text: what was left over the last time, and what has come since.
            calls: takes the call.
            final: the text does not go on.

        Returns:
            Number of characters that were read, and the state of the call.
        """
        ...
