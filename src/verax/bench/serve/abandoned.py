"""Ends of requests whose client disconnected, as the log of `verax serve` has them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

__all__ = ["GRACE", "abort_times", "read_ends"]

GRACE = 1.0
"""Seconds within which a server has to abort the request of a client that disconnected."""


class _Line(msgspec.Struct):
    time: str = ""
    request_id: str = ""
    duration: float = 0.0


def read_ends(log: Path) -> dict[str, tuple[float, float]]:
    """Unix times at which each request began and ended, by its id, of a log of JSON lines. Other lines are skipped."""
    decode, ends = msgspec.json.Decoder(_Line).decode, {}
    with log.open("rb") as lines:
        for text in lines:
            if not text.startswith(b"{"):
                continue
            try:
                line = decode(text)
                if line.request_id:
                    end = datetime.fromisoformat(line.time).timestamp()
                    ends[line.request_id] = (end - line.duration, end)
            except (ValueError, msgspec.MsgspecError):
                continue
    return ends


def abort_times(left: Mapping[str, float], ends: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Seconds from the disconnection of each client to the end of its request on the server, as JSON holds them.

    A client may leave before the server has accepted its connection and read its request: its seconds are then those
    from the beginning of the request, and it is counted as unread. A request without an end counts as late.

    Args:
        left: Unix time at which each client disconnected, by the id of its request.
        ends: as `read_ends` gives them.
    """
    seconds, unread = [], []
    for name, when in left.items():
        if name in ends:
            begin, end = ends[name]
            seconds.append(end - max(begin, when))
            if begin > when:
                unread.append(end - when)
    late = sum(value > GRACE for value in seconds) + len(left) - len(seconds)
    found: dict[str, Any] = {"clients": len(left), "logged": len(seconds), "late": late, "unread": len(unread)}
    if seconds:
        found |= {"p50_s": float(np.percentile(seconds, 50)), "p99_s": float(np.percentile(seconds, 99))}
        found |= {"most_s": max(seconds), "unread_most_s": max(unread, default=0.0)}
    return found
