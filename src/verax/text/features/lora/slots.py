"""Adapter slots: which adapters are on the device, and how many running sequences use each."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["AdapterSlots"]


class AdapterSlots:
    """Slots by number. One that no sequence uses keeps its adapter until another needs it, least recently used first.

    Args:
        num_slots: adapters that a step can use.
    """

    def __init__(self, num_slots: int):
        self._slots: dict[int, int] = {}
        """Slot of each adapter that has one, by the adapter's number."""
        self._references: dict[int, int] = {}
        """Running sequences of each adapter in use."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Adapters that have a slot and no sequence, the one that was used longest ago first."""
        self._free = list(range(num_slots - 1, -1, -1))

    def has_room(self, adapter: int) -> bool:
        """True if a sequence of this adapter could run now."""
        return adapter in self._slots or bool(self._free or self._idle)

    def acquire(self, adapter: int) -> int:
        """Count one more sequence of an adapter that there is room for; its slot."""
        if adapter not in self._slots:
            if self._free:
                slot = self._free.pop()
            else:
                evicted, _ = self._idle.popitem(last=False)
                slot = self._slots.pop(evicted)
            self._slots[adapter] = slot
        self._idle.pop(adapter, None)
        self._references[adapter] = self._references.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: int) -> None:
        """Count one sequence of an adapter less."""
        self._references[adapter] -= 1
        if not self._references[adapter]:
            del self._references[adapter]
            self._idle[adapter] = None

    def check(self, running: dict[int, int]) -> None:
        """Assert the invariants, given the number of running sequences of each adapter.

        Raises:
            AssertionError: if they do not hold.
        """
        assert self._references == running, f"adapters are used by {running}, and {self._references} are counted"
        assert sorted(self._slots) == sorted([*self._references, *self._idle]), "an adapter has a slot and no state"
        taken = [*self._slots.values(), *self._free]
        assert len(set(taken)) == len(taken), "two adapters share a slot"
