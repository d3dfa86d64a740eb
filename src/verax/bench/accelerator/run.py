"""All parts in order, within a budget of time; those that are finished already are skipped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verax.bench.accelerator import process
from verax.bench.accelerator.parts import PARTS
from verax.errors import InvalidParameterError, VeraxError

__all__ = ["bench_accelerator"]

NOT_BEGUN = "not begun"

SHORTEST = 20.0
"""Seconds that have to be left for a part to be begun."""


def bench_accelerator(
    folder: Path,
    *,
    only: Sequence[str] = tuple(PARTS),
    rehearse: bool = False,
    part_seconds: float = 300.0,
    seconds: float = 600.0,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the parts; a result as JSON holds it.

    Args:
        folder: gets `parts/NAME.json` and `.log` of each part, and the results of the benchmarks in them. Parts that
            have finished there on this kind of device are not repeated.
        only: names out of `PARTS`.
        rehearse: tiny sizes on any device.
        part_seconds: time after which a part is stopped.
        seconds: time of all. No part is begun without a share of it, and one that is running is stopped at its end.
        report: called with a line about each part.

    Raises:
        InvalidParameterError: for an unknown part, a budget that is not positive, or a CPU without `rehearse`.
        VeraxError: if JAX does not start.
    """
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise InvalidParameterError(f"only: expected {', '.join(PARTS)}, got {unknown[0]!r}")
    for what, value in (("part_seconds", part_seconds), ("seconds", seconds)):
        if not value > 0:
            raise InvalidParameterError(f"{what}: expected more than 0, got {value:g}")
    begin = time.monotonic()
    try:
        machine = process.device(folder)
    except RuntimeError as error:
        raise VeraxError(str(error)) from error
    if machine["platform"] == "cpu" and not rehearse:
        raise InvalidParameterError("rehearse: JAX has no GPU or TPU here; --rehearse runs the parts at tiny sizes")
    records: dict[str, Any] = {}
    for name in [name for name in PARTS if name in only]:
        left = seconds - (time.monotonic() - begin)
        done = _finished(name, folder, machine["device_kind"], rehearse)
        if done is not None:
            records[name] = done
            report(f"{name}: finished before")
        elif left < min(SHORTEST, seconds):
            records[name] = {"rows": [], "error": f"{NOT_BEGUN}: the budget of {seconds:g} s is spent", "seconds": 0.0}
        else:
            report(f"{name}: {PARTS[name].about}")
            records[name] = process.run_part(name, folder, rehearse=rehearse, seconds=min(left, part_seconds))
            report(f"{name}: {_failure(records[name]) or 'finished'} ({records[name]['seconds']:.0f} s)")
    return {
        "kind": "accelerator",
        "machine": machine,
        "settings": {"parts": list(records), "rehearse": rehearse, "part_seconds": part_seconds, "seconds": seconds},
        "parts": records,
        "complete": not any(_failure(record) for record in records.values()),
    }


def _finished(name: str, folder: Path, kind: str, rehearse: bool) -> dict[str, Any] | None:
    """Record of a part that has run to its end without an error on this kind of device, at this size."""
    path = process.part_file(name, folder)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    same = (record.get("device"), record.get("rehearse")) == (kind, rehearse)
    return record if same and not _failure(record) else None


def _failure(record: dict[str, Any]) -> str:
    """First error of a part; empty if it has none."""
    return next(filter(None, (record["error"], *(row["error"] for row in record["rows"]))), "")
