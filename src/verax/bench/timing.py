"""The one timer: every side once in turn, again and again, so that a drifting machine drifts for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["ENOUGH_RUNS", "UNTIMED", "Samples", "calls_in_turn", "interleave"]

ENOUGH_RUNS = 10
"""Counted rounds of a result to be relied upon; where one round is long there are fewer, and pages say so."""

MOST_WARMUP = 5
"""Rounds after which counting begins, steady or not."""

STEADY = 0.9
"""A side is still warming up while a round takes less than this share of the one before."""

SHORTEST = 0.02
"""Seconds that a side with short calls works in a turn at least."""

MOST_CALLS = 50
"""Most calls of a side in a turn."""

UNTIMED = 1
"""Calls at the beginning of a turn that do not count, where calls are short: the first one after another side may take
twice as long, while threads of that side still spin and the system finds memory for the results again."""

FENCE = 1.5
"""Quartile distances beyond the quartiles where an outlier begins (Tukey, Exploratory Data Analysis, 1977)."""


@dataclass(frozen=True)
class Samples:
    """Seconds of each counted run of one side, in the order of the rounds, and of its warm-up runs."""

    seconds: tuple[float, ...]
    warmup: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return float(np.median(self.seconds))

    def percentile(self, q: float) -> float:
        """q-th percentile, in seconds."""
        return float(np.percentile(self.seconds, q))

    @property
    def outliers(self) -> tuple[float, ...]:
        """Runs beyond Tukey's fences, in seconds. They count like every other run."""
        low, high = self.percentile(25), self.percentile(75)
        reach = FENCE * (high - low)
        return tuple(s for s in self.seconds if not low - reach <= s <= high + reach)

    def ratio_to(self, other: Samples) -> float:
        """Factor by which this side is faster than `other`: the median over rounds of the ratio within a round."""
        return float(np.median(np.asarray(other.seconds) / np.asarray(self.seconds)))

    def to_dict(self, work: float) -> dict[str, object]:
        """Numbers for a result, with a rate in units of `work` per second."""
        return {
            "median_s": self.median,
            "p10_s": self.percentile(10),
            "p90_s": self.percentile(90),
            "rate": work / self.median,
            "seconds": list(self.seconds),
            "outliers": list(self.outliers),
            "warmup_seconds": list(self.warmup),
        }


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warmup: int = 1,
    loops: Mapping[str, int] | None = None,
    untimed: int = 0,
    report: Callable[[int, int, str], None] | None = None,
) -> dict[str, Samples]:
    """Time each side `runs` times, after at least `warmup` rounds that are not counted, until no side gets faster.

    A side must have finished its work when it returns: it returns host data, not arrays that are still being computed.
    A side named in `loops` is called that number of times in each round, and its time is a call's mean. Before that it
    is called `untimed` times by itself, so that it does not pay for what the previous side left: threads that still
    spin, and memory that the system has to find again.

    A round in which some side is 10% faster than in the round before is warm-up too, up to `MOST_WARMUP` rounds;
    without any `warmup`, counting begins at once.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    first = warmup  # round that counts
    last = 0
    while last < first + runs:
        for done, (name, run) in enumerate(sides.items(), start=1):
            calls = (loops or {}).get(name, 1)
            for _ in range(untimed):
                run()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - begin) / calls)
            if report is not None:
                report(last * len(sides) + done, (first + runs) * len(sides), f"{name} {times[name][-1]:.2f} s")
        last += 1
        if 0 < first == last - 1 and last <= MOST_WARMUP and any(_faster(taken) for taken in times.values()):
            first = last
    return {name: Samples(tuple(taken[first:]), tuple(taken[:first])) for name, taken in times.items()}


def calls_in_turn(run: Callable[[], object]) -> int:
    """Calls of a side in a turn, for `loops`, by the time of one call now, which should not be its first."""
    begin = time.perf_counter()
    run()
    return max(1, min(MOST_CALLS, math.ceil(SHORTEST / (time.perf_counter() - begin))))


def _faster(taken: list[float]) -> bool:
    return taken[-1] < STEADY * taken[-2]
