"""One load on all sides in turn: rates, ratios, the time that a server adds, and the check of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from verax import progress
from verax.bench.serve.check import check_answers
from verax.bench.serve.load import Load, Run
from verax.bench.serve.sides import ServerSide, Side
from verax.bench.serve.summary import latencies, summarise
from verax.bench.timing import Samples, interleave

__all__ = ["added_ttft", "run_case"]

SHOW_EVERY = 0.2
"""Seconds between two changes of the progress bar: its text costs processor time that the server needs."""


def run_case(
    runner: asyncio.Runner,
    load: Load,
    sides: Mapping[str, Side],
    chosen: str,
    *,
    engine: str | None,
    first: int,
    runs: int,
    warmup: int,
    goodput: Mapping[str, float] | None,
    checks: int,
) -> dict[str, Any]:
    """Run a load on all sides in turn, then check answers of the server; the case as JSON holds it.

    Args:
        runner: of the event loop that the sides belong to.
        load: the loop.
        sides: by name.
        chosen: name of the server that is measured, a `ServerSide`.
        engine: name of the side that is its engine without HTTP; None if there is none.
        first: number of the first run, which decides on its prompts.
        runs: counted rounds. With `warmup` rounds before them.
        goodput: `goodput_limits`.
        checks: answers that are compared with those of the server without load.
    """
    taken: dict[str, list[Run]] = {name: [] for name in sides}
    server = sides[chosen]
    assert isinstance(server, ServerSide)
    cpu = server.client_cpu_s

    with progress.bar(load.name) as report:
        shown = _Shown(report)

        def run(name: str) -> None:
            number = first + len(taken[name])
            taken[name].append(runner.run(sides[name].run(load, number, shown.counter(name))))

        samples = interleave({name: partial(run, name) for name in sides}, runs=runs, warmup=warmup, report=shown.turn)
    runner.run(server.monitor.drained())
    counted = {name: found[len(found) - len(samples[name].seconds) :] for name, found in taken.items()}
    reports = {name: _side(samples[name], counted[name], goodput) for name in sides}
    case = {
        "name": load.name,
        "sides": reports,
        **_ratios(counted, chosen),
        "client_cores": (server.client_cpu_s - cpu) / sum(run.seconds for run in taken[chosen]),
    }
    if engine is not None:
        case["added_ttft_ms"] = added_ttft(counted[chosen], counted[engine])
    last = taken[chosen][-1]
    case["check"] = runner.run(check_answers(server.monitor.ask, server.monitor.tokenize, last.answers, most=checks))
    return case


def added_ttft(server: Sequence[Run], engine: Sequence[Run]) -> dict[str, Any] | None:
    """Milliseconds that a server adds to the time to first token of its engine; None if no request has both.

    Each request is paired with the same one of the same round on the engine without HTTP.
    """
    rounds = [_paired(ours, theirs) for ours, theirs in zip(server, engine, strict=True)]
    rounds = [found for found in rounds if found]
    if not rounds:
        return None
    pairs = np.concatenate(rounds)
    return {
        "requests": len(pairs),
        "mean": float(np.mean(pairs)),
        **{f"p{q}": float(np.percentile(pairs, q)) for q in (10, 50, 90, 99)},
        "rounds_p50": [float(np.median(found)) for found in rounds],
    }


def _paired(server: Run, engine: Run) -> list[float]:
    first = [
        {
            answer.request.number: latencies(answer)["ttft"]
            for answer in run.answers
            if answer.completed and answer.events and not answer.request.slow
        }
        for run in (server, engine)
    ]
    return [first[0][number] - first[1][number] for number in first[0] if number in first[1]]


def _ratios(counted: Mapping[str, Sequence[Run]], chosen: str) -> dict[str, Any]:
    """Output tokens per second of the server over those of each other side: median, P10 and P90 of the rounds."""
    rates = {name: np.asarray([_rate(run) for run in runs]) for name, runs in counted.items()}
    ratios, ranges = {}, {}
    for name, rate in rates.items():
        if name != chosen and rate.all():
            low, middle, high = np.percentile(rates[chosen] / rate, (10, 50, 90))
            ratios[f"{chosen} / {name}"] = float(middle)
            ranges[f"{chosen} / {name}"] = [float(low), float(high)]
    return {"ratios": ratios, "ratio_p10_p90": ranges}


def _rate(run: Run) -> float:
    return sum(answer.completion_tokens for answer in run.answers if answer.completed) / run.seconds


def _side(samples: Samples, runs: Sequence[Run], goodput: Mapping[str, float] | None) -> dict[str, Any]:
    report = summarise(runs, goodput)
    return samples.to_dict(report["output_tokens"] / len(runs)) | report


class _Shown:
    """Progress bar of a case: turns of the sides, and the answers within a turn."""

    def __init__(self, report: progress.Report):
        self._report = report
        self._turns: tuple[int, int | None] = (0, None)

    def turn(self, done: int, total: int, note: str) -> None:
        """Show that a side has had its turn."""
        self._turns = (done, total)
        self._report(done, total, note)

    def counter(self, name: str) -> Callable[[], None]:
        """Function that is called for each answer of a turn."""
        count, last = 0, 0.0

        def count_answer() -> None:
            nonlocal count, last
            count += 1
            if (now := time.perf_counter()) - last > SHOW_EVERY:
                last = now
                self._report(*self._turns, f"{name}: {count} answers")

        return count_answer
