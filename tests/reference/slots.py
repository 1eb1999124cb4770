"""Slots of experts with the least recently used one leaving, step by step: the slow truth."""

from __future__ import annotations

from collections.abc import Iterable


class LruSlots:
    """Which expert is in which slot. Of slots that were used at the same time the lowest number
    leaves first.
    """

    def __init__(self, num_slots: int) -> None:
        self.expert_of: list[int | None] = [None] * num_slots
        self._used = [-1] * num_slots
        self._now = 0
        self.counts = {"hits": 0, "misses": 0, "read through": 0}

    def take(self, experts: Iterable[int]) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """A pass with these experts: the slot of each that has one, and which were copied there."""
        needed, slot_of, fills = sorted(set(experts)), {}, []
        for expert in needed:
            if expert in self.expert_of:
                slot_of[expert] = self.expert_of.index(expert)
                self._used[slot_of[expert]] = self._now
                self.counts["hits"] += 1
        for expert in needed:
            if expert in slot_of:
                continue
            free = [slot for slot, used in enumerate(self._used) if used < self._now]
            if not free:
                self.counts["read through"] += 1
                continue
            slot = min(free, key=lambda each: (self._used[each], each))
            self.expert_of[slot], self._used[slot] = expert, self._now
            slot_of[expert] = slot
            fills.append((expert, slot))
            self.counts["misses"] += 1
        self._now += 1
        return slot_of, fills
