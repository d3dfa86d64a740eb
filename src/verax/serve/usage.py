"""Usage and times of a request, as answers have them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from verax.text.outputs import RequestMetrics, RequestOutput

__all__ = ["SYSTEM_FINGERPRINT", "Usage"]

SYSTEM_FINGERPRINT = f"verax-{version('verax')}"


@dataclass
class Usage:
    """Token counts and times of a request so far; of several prompts, their sums.

    Attributes:
        prompt_tokens: number of prompt tokens.
        completion_tokens: number of generated tokens of all answers.
        cached_tokens: number of prompt tokens that were in the prefix cache.
        reasoning_tokens: number of generated tokens of the reasoning.
        metrics: times of the request.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    metrics: RequestMetrics | None = None

    def add(self, output: RequestOutput) -> None:
        """Count what is new in one prompt's answers."""
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens
        for part in output.outputs:
            self.completion_tokens += len(part.token_ids)
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
        prompt = (metrics.first_token_time - metrics.arrival_time) * 1e3
        predicted = (metrics.finished_time - metrics.first_token_time) * 1e3
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "prompt_ms": round(prompt, 3),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(predicted, 3),
            "predicted_per_second": round(1e3 * self.completion_tokens / predicted, 3) if predicted > 0 else None,
        }
