"""Blocks of the paged cache: their owners, and the full ones that a later prompt can share.

After nano-vllm's `block_manager.py` and vLLM's prefix cache, with two differences: a cached block is found by its
tokens themselves and the id of the prefix before it, so that no hash collision can mix prompts up; and block 0 is never
handed out, it takes the writes of padding.

The host counts blocks; `verax.ops` calls the same rows of the cache pages. Block i is page i.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Iterable
from dataclasses import dataclass

from verax.text.sequence import Sequence

__all__ = ["BlockManager"]

EMPTY_PREFIX = 0
"""Id of the empty prefix."""


@dataclass
class _Block:
    references: int = 0
    key: tuple[int, tuple[int, ...]] | None = None
    """(id of the prefix before it, tokens) if the block is in the prefix cache."""


class BlockManager:
    """Allocation with reference counts, a prefix cache over full blocks, and least recently used eviction.

    Invariants (`check` asserts them): a block is free exactly if no table lists it; its reference count is the number
    of tables that list it; only full blocks are cached, so a block that is still written to has one owner.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a cache needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_usable = num_blocks - 1
        self._blocks = [_Block() for _ in range(num_blocks)]
        # Free blocks, the one that was given back longest ago first. Cached ones stay findable until they are taken.
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, num_blocks))
        self._cached: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (prefix id, block)
        self._next_prefix_id = EMPTY_PREFIX + 1
        self.num_queries = 0
        """Tokens of admitted sequences that were looked up in the prefix cache."""
        self.num_hits = 0
        """Tokens of them that were found."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own, 0 to 1."""
        return 1 - self.num_free / self.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, num_tokens: int, *, use_cache: bool = True) -> bool:
        """Give a waiting sequence the cached blocks of its prefix, if all of its `num_tokens` would fit beside them.

        Sets `blocks`, `prefix_ids` and `num_computed`. Returns False, and changes nothing, if there is no room.
        """
        found = list(self.match_prefix(sequence.tokens)) if use_cache else []
        shared = [block for _, block in found]
        idle = sum(self._blocks[block].references == 0 for block in shared)
        if self.blocks_for(num_tokens) - len(shared) > self.num_free - idle:
            return False
        for block in shared:
            self._take(block)
        sequence.blocks = shared
        sequence.prefix_ids = [prefix_id for prefix_id, _ in found]
        sequence.num_computed = len(shared) * self.block_size
        if use_cache and self.enable_prefix_caching:
            self.num_queries += len(sequence.tokens)
            self.num_hits += sequence.num_computed
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Append blocks until the sequence's table holds `num_tokens`; the new ones, or None (nothing changed)."""
        needed = self.blocks_for(num_tokens) - len(sequence.blocks)
        if needed > self.num_free:
            return None
        new = []
        for _ in range(needed):
            block = next(iter(self._free))
            self._forget(block)
            self._take(block)
            new.append(block)
        sequence.blocks.extend(new)
        return new

    def register(self, sequence: Sequence) -> None:
        """Put the sequence's full, computed blocks of known tokens into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
        for i in range(len(sequence.prefix_ids), full):
            before = sequence.prefix_ids[-1] if sequence.prefix_ids else EMPTY_PREFIX
            key = (before, tuple(sequence.tokens[i * self.block_size : (i + 1) * self.block_size]))
            if key not in self._cached:
                self._cached[key] = (self._next_prefix_id, sequence.blocks[i])
                self._blocks[sequence.blocks[i]].key = key
                self._next_prefix_id += 1
            # Another sequence's block may hold the same tokens already: its prefix id is taken then.
            sequence.prefix_ids.append(self._cached[key][0])

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back. Ends of prefixes are evicted before their beginnings."""
        for block in reversed(sequence.blocks):
            record = self._blocks[block]
            record.references -= 1
            if record.references == 0:
                self._free[block] = None
        sequence.blocks = []
        sequence.prefix_ids = []
        sequence.num_computed = 0

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        for _, block in self._cached.values():
            self._blocks[block].key = None
        self._cached.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants, given all sequences that own blocks.

        Raises:
            AssertionError: naming the first block that breaks one.
        """
        uses = [0] * len(self._blocks)
        for sequence in sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"{sequence} lists a block twice"
            assert len(sequence.blocks) * self.block_size >= sequence.num_computed, f"{sequence} has too few blocks"
            for i, block in enumerate(sequence.blocks):
                uses[block] += 1
                writable = (i + 1) * self.block_size > sequence.num_computed
                assert not (writable and self._blocks[block].references > 1), f"block {block} is shared and writable"
        assert uses[0] == 0, "block 0 was handed out"
        for block, record in enumerate(self._blocks[1:], start=1):
            assert record.references == uses[block], (
                f"block {block}: {record.references} references, {uses[block]} uses"
            )
            assert (block in self._free) == (record.references == 0), f"block {block} is free and used, or neither"
            if record.key is not None:
                assert self._cached[record.key][1] == block, f"block {block} is cached under another block's tokens"
        for key, (_, block) in self._cached.items():
            assert self._blocks[block].key == key, f"the cache points at block {block}, which holds something else"

    def match_prefix(self, tokens: abc.Sequence[int]) -> Iterable[tuple[int, int]]:
        """(prefix id, block) of each cached block along `tokens`, without the last token, which is always computed."""
        if not self.enable_prefix_caching:
            return
        prefix_id = EMPTY_PREFIX
        for i in range((len(tokens) - 1) // self.block_size):
            found = self._cached.get((prefix_id, tuple(tokens[i * self.block_size : (i + 1) * self.block_size])))
            if found is None:
                return
            prefix_id, _ = found
            yield found

    def _take(self, block: int) -> None:
        self._free.pop(block, None)
        self._blocks[block].references += 1

    def _forget(self, block: int) -> None:
        key = self._blocks[block].key
        if key is not None:
            del self._cached[key]
            self._blocks[block].key = None
