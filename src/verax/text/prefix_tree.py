"""Prefixes that the cache has blocks for, as a tree: each adds the tokens of one full block to the prefix before it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass
from weakref import WeakValueDictionary

__all__ = ["Prefix", "PrefixTree"]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Prefix:
    """Tokens from the beginning of a text to the end of a full block."""

    before: Prefix | None
    """The prefix without the last block; None for the empty one."""
    length: int
    """Number of blocks."""
    blocks: list[int]
    """By cache group: the block that holds the last tokens of the prefix; 0 if none does."""


class PrefixTree:
    """Prefixes by their tokens themselves, so that no collision of hashes can mix texts up.

    A prefix is kept while a block, a sequence or a longer prefix refers to it: behind a sliding window, the end of a
    text may be in the cache when its beginning is not.
    """

    def __init__(self, num_groups: int, block_size: int):
        self.root = Prefix(None, 0, [])
        """The empty prefix."""
        self._num_groups = num_groups
        self._block_size = block_size
        self._longer: WeakValueDictionary[tuple[Prefix, tuple[int, ...]], Prefix] = WeakValueDictionary()

    def next(self, prefix: Prefix, tokens: TokenIds[int]) -> Prefix:
        """The prefix of a text that is a block longer than `prefix`; a new one without blocks if there is none."""
        key = self._key(prefix, tokens)
        longer = self._longer.get(key)
        if longer is None:
            longer = self._longer[key] = Prefix(prefix, prefix.length + 1, [0] * self._num_groups)
        return longer

    def along(self, tokens: TokenIds[int], length: int) -> Iterator[Prefix]:
        """The prefixes of a text of 1, 2, ... `length` blocks, up to the first that is not there."""
        prefix = self.root
        for _ in range(length):
            longer = self._longer.get(self._key(prefix, tokens))
            if longer is None:
                return
            yield (prefix := longer)

    def _key(self, prefix: Prefix, tokens: TokenIds[int]) -> tuple[Prefix, tuple[int, ...]]:
        begin = prefix.length * self._block_size
        return prefix, tuple(tokens[begin : begin + self._block_size])
