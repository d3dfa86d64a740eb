"""Outputs of requests, as vLLM names them, and figures of a running engine: its state, its totals, its last step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from verax.files import json_value


@dataclass
class SpeculationTotals:
    """Totals of speculative decoding since an engine started, as vLLM counts them."""

    num_drafts: int = 0
    """Times that drafts of a sequence were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that held."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Number of times that each place of a draft held."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that held, 0 to 1; 0 without drafts."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    @classmethod
    def sum(cls, totals: Iterable[SpeculationTotals]) -> SpeculationTotals:
        """The totals of several engines together."""
        drafts, drafted, accepted, places = zip(*map(dataclasses.astuple, totals), strict=True)
        per_place = [sum(place) for place in itertools.zip_longest(*places, fillvalue=0)]
        return cls(sum(drafts), sum(drafted), sum(accepted), per_place)

    def __str__(self) -> str:
        return f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafts held ({self.acceptance_rate:.0%})"


@dataclass(frozen=True)
class EngineStats:
    """State of an engine, and its totals since it started. `n` samples of a request count as `n` requests."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the cache's blocks that running requests own, 0 to 1; with sliding windows, in the fullest group."""
    prefix_cache_queries: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Tokens that were found in it."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the requests that got a first token."""
    generation_tokens: int = 0
    """Answer tokens that were sampled."""
    spec_decode: SpeculationTotals | None = None
    """Totals of speculative decoding; None without it."""
    step_seconds: float = 0.0
    """Seconds for which the step that runs now has run; 0 between steps."""

    @classmethod
    def sum(cls, stats: Iterable[EngineStats]) -> EngineStats:
        """Figures of several equal engines together: the mean usage of caches, the longest step, sums of the others."""
        stats = list(stats)
        names = [field.name for field in fields(cls) if field.name != "spec_decode"]
        sums: dict[str, Any] = {name: sum(getattr(engine, name) for engine in stats) for name in names}
        sums["kv_cache_usage"] /= max(1, len(stats))
        sums["step_seconds"] = max((engine.step_seconds for engine in stats), default=0.0)
        drafts = [engine.spec_decode for engine in stats if engine.spec_decode is not None]
        return cls(**sums, spec_decode=SpeculationTotals.sum(drafts) if drafts else None)


@dataclass(frozen=True)
class StepStats:
    """Figures of one engine step."""

    num_tokens: int
    """Tokens that the step computes, of prompts and answers."""
    num_generated: int
    """Answer tokens that the host has read in this step."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of the cache's blocks that running requests own, 0 to 1; with sliding windows, in the fullest group."""


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
    """Log-probabilities at each token, by token id: its own first, then the likeliest others."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop token or stop string that ended it; None if it was ended otherwise."""

    @property
    def finished(self) -> bool:
        """True if the continuation is complete."""
        return self.finish_reason is not None


def joined(before: CompletionOutput, after: CompletionOutput) -> CompletionOutput:
    """Two parts of a sample that follow each other, as one."""
    return dataclasses.replace(
        after,
        text=before.text + after.text,
        token_ids=before.token_ids + after.token_ids,
        logprobs=None if before.logprobs is None or after.logprobs is None else before.logprobs + after.logprobs,
    )


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds, on the clock of `time.perf_counter`, and its drafts."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
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
        result = json_value(dataclasses.asdict(self))
        if self.metrics is not None:
            result["metrics"] = {
                "time_to_first_token": self.metrics.time_to_first_token,
                "total_time": self.metrics.total_time,
                "num_draft_tokens": self.metrics.num_draft_tokens,
                "num_accepted_tokens": self.metrics.num_accepted_tokens,
            }
        return result
