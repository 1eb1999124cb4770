"""What lanes hold: restored from the prefix cache when a generation starts, saved when it leaves.

Owns what is still to be saved and freed after a step. The prefix cache decides what is worth
keeping, the scheduler which lane is next.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from luceasync.engine.sequence import Generation
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.lease import Lease
from luceasync.request import Speculation


@dataclass(frozen=True, slots=True, eq=False)
class _PromptSave:
    """The lane of `generation` holds its prompt's first `end` tokens; `logits`: those after the
    last one. `is_late`: decode steps change none of this."""

    generation: Generation
    end: int
    logits: Tensor | None
    is_late: bool


class LaneContents:
    """Saves and releases are deferred until the tokens of the step have been delivered: a lane must
    not change before `release_deferred` is called."""

    def __init__(self, prefixes: PrefixCache, paging: Paging, free: Callable[[int], None]) -> None:
        """`free` is called with each lane whose contents are no longer needed."""
        self.prefixes = prefixes
        self.paging = paging
        self._free = free
        self._saves: deque[_PromptSave] = deque()
        self._ended: deque[tuple[Generation, bool]] = deque()  # and whether to save it
        # When the clients had received the tokens of everything deferred; None: not yet.
        self.delivered_at_s: float | None = None

    @property
    def has_deferred(self) -> bool:
        return bool(self._saves or self._ended)

    # --- at the start --------------------------------------------------------------------------

    def can_start(self, generation: Generation, running: Iterable[Generation]) -> bool:
        """Whether the generation could use a lane now. Nodes on the disk are ordered; if another
        prefill will soon save tokens that it needs, it waits for them."""
        prefilling = (g.lease for g in running if not g.is_decoding)
        return self.prefixes.prepare(generation.lease, prefilling)

    def start(self, generation: Generation, lane: int) -> None:
        """Queue the restore into an empty lane."""
        self.paging.pin(lane, generation.prepared.pins)
        generation.start(lane, self.prefixes.restore(generation.lease, lane))

    # --- deferred ------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether all that is deferred can be done as well after a few steps of other lanes, and
        prompts that are to be saved after decode steps of their own."""
        return all(save.is_late for save in self._saves) and all(
            self._is_whole(generation) for generation, _ in self._ended
        )

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is still to be saved."""
        return bool(self._saves)

    def may_save_late(self, generation: Generation) -> bool:
        """Whether its prompt can be saved as well after a few decode steps of its lane."""
        return self._is_whole(generation) and self.prefixes.can_save_late(generation.lease)

    def _is_whole(self, generation: Generation) -> bool:
        return self.paging.residence(generation.on_lane) is None

    def is_wanted(self, lease: Lease) -> bool:
        """Whether a lane that is to be saved holds more tokens of the lease's prompt than any
        node has."""
        return any(
            generation.lease.tenant == lease.tenant and generation.lease.has_unsaved(lease.sequence)
            for generation, _ in self._ended
        )

    def save_later(
        self, generation: Generation, end: int, logits: Tensor | None, *, is_late: bool = False
    ) -> None:
        """Its lane holds the prompt's first `end` tokens; `logits`: those after the last one.
        `is_late`: the save may wait while decode steps run; `logits` is on the host then."""
        self._saves.append(_PromptSave(generation, end, logits, is_late))

    def release_later(self, generation: Generation) -> None:
        """The generation has ended; its lane is free once it has been saved."""
        self._ended.append((generation, generation.is_sound))

    def delivered(self) -> None:
        """The last deltas have been delivered. No-op if nothing is deferred."""
        self.delivered_at_s = time.perf_counter() if self.has_deferred else None

    def distrust(self) -> None:
        """A step has failed: save nothing that it left on lanes."""
        self._saves.clear()
        self._ended = deque((generation, False) for generation, _ in self._ended)

    def release_deferred(self) -> None:
        """Save what is deferred, and free the lanes of ended generations. A save that raises is not
        retried by the next call."""
        self.delivered_at_s = None
        self.save_deferred()
        while self._ended:
            self._leave(*self._ended.popleft())

    def save_deferred(self) -> None:
        """Save the prompts that are deferred. A save that raises is not retried."""
        while self._saves:
            save = self._saves.popleft()
            generation = save.generation
            self.prefixes.save_prompt(generation.lease, generation.on_lane, save.end, save.logits)

    def _leave(self, generation: Generation, is_saved: bool) -> None:
        lane, lease = generation.on_lane, generation.lease
        try:
            if not is_saved:
                self.prefixes.drop(lease)
            elif not generation.is_restoring:
                self.prefixes.save_sequence(
                    lease,
                    lane,
                    generation.num_committed,
                    is_cut=generation.prepared.detokenizer.stopped,
                    is_ahead=generation.is_ahead,
                )
        finally:  # the lane is free even if it could not be saved
            try:
                self.paging.vacate(lane)
            finally:
                generation.lane = None
                self._free(lane)
                self.prefixes.release(lease)

    # --- at once -------------------------------------------------------------------------------

    def preempt(self, generation: Generation, speculation: Speculation | None) -> None:
        """Save what the lane holds, so that it can be restored into the next one, and free it.
        `speculation`: the figures of this lane."""
        lane, lease = generation.on_lane, generation.lease
        try:
            is_ahead = generation.is_ahead
            self.prefixes.save_sequence(lease, lane, generation.num_committed, is_ahead=is_ahead)
        finally:
            try:
                self.paging.vacate(lane)
            finally:
                generation.leave_lane(speculation)
                self._free(lane)
                self.prefixes.release(lease)
                self.prefixes.admit(generation.lease)
