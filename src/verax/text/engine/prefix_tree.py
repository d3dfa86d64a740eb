"""Prefixes that the cache has blocks for, as a tree: each adds the tokens of one full block to the prefix before it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

__all__ = ["Prefix", "PrefixTree"]


@dataclass(eq=False, slots=True)
class Prefix:
    """Tokens from the beginning of a text to the end of a full block."""

    before: Prefix | None
    """The prefix without the last block; None for the empty one."""
    tokens: tuple[int, ...]
    """Tokens of the last block."""
    length: int
    """Number of blocks."""
    blocks: list[int]
    """By cache group: the block that holds `tokens` behind the prefix before them; 0 if none does."""
    uses: int = 0
    """Number of those blocks, of prefixes that are a block longer, and of sequences that go on from it."""


class PrefixTree:
    """Prefixes by their tokens themselves, so that no collision of hashes can mix texts up.

    A prefix stays while a block, a longer prefix or a sequence uses it: behind a sliding window, the end of a text may
    be in the cache when its beginning is not.
    """

    def __init__(self, num_groups: int, block_size: int):
        self._roots: dict[int | None, Prefix] = {}
        self._num_groups = num_groups
        self._block_size = block_size
        self._longer: dict[tuple[Prefix, tuple[int, ...]], Prefix] = {}

    def __len__(self) -> int:
        return len(self._longer)

    def root(self, adapter: int | None) -> Prefix:
        """The empty prefix of the texts that an adapter computes, or the base model: no others share their blocks."""
        return self._roots.setdefault(adapter, Prefix(None, (), 0, []))

    def next(self, prefix: Prefix, tokens: TokenIds[int]) -> Prefix:
        """The prefix of a text that is a block longer than `prefix`; a new one without blocks if there is none."""
        begin = prefix.length * self._block_size
        key = prefix, tuple(tokens[begin : begin + self._block_size])
        longer = self._longer.get(key)
        if longer is None:
            longer = self._longer[key] = Prefix(prefix, key[1], prefix.length + 1, [0] * self._num_groups)
            prefix.uses += 1
        return longer

    def along(self, prefix: Prefix, tokens: TokenIds[int], length: int) -> Iterator[Prefix]:
        """The prefixes of a text of 1, 2, ... `length` blocks behind a root, up to the first that is not there."""
        size = self._block_size
        for begin in range(0, length * size, size):
            longer = self._longer.get((prefix, tuple(tokens[begin : begin + size])))
            if longer is None:
                return
            yield (prefix := longer)

    def drop_use(self, prefix: Prefix) -> None:
        """Count one use of a prefix less. It goes with its last use, and so do those before it."""
        prefix.uses -= 1
        while prefix.uses == 0 and prefix.before is not None:
            del self._longer[prefix.before, prefix.tokens]
            prefix = prefix.before
            prefix.uses -= 1
