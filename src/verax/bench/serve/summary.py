"""Numbers of a load test: rates, latency percentiles, goodput, and failures by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verax.bench.serve.client import Answer
from verax.bench.serve.load import Run
from verax.errors import InvalidParameterError

__all__ = ["LATENCIES", "goodput_limits", "latencies", "summarise"]

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""vLLM's names: time to first token, time per output token after the first one, time between two events of a stream,
and time of the whole request (end to end)."""

ALIASES = {"e2e": "e2el"}

PERCENTILES = (50, 90, 99)


def goodput_limits(text: str) -> dict[str, float]:
    """Milliseconds that a good request takes at most, by latency, of a text such as `ttft:200,tpot:50,e2el:5000`.

    Raises:
        InvalidParameterError: for an unknown latency or a limit that is no positive number.
    """
    limits = {}
    for pair in text.split(","):
        name, _, limit = pair.strip().partition(":")
        name = ALIASES.get(name, name)
        if name not in LATENCIES or name == "itl":
            raise InvalidParameterError(f"goodput: expected ttft, tpot or e2el with milliseconds, got {pair!r}")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = 0.0
        if not 0 < limits[name] < float("inf"):
            raise InvalidParameterError(f"goodput: expected milliseconds such as {name}:200, got {pair!r}")
    return limits


def latencies(answer: Answer) -> dict[str, Any]:
    """Latencies of an answer in milliseconds; `itl` is a list of them. Those that an answer does not have are missing.

    An event can carry several tokens, so `tpot` divides by the tokens that the server counted.
    """
    found: dict[str, Any] = {"e2el": 1e3 * (answer.ended - answer.sent)}
    if answer.events:
        first, last = answer.events[0], answer.events[-1]
        found["ttft"] = 1e3 * (first - answer.sent)
        found["itl"] = (1e3 * np.diff(answer.events)).tolist()
        if answer.completion_tokens > 1:
            found["tpot"] = 1e3 * (last - first) / (answer.completion_tokens - 1)
    return found


def summarise(runs: Sequence[Run], goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Report of the runs of one side, as JSON holds it.

    Latencies are those of complete answers whose clients read at once: a slow reader measures itself. Rates count the
    complete answers of all runs.

    Args:
        runs: with the same load.
        goodput: `goodput_limits`; a request is good if it keeps all of them.
    """
    answers = [answer for run in runs for answer in run.answers]
    seconds = sum(run.seconds for run in runs)
    completed = [answer for answer in answers if answer.completed]
    measured = [latencies(answer) for answer in completed if not answer.request.slow]
    report: dict[str, Any] = {
        "requests": len(answers),
        "completed": len(completed),
        "disconnected": sum(answer.left for answer in answers),
        "slow": sum(answer.request.slow for answer in answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "prompt_tokens": sum(answer.prompt_tokens for answer in completed),
        "output_tokens": sum(answer.completion_tokens for answer in completed),
        "requests_per_s": len(completed) / seconds,
        "output_tokens_per_s": sum(answer.completion_tokens for answer in completed) / seconds,
        "latency_ms": {name: _spread([found[name] for found in measured if name in found]) for name in LATENCIES},
    }
    if goodput:
        good = sum(all(found.get(name, 0.0) <= limit for name, limit in goodput.items()) for found in measured)
        report["goodput_requests_per_s"] = good / seconds
        report["good"] = good
    return report


def _spread(values: list[Any]) -> dict[str, float] | None:
    """Mean and percentiles; lists among the values count with each of their numbers."""
    numbers = np.concatenate([np.atleast_1d(value) for value in values]) if values else np.empty(0)
    if not len(numbers):
        return None
    return {"mean": float(np.mean(numbers))} | {f"p{q}": float(np.percentile(numbers, q)) for q in PERCENTILES}
