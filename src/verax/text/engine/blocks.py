"""Blocks of the paged cache: cache groups, the prefixes that full blocks hold, and the owners of each block.

After nano-vllm's `block_manager.py` and vLLM's prefix cache and hybrid KV cache manager, with two differences: a cached
block is found by its tokens themselves and the prefix before it, so that no hash collision can mix prompts up; and
block 0 is never handed out, because it takes the writes of padding.

The layers of a model are in one or more cache groups, each with blocks and block tables of its own: layers with the
same sliding window share a table. Block i of a table holds the same tokens in every group. Blocks that lie entirely
before the window of every token to come are given back: their places in the table are 0. A query at position i sees the
keys j with i - window < j <= i, as transformers counts.

In models with recurrent layers a prefix is continued from the state that it left. States are kept where texts are
likely to part: at the last full block of a prompt, and where a prompt parts from an earlier text. A state is a row of
an array on the device; the least recently used one is replaced.

The host counts blocks; `verax.ops` calls the same rows of the cache pages. Block i is page i.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, abc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from verax.text.engine.request import Sequence

WINDOW_FRACTION = 0.5
"""Part of the memory beyond one whole sequence that windows take before full attention does. Short sequences fill both
alike, long ones almost only full attention: either gets at least half of what a division made for it would hold."""

LEAST_KEPT = 128
"""Tokens of the shortest prefix whose recurrent state is kept: the rest of the prompt takes a step of its own, which
costs as much as some 32 tokens (`scheduler.STEP_OVERHEAD`)."""


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


def most_blocks(num_tokens: int, window: int | None, chunk: int, block_size: int) -> int:
    """Most blocks that a sequence of `num_tokens` owns at once, if a step computes at most `chunk` of them."""
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    # The tokens of a step, the chunk and the window before it, may begin at the last token of a block.
    return min(blocks, (window - 1 + chunk + block_size - 2) // block_size + 1)


@dataclass(frozen=True)
class CachePlan:
    """Division of memory among cache groups."""

    windows: tuple[int | None, ...]
    block_bytes: tuple[int, ...]
    """Bytes of a block of each group, over its layers."""
    block_size: int
    chunk: int
    """Most tokens of a step."""

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the cache of one sequence, with the blocks that take the writes of padding."""
        blocks = self._blocks(num_tokens, self.chunk)
        return sum((1 + count) * size for count, size in zip(blocks, self.block_bytes, strict=True))

    def longest(self, memory: int, limit: int, slots: Callable[[int], int]) -> int:
        """Blocks of the longest sequence, of at most `limit` tokens, that fits; -1 if not even padding's do.

        `memory`: bytes for its blocks, and for what `slots` says that its length takes too. `slots`: further bytes for
        a number of tokens, which grow with it.
        """

        def needed(blocks: int) -> int:
            return self.bytes_for(blocks * self.block_size) + slots(blocks * self.block_size)

        return bisect.bisect_right(range(-(-limit // self.block_size) + 1), memory, key=needed) - 1

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


@dataclass(eq=False, slots=True)
class Prefix:
    """Tokens from the beginning of a text to the end of a full block."""

    before: Prefix | None
    """The prefix without the last block; None for the empty one."""
    tokens: tuple[int, ...]
    length: int
    """Number of blocks."""
    blocks: list[int]
    """Block of each cache group that holds `tokens` after the prefix before them; 0 if none does."""
    state: int | None = None
    """Row of the recurrent state that the prefix has left; None if it is not kept."""
    uses: int = 0
    """Number of those blocks and the state, of prefixes that are a block longer, and of sequences that continue it."""


class PrefixTree:
    """Prefixes by their tokens themselves, so that no collision of hashes can mix texts up.

    A prefix stays while a block, a longer prefix or a sequence uses it: with a sliding window, the end of a text may be
    in the cache when its beginning is not.
    """

    def __init__(self, num_groups: int, block_size: int):
        self._roots: dict[int | None, Prefix] = {}
        self._num_groups = num_groups
        self._block_size = block_size
        self._longer: dict[tuple[Prefix, tuple[int, ...]], Prefix] = {}
        self.version = 0
        """Changes whenever another block holds a prefix, or none does any more."""

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
        """The prefixes of a text of 1, 2, ... `length` blocks that follow a root, up to the first that is missing."""
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


class BlockPool:
    """Blocks by number. Block 0 is never handed out: it takes the writes of padding.

    `prefixes`: prefixes of the texts that the blocks of all groups hold. `window`: sliding window of the group's
    layers, in tokens; None for full attention.
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
        self._tree.version += 1

    def reset(self) -> None:
        """Forget what every block holds."""
        for block in range(len(self._prefixes)):
            self._forget(block)

    def _forget(self, block: int) -> None:
        prefix = self._prefixes[block]
        if prefix is not None:
            prefix.blocks[self.group] = 0
            self._prefixes[block] = None
            self._tree.version += 1
            self._tree.drop_use(prefix)


class StatePool:
    """Rows of kept recurrent states by number. The least recently used one is replaced."""

    def __init__(self, prefixes: PrefixTree, num_rows: int):
        self._tree = prefixes
        self._rows: OrderedDict[int, Prefix | None] = OrderedDict((row, None) for row in range(num_rows))

    def use(self, prefix: Prefix) -> int:
        """Row of a prefix's kept state, which becomes the most recently used one."""
        assert prefix.state is not None
        self._rows.move_to_end(prefix.state)
        return prefix.state

    def keep(self, prefix: Prefix) -> int:
        """Row for the state that a prefix has left, which has none yet."""
        row = next(iter(self._rows))
        self._forget(row)
        self._rows[row] = prefix
        self._rows.move_to_end(row)
        prefix.state = row
        prefix.uses += 1
        self._tree.version += 1
        return row

    def reset(self) -> None:
        """Forget every state."""
        for row in self._rows:
            self._forget(row)

    def _forget(self, row: int) -> None:
        prefix, self._rows[row] = self._rows[row], None
        if prefix is not None:
            prefix.state = None
            self._tree.version += 1
            self._tree.drop_use(prefix)


class BlockManager:
    """Allocation with reference counts, a prefix cache over full blocks, and least recently used eviction.

    Invariants: a block is free exactly if no table lists it; its reference count is the number
    of tables that list it; only full blocks are cached, so a block that is still written to has one owner; a table
    lists every block that tokens to come attend to.

    `num_blocks`: blocks of each cache group, block 0 included. `windows`: sliding window of each group; None for full
    attention. `num_states`: rows for recurrent states that prefixes left; None for a model without.
    """

    def __init__(
        self,
        num_blocks: abc.Sequence[int],
        block_size: int,
        *,
        windows: abc.Sequence[int | None] = (None,),
        enable_prefix_caching: bool = True,
        num_states: int | None = None,
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
        self._held: dict[Sequence, Prefix] = {}
        """Full blocks of each sequence that owns some, as far as they are registered."""
        self._windowed = [pool for pool in self._pools if pool.window is not None]
        self._states = StatePool(self._prefixes, num_states) if num_states and enable_prefix_caching else None
        self.num_queries = 0
        """Tokens of admitted sequences that were looked up in the prefix cache."""
        self.num_hits = 0
        """Tokens of them that were found."""

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own in the fullest group, 0 to 1. At 1 a sequence that grows preempts."""
        return max(pool.usage for pool in self._pools)

    def find_room(self, sequence: Sequence, num_tokens: int, *, chunk: int) -> list[Prefix] | None:
        """The cached prefixes of a waiting sequence, if the rest of its `num_tokens` would fit too; None if not.

        `chunk`: most tokens of a step; with a window, no more must fit at once.
        """
        prefixes = self.match_prefix(sequence)
        computed = len(prefixes) * self.block_size
        for pool in self._pools:
            first = first_block(computed, pool.window, self.block_size)
            shared = [prefix.blocks[pool.group] for prefix in prefixes[first:]]
            idle = sum(pool.references[block] == 0 for block in shared)
            needed = most_blocks(num_tokens, pool.window, chunk, self.block_size)
            if needed - len(shared) > pool.num_free - idle:
                return None
        return prefixes

    def admit(self, sequence: Sequence, prefixes: list[Prefix]) -> None:
        """Give a waiting sequence the blocks of the cached prefixes that `find_room` has found for it.

        Sets `tables` and `num_computed`.
        """
        computed = len(prefixes) * self.block_size
        sequence.tables = []
        for pool in self._pools:
            first = first_block(computed, pool.window, self.block_size)
            table = [*[0] * first, *(prefix.blocks[pool.group] for prefix in prefixes[first:])]
            for block in filter(None, table):
                pool.share(block)
            sequence.tables.append(table)
        self._hold(sequence, prefixes[-1] if prefixes else self._prefixes.root(sequence.adapter_id))
        sequence.num_computed = computed
        if self._states is not None:
            parting = sequence.matched[2] if sequence.matched is not None else 0
            ends = sorted({parting, (len(sequence.tokens) - 1) // self.block_size})
            borders = [length * self.block_size for length in ends]
            sequence.state_borders = [border for border in borders if border > computed and border >= LEAST_KEPT]
        if sequence.uses_cache and self.enable_prefix_caching:
            self.num_queries += len(sequence.tokens)
            self.num_hits += computed

    def grow(
        self, sequence: Sequence, num_tokens: int, *, first: int | None = None
    ) -> tuple[tuple[int, ...], ...] | None:
        """Append blocks until the sequence's tables hold `num_tokens`, after giving back blocks before the windows.

        `first`: first token that the step computes of it; `num_computed` if None.

        Returns:
            By new place in the tables, the block of each group. None if there are too few: nothing was appended.
        """
        needed = -(-num_tokens // self.block_size) - len(sequence.tables[0])
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
        before = prefix = self._held.get(sequence)
        if not self.enable_prefix_caching or prefix is None:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // self.block_size
        while prefix.length < full:
            at = prefix.length
            prefix = self._prefixes.next(prefix, sequence.tokens)
            for pool, table in zip(self._pools, sequence.tables, strict=True):
                # Another sequence's block may hold the same tokens already; or this one is before the window.
                if table[at] and not prefix.blocks[pool.group]:
                    pool.cache(table[at], prefix)
        if prefix is not before:
            self._hold(sequence, prefix)

    def state_to_restore(self, prefix: Prefix) -> int | None:
        """Row of the state that a prefix has left; None in a model without states."""
        return None if self._states is None else self._states.use(prefix)

    def state_to_keep(self, sequence: Sequence) -> Prefix | None:
        """The registered prefix of a sequence if its computed tokens end where the state is to be kept, else None."""
        borders = sequence.state_borders
        if self._states is None or not borders or sequence.num_computed < borders[0]:
            return None
        border, prefix = borders.pop(0), self._held[sequence]
        return prefix if border == sequence.num_computed == prefix.length * self.block_size else None

    def keep_state(self, prefix: Prefix) -> int | None:
        """Row into which the state that a prefix has left is to be copied; None if it is kept already."""
        assert self._states is not None
        if prefix.state is None:
            return self._states.keep(prefix)
        self._states.use(prefix)
        return None

    def release(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back. Ends of prefixes are evicted before their beginnings."""
        self.register(sequence)  # the newest tokens have become known since the last plan
        for pool, table in zip(self._pools, sequence.tables, strict=True):
            self._give_back(pool, table, len(table))
        sequence.tables = []
        sequence.num_computed = 0
        self._hold(sequence, None)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        for pool in self._pools:
            pool.reset()
        if self._states is not None:
            self._states.reset()

    def match_prefix(self, sequence: Sequence) -> list[Prefix]:
        """Prefixes of 1, 2, ... n blocks of a sequence: the most after which all that is attended to is cached.

        In models with recurrent layers the state after the last one is kept too. The same adapter computed them. The
        last token is left out: it is always computed. The sequence keeps them until the tree changes, so that one that
        waits is not compared in every step.
        """
        if not self.enable_prefix_caching or not sequence.uses_cache:
            return []
        tokens = sequence.tokens
        state = self._prefixes.version, len(tokens)
        if sequence.matched is not None and sequence.matched[0] == state:
            return sequence.matched[1]
        prefixes: list[Prefix] = []
        usable = parting = 0
        missing = [0] * len(self._pools)  # by group: length of the last prefix that has no block
        root = self._prefixes.root(sequence.adapter_id)
        for prefix in self._prefixes.along(root, tokens, (len(tokens) - 1) // self.block_size):
            prefixes.append(prefix)
            ends = True
            for pool in self._pools:
                if not prefix.blocks[pool.group]:
                    missing[pool.group] = prefix.length
                first = first_block(prefix.length * self.block_size, pool.window, self.block_size)
                ends = ends and missing[pool.group] <= first
            if ends:
                parting = prefix.length
                usable = usable if self._states is not None and prefix.state is None else parting
        sequence.matched = state, prefixes[:usable], parting
        return prefixes[:usable]

    def _give_back(self, pool: BlockPool, table: list[int], count: int) -> None:
        """Give back the first `count` blocks of a table that were not given back before, the last of them first."""
        for i in range(count - 1, -1, -1):
            if not table[i]:
                return
            pool.give_back(table[i])
            table[i] = 0

    def _hold(self, sequence: Sequence, prefix: Prefix | None) -> None:
        """Set the prefix that a sequence continues, which stays as long; None to let go of it."""
        before = self._held.pop(sequence, None)
        if prefix is not None:
            prefix.uses += 1
            self._held[sequence] = prefix
        if before is not None:
            self._prefixes.drop_use(before)
