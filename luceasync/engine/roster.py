"""Who waits for a lane, who has one, and which lanes are free.

Owns these three and whose turn it was last, and nothing of what happens on a lane: generations are
moved as it is told.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from luceasync.engine.fairness import (
    MAX_STANDING_S,
    Held,
    Seat,
    by_priority,
    gives_way,
    goes_round,
    in_turn,
    turned_out,
)
from luceasync.engine.generation import Generation

MAX_ASKED = 8  # of those that wait, whether they could begin: each looks through the prefix tree


class Roster:
    """`waiting` in order of their coming, `running` in the order in which they got their lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._free_lanes = list(range(num_lanes))
        self.waiting: list[Generation] = []
        self.running: list[Generation] = []
        self._passed_over: set[Generation] = set()  # they wait, and not for the disk
        self._heir: Generation | None = None  # who gets the lane that one of its client's left
        self._last_turn: dict[str, int] = {}  # by client, of those that are here
        self._num_turns = 0

    def __repr__(self) -> str:
        num_decoding = sum(g.is_decoding for g in self.running)
        return (
            f"{len(self.waiting)} waiting, {len(self.running) - num_decoding} prefilling, "
            f"{num_decoding} decoding, {len(self._free_lanes)} lanes free"
        )

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do for one of them, as far as is known here."""
        for g in self.running:
            if g.lease.has_arrived if g.is_restoring else not (g.is_unread and g.is_decoding):
                return True
        waiting = self._eligible()
        if self.running:  # who was passed over waits for those, or for a lane of theirs
            waiting = [g for g in waiting if g not in self._passed_over]
        return bool(waiting)

    @property
    def first_free_lane(self) -> int | None:
        """The lowest, so that few lanes use few rows; None: all are taken."""
        return self._free_lanes[0] if self._free_lanes else None

    def parted(self) -> tuple[list[Generation], list[Generation], list[Generation]]:
        """Of those that run: who is being restored, who prefills, who decodes and is read."""
        restoring: list[Generation] = []
        prefilling: list[Generation] = []
        decoding: list[Generation] = []
        for generation in self.running:
            if generation.last_token is not None:
                if not generation.is_unread:
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
        if generation is self._heir:
            self._heir = None

    def seat(self, generation: Generation, lane: int) -> None:
        """One of those that wait runs on `lane`, which was free."""
        self.give_up(generation)
        self._free_lanes.remove(lane)
        self.running.append(generation)
        present = {g.prepared.client for g in (*self.waiting, *self.running)}
        self._last_turn = {c: turn for c, turn in self._last_turn.items() if c in present}
        self._last_turn[generation.prepared.client] = self._num_turns
        self._num_turns += 1

    def pass_over(self) -> None:
        """Who still waits, and not for the disk, has no better chance before a lane is free."""
        self._passed_over = set(self._eligible())

    def wait_again(self, generation: Generation) -> None:
        """It runs no more, and waits for another lane; its own is not free yet."""
        self.running.remove(generation)
        self.waiting.insert(0, generation)

    def read(self, stream_id: int, *, is_behind: bool) -> None:
        """The stream's client does not read what it is sent, or does so again."""
        for generation in (*self.running, *self.waiting):
            if generation.prepared.stream_id == stream_id:
                generation.is_unread = is_behind
        self._passed_over.clear()

    def let_go(self, generation: Generation) -> None:
        """It runs no more; its lane is not free yet."""
        self.running.remove(generation)

    def free(self, lane: int) -> None:
        """Nothing that is in the lane is needed any more."""
        self._free_lanes.append(lane)
        self._free_lanes.sort()
        self._passed_over.clear()

    # --- between clients: see luceasync.engine.fairness ----------------------------------------

    def in_turn(self) -> list[Generation]:
        """Those that may have a lane, in the order in which they get one: what a client says of its
        own requests changes nothing between clients.
        """
        waiting = self._eligible()
        if len(waiting) < 2:  # nearly always
            return waiting
        wanted = [(g.prepared.client, g.prepared.priority) for g in waiting]
        eligible = [waiting[i] for i in by_priority(wanted)]
        clients = [g.prepared.client for g in eligible]
        order = [eligible[i] for i in in_turn(clients, self._num_lanes_of(), self._last_turn)]
        return sorted(order, key=lambda g: g is not self._heir)

    def gives_way(self, can_begin: Callable[[Generation], bool]) -> Generation | None:
        """Who leaves its lane to somebody who waits and `can_begin`, while none is free."""
        if self._free_lanes or not (eligible := self._eligible()):
            return None
        decoding = [g for g in self.running if g.is_decoding]
        seats = [_seat(g) for g in decoding]
        waiting = {g.prepared.client for g in eligible}
        chosen = gives_way(seats, self._num_lanes_of(), waiting)
        if chosen is not None:
            ready = self._first_ready(can_begin)
            chosen = gives_way(seats, self._num_lanes_of(), ready)
        if chosen is None:
            standing = self._standing(eligible)
            chosen = goes_round(seats, standing)
            heir = None if chosen is None else standing[seats[chosen].client]
            self._heir = heir if heir is not None and can_begin(heir) else None
            chosen = None if self._heir is None else chosen
        return None if chosen is None else decoding[chosen]

    def _first_ready(self, can_begin: Callable[[Generation], bool]) -> set[str]:
        """The client of the first of those that wait who would begin on a lane at once, of as many
        as are worth asking now.
        """
        asked = self.in_turn()[:MAX_ASKED]
        return {g.prepared.client for g in [*islice(filter(can_begin, asked), 1)]}

    def _standing(self, waiting: Iterable[Generation]) -> dict[str, Generation]:
        """By client, who left a lane long ago: who came last waits first."""
        now = time.monotonic()
        return {
            g.prepared.client: g
            for g in waiting
            if g.left_at is not None and now - g.left_at >= MAX_STANDING_S
        }

    def turned_out(self, num_places: int) -> set[int]:
        """The streams that have to go so that the others have a place."""
        if len(self.running) + len(self.waiting) <= num_places:
            return set()
        return set(turned_out(self._held(), num_places))

    def _held(self) -> list[Held]:
        """The requests that are here, in order of their coming."""
        by_stream: dict[int, list[Generation]] = {}
        for generation in (*self.running, *self.waiting):
            by_stream.setdefault(generation.prepared.stream_id, []).append(generation)
        return [
            Held(
                stream_id,
                choices[0].prepared.client,
                len(choices),
                is_waiting=all(g.lane is None for g in choices),
                is_unread=choices[0].is_unread,
            )
            for stream_id, choices in sorted(by_stream.items())
        ]

    def _eligible(self) -> list[Generation]:
        """Who could use a lane now: its client reads, and nothing of it is awaited."""
        return [g for g in self.waiting if not g.lease.awaited and not g.is_unread]

    def _num_lanes_of(self) -> Counter[str]:
        return Counter(g.prepared.client for g in self.running)


def _seat(g: Generation) -> Seat:
    """What its lane is to one that decodes."""
    num_run = g.num_prefilled - g.num_cached
    return Seat(g.prepared.client, g.is_unread, g.num_in_turn, num_run, g.turn_s, g.prefill_s)
