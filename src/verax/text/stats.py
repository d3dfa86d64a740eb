"""Figures of a running engine: its state now, its totals, and those of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EngineStats", "SpeculationTotals", "StepStats"]


@dataclass
class SpeculationTotals:
    """Totals of speculative decoding since an engine started, as vLLM counts them."""

    num_drafts: int = 0
    """Times that drafts of a sequence were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that held."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """By place in the draft: how often it held."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that held, 0 to 1; 0 without drafts."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)

    def __str__(self) -> str:
        return f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafts held ({self.acceptance_rate:.0%})"


@dataclass(frozen=True)
class EngineStats:
    """State of an engine, and its totals since it started. `n` samples of a request count as `n` requests."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    """Share of the cache's blocks that running requests own, 0 to 1; with sliding windows, in the fullest group."""
    prefix_cache_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Tokens that were found in it."""
    num_preemptions: int
    prompt_tokens: int
    """Prompt tokens of the requests that got a first token."""
    generation_tokens: int
    """Answer tokens that were sampled."""
    spec_decode: SpeculationTotals | None = None
    """Totals of speculative decoding; None without it."""


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
