"""Who waits for a lane, who has one, and which lanes are free.

Owns these three, and nothing of what happens on a lane: generations are moved as it is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from luceasync.engine.generation import Generation


class Roster:
    """`waiting` in order of their coming, `running` in the order in which they got their lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._free_lanes = list(range(num_lanes))
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._passed_over: set[Generation] = set()  # they wait, and not for the disk

    def __repr__(self) -> str:
        num_decoding = len(self.parted()[2])
        return (
            f"{len(self.waiting)} waiting, {len(self.running) - num_decoding} prefilling, "
            f"{num_decoding} decoding, {len(self._free_lanes)} lanes free"
        )

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do for one of them, as far as is known here."""
        for g in self.running:
            if not g.is_restoring or g.lease.has_arrived:
                return True
        waiting = [g for g in self.waiting if not g.lease.awaited]
        if self.running:  # who was passed over waits for those, or for a lane of theirs
            waiting = [g for g in waiting if g not in self._passed_over]
        return bool(waiting)

    @property
    def first_free_lane(self) -> int | None:
        """The lowest, so that few lanes use few rows; None: all are taken."""
        return self._free_lanes[0] if self._free_lanes else None

    def parted(self) -> tuple[list[Generation], list[Generation], list[Generation]]:
        """Of those that run: who is being restored, who prefills, who decodes."""
        restoring: list[Generation] = []
        prefilling: list[Generation] = []
        decoding: list[Generation] = []
        for generation in self.running:
            if generation.last_token is not None:
                decoding.append(generation)
            elif generation.is_restoring:
                restoring.append(generation)
            else:
                prefilling.append(generation)
        return restoring, prefilling, decoding

    def queue(self, generations: Iterable[Generation]) -> None:
        """They wait for lanes."""
        self.waiting.extend(generations)

    def give_up(self, generation: Generation) -> None:
        """It waits no more."""
        self.waiting.remove(generation)

    def seat(self, generation: Generation, lane: int) -> None:
        """One of those that wait runs on `lane`, which was free."""
        self.waiting.remove(generation)
        self._free_lanes.remove(lane)
        self.running.append(generation)

    def pass_over(self) -> None:
        """Who still waits, and not for the disk, has no better chance before a lane is free."""
        self._passed_over = {g for g in self.waiting if not g.lease.awaited}

    def let_go(self, generation: Generation) -> None:
        """It runs no more; its lane is not free yet."""
        self.running.remove(generation)

    def free(self, lane: int) -> None:
        """Nothing that is in the lane is needed any more."""
        self._free_lanes.append(lane)
        self._free_lanes.sort()
        self._passed_over.clear()
