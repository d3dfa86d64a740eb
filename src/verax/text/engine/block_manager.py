"""Blocks of the paged cache: their owners, and the full ones that a later prompt can share.

After nano-vllm's `block_manager.py` and vLLM's prefix cache, with two differences: a cached block is found by its
tokens themselves and the prefix before it, so that no hash collision can mix prompts up; and block 0 is never handed
out, it takes the writes of padding.

The layers of a model are in one or more cache groups (`cache_groups.py`), each with blocks and block tables of its own.
Block i of a table holds the same tokens in every group. In a group with a sliding window, blocks that lie behind the
window of every token to come are given back: their places in the table are 0.

The host counts blocks; `verax.ops` calls the same rows of the cache pages. Block i is page i.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable

from verax.text.engine.block_pool import BlockPool
from verax.text.engine.cache_groups import first_block, most_blocks
from verax.text.engine.prefix_tree import Prefix, PrefixTree
from verax.text.engine.sequence import Sequence

__all__ = ["BlockManager"]


class BlockManager:
    """Allocation with reference counts, a prefix cache over full blocks, and least recently used eviction.

    Invariants (`check` asserts them): a block is free exactly if no table lists it; its reference count is the number
    of tables that list it; only full blocks are cached, so a block that is still written to has one owner; a table
    lists every block that tokens to come attend to.

    Args:
        num_blocks: blocks of each cache group, block 0 included.
        block_size: tokens in a block.
        windows: sliding window of each group; None for full attention.
        enable_prefix_caching: keep full blocks findable after their sequence.
    """

    def __init__(
        self,
        num_blocks: abc.Sequence[int],
        block_size: int,
        *,
        windows: abc.Sequence[int | None] = (None,),
        enable_prefix_caching: bool = True,
    ):
        if min(num_blocks) < 2 or block_size < 1:
            raise ValueError(f"a cache needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._prefixes = PrefixTree(len(num_blocks), block_size)
        self._pools = [
            BlockPool(self._prefixes, group, *sizes)
            for group, sizes in enumerate(zip(num_blocks, windows, strict=True))
        ]
        self._windowed = [pool for pool in self._pools if pool.window is not None]
        self.num_queries = 0
        """Tokens of admitted sequences that were looked up in the prefix cache."""
        self.num_hits = 0
        """Tokens of them that were found."""

    @property
    def num_usable(self) -> int:
        """Blocks of all groups that sequences can own."""
        return sum(pool.num_usable for pool in self._pools)

    @property
    def num_free(self) -> int:
        """Blocks of all groups that can be handed out, cached ones included."""
        return sum(pool.num_free for pool in self._pools)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own in the fullest group, 0 to 1. At 1 a sequence that grows preempts."""
        return max(pool.usage for pool in self._pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, num_tokens: int, *, chunk: int | None = None, use_cache: bool = True) -> bool:
        """Give a waiting sequence the cached blocks of its prefix, if all of its `num_tokens` would fit beside them.

        Sets `tables`, `prefix` and `num_computed`. Returns False, and changes nothing, if there is no room.

        Args:
            sequence: a sequence that owns no blocks.
            num_tokens: length that is to fit.
            chunk: most tokens of a step; behind a window, no more must fit at once. None for all of them.
            use_cache: look for cached blocks.
        """
        found = self.match_prefix(sequence.tokens, sequence.adapter_id) if use_cache else []
        computed = len(found) * self.block_size
        tables = []
        for pool in self._pools:
            first = first_block(computed, pool.window, self.block_size)
            shared = [prefix.blocks[pool.group] for prefix in found[first:]]
            idle = sum(pool.references[block] == 0 for block in shared)
            most = most_blocks(num_tokens, pool.window, chunk, self.block_size)
            if most - len(shared) > pool.num_free - idle:
                return False
            tables.append([*[0] * first, *shared])
        for pool, table in zip(self._pools, tables, strict=True):
            for block in filter(None, table):
                pool.share(block)
        sequence.tables = tables
        self._hold(sequence, found[-1] if found else self._prefixes.root(sequence.adapter_id))
        sequence.num_computed = computed
        if use_cache and self.enable_prefix_caching:
            self.num_queries += len(sequence.tokens)
            self.num_hits += computed
        return True

    def grow(
        self, sequence: Sequence, num_tokens: int, *, first: int | None = None
    ) -> tuple[tuple[int, ...], ...] | None:
        """Append blocks until the sequence's tables hold `num_tokens`, after giving back those behind the windows.

        Args:
            sequence: a sequence that owns blocks.
            num_tokens: length that its tables are to hold.
            first: first token that the step computes of it; `num_computed` if None.

        Returns:
            By new place in the tables, the block of each group. None if there are too few: nothing was appended.
        """
        needed = self.blocks_for(num_tokens) - len(sequence.tables[0])
        if needed <= 0:
            return ()
        # The step that is in flight may read these blocks still. They are written to by the next one at the earliest.
        for pool in self._windowed:
            attended = first_block(sequence.num_computed if first is None else first, pool.window, self.block_size)
            self._give_back(pool, sequence.tables[pool.group], attended)
        for pool in self._pools:
            if needed > pool.num_free:
                return None
        new = [[pool.take() for _ in range(needed)] for pool in self._pools]
        for table, blocks in zip(sequence.tables, new, strict=True):
            table.extend(blocks)
        return tuple(zip(*new, strict=True))

    def register(self, sequence: Sequence) -> None:
        """Put the sequence's full, computed blocks of known tokens into the prefix cache."""
        before = prefix = sequence.prefix
        if not self.enable_prefix_caching or prefix is None:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
        while prefix.length < full:
            at = prefix.length
            prefix = self._prefixes.next(prefix, sequence.tokens)
            for pool, table in zip(self._pools, sequence.tables, strict=True):
                # Another sequence's block may hold the same tokens already; or this one is behind the window.
                if table[at] and not prefix.blocks[pool.group]:
                    pool.cache(table[at], prefix)
        if prefix is not before:
            self._hold(sequence, prefix)

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back. Ends of prefixes are evicted before their beginnings."""
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            self._give_back(pool, table, len(table))
        sequence.tables = []
        sequence.num_computed = 0
        self._hold(sequence, None)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        for pool in self._pools:
            pool.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants, given all sequences that own blocks.

        Raises:
            AssertionError: naming the first block that breaks one.
        """
        sequences = list(sequences)
        for pool in self._pools:
            pool.check(sequence.tables[pool.group] for sequence in sequences)
            for sequence in sequences:
                table = sequence.tables[pool.group]
                first = first_block(sequence.num_computed, pool.window, self.block_size)
                assert len(table) * self.block_size >= sequence.num_computed, f"{sequence} has too few blocks"
                assert all(table[first:]), f"{sequence} gave back a block that it attends to"
                assert len(table) == len(sequence.tables[0]), f"{sequence} has tables of different lengths"
                for block in table[sequence.num_computed // self.block_size :]:
                    assert pool.references[block] == 1, f"block {block} is shared and writable"

    def match_prefix(self, tokens: abc.Sequence[int], adapter: int | None = None) -> list[Prefix]:
        """Prefixes of 1, 2, ... n blocks of a text: the most after which all that is attended to is cached.

        They are those that the same adapter computed. The last token is left out: it is always computed.
        """
        if not self.enable_prefix_caching:
            return []
        found: list[Prefix] = []
        usable = 0
        missing = [0] * len(self._pools)  # by group: length of the last prefix that has no block
        root = self._prefixes.root(adapter)
        for prefix in self._prefixes.along(root, tokens, (len(tokens) - 1) // self.block_size):
            found.append(prefix)
            ends = True
            for pool in self._pools:
                if not prefix.blocks[pool.group]:
                    missing[pool.group] = prefix.length
                first = first_block(prefix.length * self.block_size, pool.window, self.block_size)
                ends = ends and missing[pool.group] <= first
            if ends:
                usable = prefix.length
        return found[:usable]

    def _give_back(self, pool: BlockPool, table: list[int], count: int) -> None:
        """Give back the first `count` blocks of a table that were not given back before, the last of them first."""
        for i in range(count - 1, -1, -1):
            if not table[i]:
                return
            pool.give_back(table[i])
            table[i] = 0

    def _hold(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """Set the prefix that a sequence goes on from, which stays as long."""
        before, sequence.prefix = sequence.prefix, prefix
        if prefix is not None:
            prefix.uses += 1
        if before is not None:
            self._prefixes.drop_use(before)
