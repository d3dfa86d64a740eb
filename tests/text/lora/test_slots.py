"""Slots of adapters: shared by the sequences of one, kept after them, taken from the one that was used longest ago."""

import pytest

from tests.support.sequences import make_sequence
from verax.text.engine.blocks import BlockManager
from verax.text.engine.scheduler import Scheduler
from verax.text.features.lora import AdapterSlots, LoadedAdapter, LoRARequest


def test_sequences_of_one_adapter_share_its_slot():
    slots = AdapterSlots(2)
    assert slots.acquire(7) == slots.acquire(7)
    assert slots.acquire(8) != slots.acquire(7)
    slots.check({7: 3, 8: 1})


def test_there_is_no_room_for_another_while_all_slots_are_in_use():
    slots = AdapterSlots(1)
    slots.acquire(7)
    slots.acquire(7)
    slots.release(7)
    assert slots.has_room(7)
    assert not slots.has_room(8)
    slots.release(7)
    assert slots.has_room(8)


def test_an_unused_adapter_stays_until_its_slot_is_needed_the_oldest_first():
    slots = AdapterSlots(2)
    places = {number: slots.acquire(number) for number in (7, 8)}
    for number in (8, 7):
        slots.release(number)
    assert slots.acquire(9) == places[8]
    assert slots.acquire(7) == places[7]
    slots.check({9: 1, 7: 1})


@pytest.fixture
def scheduler():
    return Scheduler(BlockManager([40], 4), max_num_seqs=8, max_num_batched_tokens=32, max_loras=1)


def add(scheduler, name, adapter=None):
    sequence = make_sequence(range(5), name=name)
    if adapter is not None:
        sequence.request.adapter = LoadedAdapter(LoRARequest(name, adapter, name), {})
    scheduler.add(sequence)
    return sequence


def test_a_sequence_waits_while_running_ones_use_all_slots_and_so_do_those_behind_it(scheduler):
    first, second, third = add(scheduler, "a", 1), add(scheduler, "b", 2), add(scheduler, "c")
    plan = scheduler.schedule()
    assert plan.admitted == [first]
    assert plan.adapted
    scheduler.finish(first)
    assert scheduler.schedule().admitted == [second, third]
    assert (second.adapter_slot, third.adapter_slot) == (0, None)
    scheduler.check()


def test_a_preempted_sequence_gives_its_slot_back(scheduler):
    sequence = add(scheduler, "a", 1)
    scheduler.schedule()
    scheduler._preempt(sequence)
    assert sequence.adapter_slot is None
    assert scheduler.adapters.has_room(2)
    scheduler.check()


def test_a_step_of_the_base_model_alone_is_not_adapted(scheduler):
    add(scheduler, "a")
    assert not scheduler.schedule().adapted
