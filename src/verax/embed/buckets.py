"""Sentences of all lengths into a few fixed shapes, so that a short list of programs serves everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from verax._buckets import at_least, powers

__all__ = ["Buckets", "Job"]

SHORTEST = 16
"""Tokens of the smallest bucket."""


@dataclass(frozen=True)
class Job:
    """Input of one program call."""

    packed: Int32[np.ndarray, "rows tokens_and_1"]
    """A sentence a row: its length, then its tokens, then padding. Rows past the last sentence are empty."""
    members: Int32[np.ndarray, "n"]
    """Indices of the sentences in the first rows."""


class Buckets:
    """The shapes (rows, tokens) that there are programs for: lengths grow by a half or a third, rows fourfold."""

    def __init__(self, batch_size: int, max_length: int, *, padding: bool = True):
        """Up to `batch_size` sentences of up to `max_length` tokens; without `padding`, one by one as they are."""
        doubled = powers(SHORTEST, max_length, 2)
        self.lengths = sorted({min(n, max_length) for length in doubled for n in (length, length * 3 // 2)})
        self.rows = powers(1, batch_size, 4)
        if not padding:
            self.lengths, self.rows = list(range(max_length + 1)), [1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All of them, small ones first."""
        return [(rows, length) for length in self.lengths for rows in self.rows]

    def jobs(self, members: Sequence[int], ids: Sequence[list[int]], pad: int = 0) -> Iterator[Job]:
        """The sentences as calls, the longest first, those of like length together."""
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        most = self.rows[-1]
        for begin in range(0, len(order), most):
            chosen = order[begin : begin + most]
            length = at_least(self.lengths, len(ids[chosen[0]]))
            packed = np.full((at_least(self.rows, len(chosen)), 1 + length), pad, np.int32)
            packed[len(chosen) :, 0] = 0
            for row, i in zip(packed, chosen, strict=False):
                row[0] = len(ids[i])
                row[1 : 1 + len(ids[i])] = ids[i]
            yield Job(packed, np.asarray([members[i] for i in chosen], np.int32))
