"""Texts of all lengths into a few fixed shapes, so that a short list of programs serves everything."""

from __future__ import annotations

import abc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from verax._buckets import at_least, eighths, powers

__all__ = ["Buckets", "Job", "PackedBuckets", "PaddedBuckets", "Tokens"]

SHORTEST = 16
"""Tokens of the smallest bucket."""

TOKENIZED_AT_ONCE = 512
"""Texts that are tokenised together: enough to sort like lengths together and to fill all cores."""

ROWS = 32
"""Texts of a padded call unless told otherwise."""

TOKENS_PER_SENTENCE = 4
"""Tokens that a sentence takes at least of a packed call: they bound the sentences of a call by its tokens."""


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

    tokens: Int32[np.ndarray, "rows tokens"]
    """Tokens of the texts: end to end in one row, or each in a row of its own, with padding behind them."""
    lengths: Int32[np.ndarray, "texts"]
    """Tokens of each text, in the order of their places; 0 past the last text."""
    types: Int32[np.ndarray, "rows tokens"]
    """Types of the tokens; 0 where they have none."""
    members: Int32[np.ndarray, "n"]
    """Indices of the texts."""


_Waiting = tuple[int, Tokens]
"""Text that is in no call yet, after its index."""


class Buckets(abc.ABC):
    """The shapes that there are programs for, and the division of texts into calls of these shapes."""

    batch_size: int
    """Most texts in a call."""

    @abc.abstractmethod
    def empty_jobs(self) -> list[Job]:
        """A call without texts of every shape, small ones first."""

    @abc.abstractmethod
    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        """True if these texts fill a call."""

    @abc.abstractmethod
    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        """Remove the texts of a call from `waiting`, where short ones are first."""

    @abc.abstractmethod
    def _job(self, texts: Sequence[_Waiting]) -> Job:
        """The call of these texts."""

    def jobs(self, texts: Sequence[Tokens]) -> Iterator[Job]:
        """The texts as calls, those with the longest ones first."""
        return self.tokenized([len(text.ids) for text in texts], lambda chunk: [texts[i] for i in chunk])

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
        waiting: list[_Waiting] = []
        for begin in range(0, len(order), TOKENIZED_AT_ONCE):
            chunk = order[begin : begin + TOKENIZED_AT_ONCE]
            waiting += zip(chunk, tokenize(chunk), strict=True)
            waiting.sort(key=_length)
            while self._fill(waiting):
                yield self._job(self._take(waiting))
        while waiting:
            yield self._job(self._take(waiting))


class PackedBuckets(Buckets):
    """Rows of so many tokens in all, in which sentences lie end to end; sizes are eighths apart."""

    def __init__(self, batch_size: int | None, max_length: int, tokens: int):
        """Calls for texts of up to `max_length` tokens.

        Args:
            batch_size: most texts in a call; as many as `tokens` hold if None.
            max_length: tokens of the longest text.
            tokens: most tokens of several texts in a call.
        """
        self.tokens = tokens
        self.batch_size = batch_size or max(1, tokens // TOKENS_PER_SENTENCE)
        longest = max(max_length, TOKENS_PER_SENTENCE)
        self.sizes = eighths(SHORTEST, max(longest, min(tokens, self.batch_size * longest)))

    def empty_jobs(self) -> list[Job]:
        """A call without texts of every shape, small ones first."""
        return [_job(1, size, size // TOKENS_PER_SENTENCE, []) for size in self.sizes]

    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        return len(waiting) >= self.batch_size or sum(map(_room, waiting)) >= self.tokens

    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        # The longest text that there is room for, again and again: hardly any room is left.
        room, taken = max(self.tokens, _room(waiting[-1])), []
        while len(taken) < self.batch_size and (fitting := bisect_right(waiting, room, key=_room)):
            taken.append(waiting.pop(fitting - 1))
            room -= _room(taken[-1])
        return taken

    def _job(self, texts: Sequence[_Waiting]) -> Job:
        size = at_least(self.sizes, sum(map(_room, texts)))
        job, begin = _job(1, size, size // TOKENS_PER_SENTENCE, texts), 0
        for _, text in texts:
            _write(job, 0, begin, text)
            begin += len(text.ids)
        return job


class PaddedBuckets(Buckets):
    """A row for each sentence, for models whose sentences cannot share one.

    Lengths grow by a half or a third, rows fourfold.
    """

    def __init__(self, batch_size: int | None, max_length: int, *, padding: bool = True):
        """Up to `batch_size` texts, or 32, of up to `max_length` tokens; without `padding`, one by one as they are."""
        doubled = powers(SHORTEST, max_length, 2)
        self.lengths = sorted({min(n, max_length) for length in doubled for n in (length, length * 3 // 2)})
        self.rows = powers(1, batch_size or ROWS, 4)
        if not padding:
            self.lengths, self.rows = list(range(max_length + 1)), [1]
        self.batch_size = self.rows[-1]

    def empty_jobs(self) -> list[Job]:
        """A call without texts of every shape, small ones first."""
        return [_job(rows, length, rows, []) for length in self.lengths for rows in self.rows]

    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        return len(waiting) >= self.batch_size

    def _take(self, waiting: list[_Waiting]) -> list[_Waiting]:
        taken = waiting[-self.batch_size :]
        del waiting[-self.batch_size :]
        return taken

    def _job(self, texts: Sequence[_Waiting]) -> Job:
        rows, length = at_least(self.rows, len(texts)), at_least(self.lengths, _length(texts[-1]))
        job = _job(rows, length, rows, texts)
        for row, (_, text) in enumerate(texts):
            _write(job, row, 0, text)
        return job


def _length(text: _Waiting) -> int:
    return len(text[1].ids)


def _room(text: _Waiting) -> int:
    """Tokens that a text takes of a packed call."""
    return max(_length(text), TOKENS_PER_SENTENCE)


def _job(rows: int, size: int, places: int, texts: Sequence[_Waiting]) -> Job:
    """A call with places for texts, before their tokens are written."""
    lengths = np.zeros(places, np.int32)
    lengths[: len(texts)] = [len(text.ids) for _, text in texts]
    members = np.asarray([index for index, _ in texts], np.int32)
    return Job(np.zeros((rows, size), np.int32), lengths, np.zeros((rows, size), np.int32), members)


def _write(job: Job, row: int, begin: int, text: Tokens) -> None:
    end = begin + len(text.ids)
    job.tokens[row, begin:end] = text.ids
    if text.types is not None:
        job.types[row, begin:end] = text.types
