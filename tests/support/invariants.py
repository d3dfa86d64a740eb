"""Invariants of an engine's scheduler, blocks and slots of adapters, asserted on their own state."""

from collections import Counter

from verax.text.engine.blocks import first_block


def check_engine(engine):
    """Assert the invariants of the scheduler and of what it gives away."""
    check_scheduler(engine.scheduler)


def check_scheduler(scheduler):
    check_blocks(scheduler.blocks, scheduler.running)
    check_adapters(scheduler.adapters, Counter(s.adapter_id for s in scheduler.running if s.adapter_id is not None))
    slots = [sequence.slot for sequence in scheduler.running if sequence.slot is not None]
    assert len(slots) == len(scheduler.running), "a running sequence has no slot"
    assert len(set(slots)) == len(slots), "two running sequences share a slot"
    assert sorted([*scheduler._free_slots, *slots]) == list(range(scheduler.max_num_seqs)), "a slot was lost"
    assert scheduler.num_waiting_tokens == sum(s.num_prompt for s in scheduler.waiting), "a prompt was miscounted"
    for sequence in scheduler.waiting:
        assert not sequence.tables, f"{sequence} waits with blocks"
        assert sequence.slot is None, f"{sequence} waits with a slot"
    for sequence in scheduler.running:
        assert 0 <= sequence.num_computed <= sequence.num_tokens, f"{sequence} computed tokens that do not exist"


def check_blocks(blocks, sequences):
    """Assert the invariants of a block manager, given all sequences that own blocks."""
    for pool in blocks._pools:
        _check_pool(pool, [sequence.tables[pool.group] for sequence in sequences])
        for sequence in sequences:
            table = sequence.tables[pool.group]
            first = first_block(sequence.num_computed, pool.window, blocks.block_size)
            assert len(table) * blocks.block_size >= sequence.num_computed, f"{sequence} has too few blocks"
            assert all(table[first:]), f"{sequence} gave back a block that it attends to"
            assert len(table) == len(sequence.tables[0]), f"{sequence} has tables of different lengths"
            for block in table[sequence.num_computed // blocks.block_size :]:
                assert pool.references[block] == 1, f"block {block} is shared and writable"


def _check_pool(pool, tables):
    owned = [[block for block in table if block] for table in tables]
    assert all(len(set(blocks)) == len(blocks) for blocks in owned), f"one of {tables} lists a block twice"
    uses = Counter(block for blocks in owned for block in blocks)
    for block, references in enumerate(pool.references):
        assert references == uses[block], f"block {block}: {references} references, {uses[block]} uses"
        free = block in pool._free
        assert free == (block != 0 and references == 0), f"block {block} is free and used, or neither"
        prefix = pool._prefixes[block]
        assert prefix is None or prefix.blocks[pool.group] == block, f"block {block} is cached as another one"


def check_adapters(slots, running):
    """Assert the invariants of slots, given the number of running sequences of each adapter."""
    assert slots._references == running, f"adapters are used by {running}, and {slots._references} are counted"
    assert sorted(slots._slots) == sorted([*slots._references, *slots._idle]), "an adapter has a slot and no state"
    taken = [*slots._slots.values(), *slots._free]
    assert len(set(taken)) == len(taken), "two adapters share a slot"
