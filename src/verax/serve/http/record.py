"""Record of one request, which its handler fills for the log line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import Scope

__all__ = ["RequestRecord", "record_in", "record_of"]

_KEY = "verax.record"


@dataclass
class RequestRecord:
    """Facts of one request for its log line."""

    request_id: str
    begin: float = field(default_factory=time.perf_counter)
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    ttft: float | None = None
    """Seconds from the request's arrival to the first token."""
    prompt: Any = None
    """Prompt or messages, set only if the server is to log them."""

    def first_token(self) -> None:
        """Note that the first token is here, unless it was before."""
        if self.ttft is None:
            self.ttft = time.perf_counter() - self.begin

    def attach(self, scope: Scope) -> None:
        """Make the record that of a request."""
        scope[_KEY] = self


def record_of(request: Request) -> RequestRecord:
    """Record of a request."""
    return record_in(request.scope)


def record_in(scope: Scope) -> RequestRecord:
    """Record of the request of a scope."""
    return scope[_KEY]
