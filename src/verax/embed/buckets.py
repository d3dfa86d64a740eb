"""Texts of all lengths into a few fixed shapes, so that a short list of programs serves everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from verax._buckets import at_least, powers

__all__ = ["Buckets", "Job", "Tokens"]

SHORTEST = 16
"""Tokens of the smallest bucket."""

TOKENIZED_AT_ONCE = 16
"""Batches whose texts are tokenised together: enough to sort like lengths together and to fill all cores."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text, or of a pair of texts."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    """Type of each token of a pair: 0 for the first text, 1 for the second."""
    left_out: int = 0
    """Tokens that were cut from the end."""


@dataclass(frozen=True)
class Job:
    """Input of one program call."""

    packed: Int32[np.ndarray, "rows tokens_and_1"]
    """A text a row: its length, then its tokens, then padding. Rows past the last text are empty."""
    members: Int32[np.ndarray, "n"]
    """Indices of the texts in the first rows."""
    types: Int32[np.ndarray, "rows tokens"]
    """Types of the tokens; 0 where they have none."""


class Buckets:
    """The shapes (rows, tokens) that there are programs for: lengths grow by a half or a third, rows fourfold."""

    def __init__(self, batch_size: int, max_length: int, *, padding: bool = True):
        """Up to `batch_size` texts of up to `max_length` tokens; without `padding`, one by one as they are."""
        doubled = powers(SHORTEST, max_length, 2)
        self.lengths = sorted({min(n, max_length) for length in doubled for n in (length, length * 3 // 2)})
        self.rows = powers(1, batch_size, 4)
        if not padding:
            self.lengths, self.rows = list(range(max_length + 1)), [1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All of them, small ones first."""
        return [(rows, length) for length in self.lengths for rows in self.rows]

    def jobs(self, members: Sequence[int], texts: Sequence[Tokens]) -> Iterator[Job]:
        """The texts as calls, the longest first, those of like length together."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
        most = self.rows[-1]
        for begin in range(0, len(order), most):
            chosen = order[begin : begin + most]
            rows, length = at_least(self.rows, len(chosen)), at_least(self.lengths, len(texts[chosen[0]].ids))
            packed = np.zeros((rows, 1 + length), np.int32)
            types = np.zeros((rows, length), np.int32)
            for row, i in enumerate(chosen):
                text = texts[i]
                packed[row, 0] = len(text.ids)
                packed[row, 1 : 1 + len(text.ids)] = text.ids
                if text.types is not None:
                    types[row, : len(text.ids)] = text.types
            yield Job(packed, np.asarray([members[i] for i in chosen], np.int32), types)

    def tokenized(
        self, characters: Sequence[int], tokenize: Callable[[Sequence[int]], Sequence[Tokens]]
    ) -> Iterator[Job]:
        """Texts as calls, tokenised some batches ahead, roughly the longest first.

        They are sorted by characters over all texts, by tokens among those that are tokenised together.

        Args:
            characters: of each text.
            tokenize: function from indices of texts to their tokens.
        """
        order = sorted(range(len(characters)), key=lambda i: -characters[i])
        at_once = TOKENIZED_AT_ONCE * self.rows[-1]
        for begin in range(0, len(order), at_once):
            chunk = order[begin : begin + at_once]
            yield from self.jobs(chunk, tokenize(chunk))
