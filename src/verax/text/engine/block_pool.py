"""Blocks of one cache group: reference counts, the free ones in the order of their last use, and what they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from verax.text.engine.prefix_tree import Prefix, PrefixTree

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks by number. Block 0 is never handed out: it takes the writes of padding.

    Args:
        prefixes: prefixes of the texts that the blocks of all groups hold.
        group: index of the group, in `Prefix.blocks`.
        num_blocks: number of blocks, block 0 included.
        window: sliding window of the group's layers, in tokens; None for full attention.
    """

    def __init__(self, prefixes: PrefixTree, group: int, num_blocks: int, window: int | None):
        self._tree = prefixes
        self.group = group
        self.window = window
        self.num_usable = num_blocks - 1
        self.references = [0] * num_blocks
        """Number of block tables that list each block."""
        # Free blocks, the one that was given back longest ago first. Cached ones stay findable until they are taken.
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, num_blocks))
        self._prefixes: list[Prefix | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own, 0 to 1."""
        return 1 - len(self._free) / self.num_usable

    def share(self, block: int) -> None:
        """Count one more table that lists a block."""
        self._free.pop(block, None)
        self.references[block] += 1

    def take(self) -> int:
        """The free block that was given back longest ago, for one table. What it held is forgotten."""
        block, _ = self._free.popitem(last=False)
        self.references[block] = 1
        self._forget(block)
        return block

    def give_back(self, block: int) -> None:
        """Count one table less that lists a block."""
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free[block] = None

    def cache(self, block: int, prefix: Prefix) -> None:
        """Make a full block findable as the last one of a prefix."""
        prefix.blocks[self.group] = block
        prefix.uses += 1
        self._prefixes[block] = prefix

    def reset(self) -> None:
        """Forget what every block holds."""
        for block in range(len(self._prefixes)):
            self._forget(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert the invariants, given all tables of the group's blocks.

        Raises:
            AssertionError: naming the first block that breaks one.
        """
        uses = [0] * len(self.references)
        for table in tables:
            owned = [block for block in table if block]
            assert len(set(owned)) == len(owned), f"{table} lists a block twice"
            for block in owned:
                uses[block] += 1
        for block, references in enumerate(self.references):
            assert references == uses[block], f"block {block}: {references} references, {uses[block]} uses"
            free = block in self._free
            assert free == (block != 0 and references == 0), f"block {block} is free and used, or neither"
            prefix = self._prefixes[block]
            assert prefix is None or prefix.blocks[self.group] == block, f"block {block} is cached as another one"

    def _forget(self, block: int) -> None:
        prefix = self._prefixes[block]
        if prefix is not None:
            prefix.blocks[self.group] = 0
            self._prefixes[block] = None
            self._tree.drop_use(prefix)
