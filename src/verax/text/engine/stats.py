"""Figures of a running engine: its state now, its totals, and those of one step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

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

    @classmethod
    def sum(cls, totals: Iterable[SpeculationTotals]) -> SpeculationTotals:
        """The totals of several engines together."""
        totals = list(totals)
        places = itertools.zip_longest(*(of.num_accepted_tokens_per_pos for of in totals), fillvalue=0)
        return cls(
            sum(of.num_drafts for of in totals),
            sum(of.num_draft_tokens for of in totals),
            sum(of.num_accepted_tokens for of in totals),
            [sum(place) for place in places],
        )

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

    @classmethod
    def sum(cls, stats: Iterable[EngineStats]) -> EngineStats:
        """The figures of several equal engines together."""
        stats = list(stats)
        counts = {
            field.name: sum(getattr(of, field.name) for of in stats)
            for field in fields(cls)
            if field.name not in ("kv_cache_usage", "spec_decode")
        }
        drafts = [of.spec_decode for of in stats if of.spec_decode is not None]
        return cls(
            kv_cache_usage=sum(of.kv_cache_usage for of in stats) / len(stats),
            spec_decode=SpeculationTotals.sum(drafts) if drafts else None,
            **counts,
        )


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
