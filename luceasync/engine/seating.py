"""Who gets a free lane, and who leaves one to somebody that waits: done as the roster says.

Owns the restoring into lanes. Knows no steps and nothing of what is told.
"""

from __future__ import annotations

from luceasync.engine.decoding import Decoding
from luceasync.engine.generation import Generation
from luceasync.engine.lanes import ALL_HERE, Lanes
from luceasync.engine.leftovers import Leftovers
from luceasync.engine.roster import Roster
from luceasync.engine.steps import Prefiller
from luceasync.keeping.prefixes import Prefixes


class Seating:
    """Moves generations of the roster to lanes and away from them."""

    def __init__(
        self,
        target: Prefiller,
        decoding: Decoding,
        prefixes: Prefixes,
        roster: Roster,
        leftovers: Leftovers,
        lanes: Lanes = ALL_HERE,
    ) -> None:
        self._lanes = lanes
        self._target = target
        self._decoding = decoding
        self._prefixes = prefixes
        self._roster = roster
        self._leftovers = leftovers
        self.at_hand: Generation | None = None  # it waits, and ends with what is being done

    def make_way(self) -> None:
        """Who has had more than others, or is not read, leaves its lane to one that waits."""
        generation = self._roster.gives_way(self._can_begin)
        if generation is not None:
            assert generation.lane is not None
            self._leftovers.gave_way(generation, self._decoding.speculation(generation.lane))

    def assign_lanes(self) -> None:
        """Clients in turn; but whoever waits for what is still to come holds up nobody."""
        if self._roster.first_free_lane is not None:
            for generation in self._roster.in_turn():
                if self._roster.first_free_lane is None:
                    break
                self._assign(generation, self._roster.first_free_lane)
        self._roster.pass_over()

    def _assign(self, generation: Generation, lane: int) -> None:
        if not self._can_begin(generation):
            return
        self.at_hand = generation
        self._target.reset(lane)
        self._lanes.pin(lane, generation.prepared.pins)
        self._decoding.start(lane)
        generation.start(lane, self._prefixes.take_up(generation.lease, lane))
        self._roster.seat(generation, lane)
        self.at_hand = None

    def _can_begin(self, generation: Generation) -> bool:
        """Whether a lane would be of use to it now; what it lacks is ordered."""
        self.at_hand = generation
        prefilling = (g.lease for g in self._roster.running if not g.is_decoding)
        is_ready = self._prefixes.prepare(generation.lease, prefilling)
        self.at_hand = None
        return is_ready
