"""The one timer: every side once in turn, again and again, so that a drifting machine drifts for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Samples", "interleave"]


@dataclass(frozen=True)
class Samples:
    """Seconds of each counted run of one side, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return float(np.median(self.seconds))

    def percentile(self, q: float) -> float:
        """The q-th percentile, in seconds."""
        return float(np.percentile(self.seconds, q))

    def ratio_to(self, other: Samples) -> float:
        """How many times faster than `other`: the median over rounds of the ratio within a round."""
        return float(np.median(np.asarray(other.seconds) / np.asarray(self.seconds)))

    def to_dict(self, work: float) -> dict[str, object]:
        """Numbers for a report, with rates of `work` units per second."""
        return {
            "median_s": self.median,
            "p10_s": self.percentile(10),
            "p90_s": self.percentile(90),
            "rate": work / self.median,
            "seconds": list(self.seconds),
        }


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    runs: int,
    warmup: int = 1,
    loops: Mapping[str, int] | None = None,
    report: Callable[[int, int, str], None] | None = None,
) -> dict[str, Samples]:
    """Time each side `runs` times after `warmup` rounds that are not counted.

    A side must have finished its work when it returns: it returns host data, not arrays that are still being computed.
    A side named in `loops` is called so many times in each round, and its time is a call's mean.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    total = (runs + warmup) * len(sides)
    done = 0
    for round_number in range(warmup + runs):
        for name, run in sides.items():
            calls = (loops or {}).get(name, 1)
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = (time.perf_counter() - begin) / calls
            if round_number >= warmup:
                taken[name].append(seconds)
            done += 1
            if report is not None:
                report(done, total, f"{name} {seconds:.2f} s")
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}
