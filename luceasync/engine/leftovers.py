"""What a step has left in lanes until its tokens are told: prefixes to keep, then lanes to free.

Owns what is still to be done there. What is worth keeping is for `prefixes` to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from luceasync.engine.generation import Generation
from luceasync.engine.lanes import ALL_HERE, Lanes
from luceasync.engine.roster import Roster
from luceasync.keeping.prefixes import Prefixes
from luceasync.request import Speculation


class Leftovers:
    """Nothing may change a lane before `clear` was called."""

    def __init__(self, prefixes: Prefixes, roster: Roster, lanes: Lanes = ALL_HERE) -> None:
        self._lanes = lanes
        self._prefixes = prefixes
        self._roster = roster
        self._prefilled: deque[Callable[[], None]] = deque()
        self._ended: deque[tuple[Generation, bool]] = deque()  # and whether to keep it
        self.are_told = False  # nobody waits for the tokens of what is left

    def __bool__(self) -> bool:
        return bool(self._prefilled or self._ended)

    def prefilled(self, generation: Generation, end: int, logits: Tensor | None) -> None:
        """The lane stands after the prompt's first `end` tokens; `logits` after its last one."""
        lane, lease = generation.lane, generation.lease
        assert lane is not None
        self._prefilled.append(partial(self._prefixes.prefilled, lease, lane, end, logits))

    def ended(self, generation: Generation) -> None:
        """It runs no more; its lane is free once what is in it has been kept."""
        self._ended.append((generation, generation.is_sound))

    def gave_way(self, generation: Generation, speculation: Speculation | None) -> None:
        """It leaves its lane to somebody else, and waits for another one: what the lane holds is
        kept, and taken up again then.
        """
        lane, lease = generation.lane, generation.lease
        assert lane is not None
        try:
            self._prefixes.finished(lease, lane, generation.num_committed)
        finally:
            try:
                self._lanes.vacate(lane)
            finally:
                generation.leave_lane(speculation)
                self._roster.wait_again(generation)
                self._roster.free(lane)
                self._prefixes.release(lease)
                self._prefixes.admit(generation.lease)

    def distrust(self) -> None:
        """A step has failed: nothing of what it left is kept."""
        self._prefilled.clear()
        self._ended = deque((generation, False) for generation, _ in self._ended)

    def told(self) -> None:
        """The ends have gone out; nothing, where they have left nothing."""
        self.are_told = bool(self)

    def clear(self) -> None:
        """Keep what is to be kept, and free the lanes of those that have ended."""
        self.are_told = False
        while self._prefilled:
            self._prefilled.popleft()()
        while self._ended:
            self._leave(*self._ended.popleft())

    def _leave(self, generation: Generation, is_kept: bool) -> None:
        lane = generation.lane
        assert lane is not None
        try:
            if not is_kept:
                self._prefixes.disown(generation.lease)
            elif not generation.is_restoring:
                is_cut = generation.prepared.detokenizer.stopped
                end = generation.num_committed
                self._prefixes.finished(generation.lease, lane, end, is_cut=is_cut)
        finally:  # a lane that could not be kept, or told of it, is free all the same
            try:
                self._lanes.vacate(lane)
            finally:
                generation.lane = None
                self._roster.free(lane)
                self._prefixes.release(generation.lease)
