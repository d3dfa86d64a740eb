"""Groups of layers with blocks of their own, and how many blocks a sliding window needs.

After vLLM's hybrid KV cache manager: layers of one window share a block table, and blocks behind the window are given
back. A query at position i sees the keys j with i - window < j <= i, as transformers counts.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

__all__ = ["CacheGroup", "CachePlan", "first_block", "most_blocks"]

WINDOW_FRACTION = 0.5
"""Part of the memory beyond one whole sequence that windows take before full attention does. Short sequences fill both
alike, long ones almost only full attention: either gets at least half of what a division made for it would hold."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys and values lie in the blocks of one table: those with the same window."""

    layers: tuple[int, ...]
    window: int | None
    """Tokens that a query sees, itself included; None for all."""
    num_blocks: int
    """Blocks of the group; block 0 takes the writes of padding."""


def first_block(num_computed: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the tokens from `num_computed` on attend to."""
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


def most_blocks(num_tokens: int, window: int | None, chunk: int | None, block_size: int) -> int:
    """Most blocks that a sequence of `num_tokens` owns at once, if a step computes at most `chunk` of them."""
    blocks = -(-num_tokens // block_size)
    if window is None or chunk is None:
        return blocks
    # The tokens of a step, the chunk and the window before it, may begin at the last token of a block.
    return min(blocks, (window - 1 + chunk + block_size - 2) // block_size + 1)


@dataclass(frozen=True)
class CachePlan:
    """Division of memory among cache groups."""

    windows: tuple[int | None, ...]
    """Sliding window of each group."""
    block_bytes: tuple[int, ...]
    """Bytes of a block of each group, over its layers."""
    block_size: int
    """Tokens in a block."""
    chunk: int
    """Most tokens of a step."""

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the cache of one sequence, with the blocks that take the writes of padding."""
        blocks = self._blocks(num_tokens, self.chunk)
        return sum((1 + count) * size for count, size in zip(blocks, self.block_bytes, strict=True))

    def longest(self, memory: int, limit: int) -> int:
        """Blocks of the longest sequence, of at most `limit` tokens, that fits; -1 if not even padding's do."""
        lengths = range(-(-limit // self.block_size) + 1)
        return bisect.bisect_right(lengths, memory, key=lambda blocks: self.bytes_for(blocks * self.block_size)) - 1

    def num_blocks(self, memory: int, num_tokens: int, num_seqs: int) -> list[int]:
        """Blocks of each group: for one sequence of `num_tokens` first, then for up to `num_seqs` of them."""
        blocks = self._blocks(num_tokens, self.chunk)
        # The tokens of a step are shared: only one of the sequences computes a whole chunk.
        wanted = [n + (num_seqs - 1) * more for n, more in zip(blocks, self._blocks(num_tokens, 1), strict=True)]
        left = memory - self.bytes_for(num_tokens)
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        full = [group for group, window in enumerate(self.windows) if window is None]
        for fraction, groups in ((WINDOW_FRACTION, windowed), (1, full), (1, windowed)):
            for group in groups:
                more = min(wanted[group] - blocks[group], int(left * fraction) // self.block_bytes[group])
                blocks[group] += more
                left -= more * self.block_bytes[group]
        return [1 + n for n in blocks]

    def _blocks(self, num_tokens: int, chunk: int) -> list[int]:
        return [most_blocks(num_tokens, window, chunk, self.block_size) for window in self.windows]
