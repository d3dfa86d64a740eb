"""Cases of a benchmark: sides that do the same work, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verax.bench.timing import UNTIMED, Samples, calls_in_turn, interleave

__all__ = ["Case", "Side", "ratios", "time_case"]


@dataclass(frozen=True)
class Side:
    """One implementation of a case."""

    call: Callable[[], Any]
    """Runs it once; its outputs are finished when it returns."""
    flops: int
    """Floating-point operations of its products, by formula; masked ones not counted."""
    dtypes: Sequence[str] = ("float32",)
    """Dtypes of the outputs; the last one is that of all further outputs. The first is the dtype of the products."""
    compile_s: float | None = None
    """Seconds of compiling; None where nothing is compiled."""
    planned_bytes: int | None = None
    """Bytes that XLA plans for results and temporaries."""


@dataclass(frozen=True)
class Case:
    """One piece of work and all sides that do it."""

    group: str
    """Operation or section that the case belongs to."""
    name: str
    bytes_moved: int
    """Bytes that have to be read and written, each once."""
    chosen: str
    """Side that the others are set against: the one that runs without a choice."""
    sides: Mapping[str, Side]
    sizes: Mapping[str, int] = field(default_factory=dict)
    expected: Sequence[np.ndarray] = ()
    """Outputs in float64, where sides are checked against them."""
    tolerance: float = 0.0
    """Largest error of a checked side, relative to the expected outputs."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reason for each side that is missing, by name."""


def time_case(
    case: Case,
    *,
    runs: int,
    warmup: int,
    beside: Mapping[str, Callable[[], object]] | None = None,
    report: Callable[[int, int, str], None] | None = None,
) -> dict[str, Samples]:
    """Time all sides of a case in turn, short calls in loops (`timing.interleave`).

    Args:
        case: sides that have been called before, so that nothing compiles.
        runs: counted rounds. With `warmup` rounds before them.
        beside: further calls that take their turns, by name.
        report: progress, as `interleave` reports it.
    """
    calls = {name: side.call for name, side in case.sides.items()} | dict(beside or {})
    loops = {name: calls_in_turn(call) for name, call in calls.items()}
    return interleave(calls, runs=runs, warmup=warmup, loops=loops, untimed=UNTIMED, report=report)


def ratios(case: Case, samples: Mapping[str, Samples]) -> dict[str, float]:
    """Factor by which the chosen side is faster than each other: medians over the rounds (`Samples.ratio_to`)."""
    chosen = samples[case.chosen]
    return {name: chosen.ratio_to(side) for name, side in samples.items() if name != case.chosen}
