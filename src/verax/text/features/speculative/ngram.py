"""Prompt lookup: what followed the last tokens when they occurred before in the text (Saxena, 2023; vLLM's `ngram`).

https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

import weakref
from collections import abc

from verax.text.engine.scheduler import Schedule
from verax.text.engine.sequence import Sequence
from verax.text.hosts.dispatch import Dispatch
from verax.text.step.engine_programs import JittedCall

__all__ = ["NgramDrafter", "NgramIndex"]

MOST_TRIED = 64
"""Earlier places that are compared, the latest first: in monotonous text nearly every token is one."""


class NgramIndex:
    """Places of each n-gram of a text that grows, as chains from the latest to the earliest, as in zlib's `deflate`."""

    def __init__(self, smallest: int, largest: int):
        self._smallest = smallest
        self._largest = largest
        self._latest: dict[tuple[int, ...], int] = {}
        """By n-gram of the smallest size: the token behind its latest place, where there is one."""
        self._earlier: list[int] = []
        """By token: that behind the next earlier place of the n-gram before it; -1 for none."""

    def continuation(self, tokens: abc.Sequence[int], length: int) -> list[int]:
        """Tokens that followed the longest of the last n-grams at its latest place; empty if none occurred before.

        A continuation that reaches the end of the text goes on with itself, so a period is continued.

        Args:
            tokens: the text. It begins with that of the call before.
            length: number of tokens to return.
        """
        self._extend(tokens)
        end, size, found = len(tokens), 0, -1
        at = self._latest.get(tuple(tokens[end - self._smallest :]), -1) if end > self._smallest else -1
        for _ in range(MOST_TRIED):
            if at < 0:
                break
            same = self._smallest
            while same < self._largest and same < at and tokens[at - 1 - same] == tokens[end - 1 - same]:
                same += 1
            if same > size:
                size, found = same, at
            if size == self._largest:
                break
            at = self._earlier[at]
        if found < 0:
            return []
        period = end - found
        known = list(tokens[found : found + length])
        return [known[i % period] for i in range(length)]

    def _extend(self, tokens: abc.Sequence[int]) -> None:
        """Add the n-grams before each token: that at the end is not one of them, it would find itself."""
        for at in range(len(self._earlier), len(tokens)):
            if at < self._smallest:
                self._earlier.append(-1)
                continue
            gram = tuple(tokens[at - self._smallest : at])
            self._earlier.append(self._latest.get(gram, -1))
            self._latest[gram] = at


class NgramDrafter:
    """Drafter that copies from the sequence's own text, prompt and answer.

    Args:
        smallest: fewest tokens that must occur again.
        largest: most tokens that are compared.
        num_drafts: most drafts of a sequence.
    """

    step_cost = 0.0
    """Time of drafting one token for all sequences, in steps of the model."""

    def __init__(self, smallest: int, largest: int, num_drafts: int):
        self._smallest = smallest
        self._largest = largest
        self._num_drafts = num_drafts
        self._indices: weakref.WeakKeyDictionary[Sequence, NgramIndex] = weakref.WeakKeyDictionary()

    def uncompiled(self) -> list[JittedCall]:
        """No programs: the host looks up."""
        return []

    def warm_up(self) -> None:
        """Run nothing."""

    def repeat(self, dispatch: Dispatch) -> None:
        """Refuse what no drafter of this kind sends."""
        raise AssertionError(f"{dispatch.program} was sent, and this host has no draft model")

    def can_draft(self, sequence: Sequence) -> bool:
        """True if the end of the text that the host knows occurred before."""
        return bool(self._continuation(sequence, 1))

    def draft(self, schedule: Schedule, num_drafts: abc.Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts behind the newest tokens of sequences, as many of each as wanted."""
        return {sequence: self._continuation(sequence, count) for sequence, count in num_drafts.items()}

    def _continuation(self, sequence: Sequence, length: int) -> list[int]:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(self._smallest, self._largest)
        return index.continuation(sequence.tokens, length)
