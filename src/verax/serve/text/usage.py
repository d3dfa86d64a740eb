"""Usage and times of a request, as answers have them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from verax.text.engine.outputs import RequestMetrics, RequestOutput

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
        num_samples: number of answers that have begun.
        metrics: times of the request.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    num_samples: int = 0
    metrics: RequestMetrics | None = None

    def add(self, output: RequestOutput) -> None:
        """Count what is new in one prompt's answers."""
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens
        for part in output.outputs:
            self.completion_tokens += len(part.token_ids)
            self.num_samples = max(self.num_samples, part.index + 1)
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
        prompt_n, predicted_n = self.prompt_tokens - self.cached_tokens, self.completion_tokens
        prompt_ms = (metrics.first_token_time - metrics.arrival_time) * 1e3
        predicted_ms = (metrics.finished_time - metrics.first_token_time) * 1e3
        # The first token of an answer comes from the prompt's step.
        later = max(predicted_n - self.num_samples, 0)
        return {
            "cache_n": self.cached_tokens,
            "prompt_n": prompt_n,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": _quotient(prompt_ms, prompt_n),
            "prompt_per_second": _quotient(1e3 * prompt_n, prompt_ms),
            "predicted_n": predicted_n,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": _quotient(predicted_ms, later),
            "predicted_per_second": _quotient(1e3 * later, predicted_ms),
        }


def _quotient(value: float, by: float) -> float:
    """Quotient for JSON, which has no infinity: 0 of nothing."""
    return round(value / by, 3) if by > 0 else 0.0
