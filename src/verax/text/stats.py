"""Figures of a running engine: its state now, its totals, and those of one step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats", "StepStats"]


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
