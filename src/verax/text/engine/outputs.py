"""Outputs of a request: completions, log-probabilities and times, by vLLM's names."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "RequestMetrics", "RequestOutput"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token (nats), its rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sampled continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """Log-probabilities at each token, by token id: its own first, then those of the likeliest others."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token or stop string that ended it; None if it was ended otherwise."""

    @property
    def finished(self) -> bool:
        """True if the continuation is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds, on the clock of `time.perf_counter`, and its drafts."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    first_scheduled_time: float | None = None
    """Time of the first step that computed a part of the prompt."""
    num_draft_tokens: int = 0
    """Tokens that were drafted for its answers (speculative decoding)."""
    num_accepted_tokens: int = 0
    """Drafts that held."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_time(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Log-probabilities at each token of the prompt; None for the first, which has no context."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Number of the prompt's tokens that were in the prefix cache."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Failure that ended the request; its samples have the finish reason `"error"`."""

    def to_dict(self) -> dict[str, Any]:
        """Fields of the output, ready for JSON.

        Times become durations in seconds. A log-probability of -inf becomes None.
        """
        result = _finite(dataclasses.asdict(self))
        if self.metrics is not None:
            result["metrics"] = {
                "time_to_first_token": self.metrics.time_to_first_token,
                "total_time": self.metrics.total_time,
                "num_draft_tokens": self.metrics.num_draft_tokens,
                "num_accepted_tokens": self.metrics.num_accepted_tokens,
            }
        return result


def _finite(value: Any) -> Any:
    """The value with None for floats that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
