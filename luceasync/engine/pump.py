"""The engine thread's half: generations on lanes, one step at a time.

Combines scheduler, lanes, steps and outbox. Synchronous; does not know threads, event loops or
clients: it receives commands, and returns the deltas that a step produced.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from luceasync.engine.admission import Capacity
from luceasync.engine.decoding import LaneDecoding
from luceasync.engine.lanes import LaneContents
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.scheduler import Scheduler, StepKind
from luceasync.engine.sequence import Generation
from luceasync.engine.steps import Steps, begin_answer
from luceasync.engine.streams import DeltaOutbox, Emitted
from luceasync.errors import DisplacedFromQueue
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.request import ErrorKind, FinishReason

# Where a failure occurred: in a pass of one of the two kinds, in the work around passes, or in a
# command.
During = Literal["prefill", "decode", "between", "command"]

Deliver = Callable[[list[Emitted]], None]
Chosen = Callable[[Generation], bool]
Command = Callable[["Pump"], list[Emitted] | None]  # its return value is to be delivered

IDLE_PAUSE_S = 1.0
# The longest that a prefix waits to be saved while an answer's end is being delivered.
DELIVERY_PAUSE_S = 0.02
# How long a lane waits to be saved after that: while a device works on the next request, saving
# takes no time from it.
LINGER_S = 0.003
LINGER_TOKENS = 256  # the longest prompt for which it does: it delays longer ones but little


@dataclass(frozen=True, slots=True)
class Fault:
    """What clients are told about an exception, and what the engine was doing when it was
    raised."""

    words: str
    kind: ErrorKind
    during: During


class Pump:
    """Runs generations. `step` does one prefill chunk or one decode step for all decoding lanes."""

    def __init__(
        self,
        target: LayerSplitBackend,
        decoding: LaneDecoding,
        prefixes: PrefixCache,
        *,
        num_lanes: int,
        chunk_tokens: int,
        runs_async: bool = False,
        synchronize: Callable[[], None] = lambda: None,
        quiet: threading.Event | None = None,
        lanes: Paging,
    ) -> None:
        """`runs_async`: devices compute while the host goes on. The tokens of a step are then
        delivered during the next one: otherwise their readers would take the interpreter just when
        that step is to be queued. `synchronize`: see Steps. `quiet` is set after there has been
        nothing to do for IDLE_PAUSE_S. `lanes`: which parts of lanes are on the devices."""
        self._runs_async = runs_async
        self._quiet, self._was_idle = quiet or threading.Event(), False
        self._num_lanes = num_lanes
        self._outbox = DeltaOutbox()
        self.scheduler = Scheduler(num_lanes)
        self.lanes = LaneContents(prefixes, lanes, self.scheduler.free)
        self.steps = Steps(target, decoding, chunk_tokens=chunk_tokens, synchronize=synchronize)
        self._num_completed = Counter[StepKind]()
        self._is_lane_awaited = False  # a lane is taken from its choice after the next step
        self._empty_lane: int | None = None  # a free lane that need not be emptied again
        self._at_hand: list[Generation] = []  # these fail if the work in progress on them raises
        self.doing: During = "between"  # now, or when the last step failed

    def __repr__(self) -> str:
        return f"Pump({self.scheduler})"

    @property
    def pause_s(self) -> float:
        """How long steps would have nothing to do unless a command arrives."""
        if self.scheduler.has_work:
            return 0.0
        if self.lanes.has_deferred:
            return self._delivery_pause_s
        return 0.0 if self.lanes.prefixes.has_due_writes else IDLE_PAUSE_S

    @property
    def _delivery_pause_s(self) -> float:
        """How long saves wait: for the delivery of an end, then for the next request."""
        delivered_at_s = self.lanes.delivered_at_s
        if delivered_at_s is None:
            return DELIVERY_PAUSE_S
        lingers = self._runs_async and self.lanes.is_late
        until_s = delivered_at_s + (LINGER_S if lingers else 0.0)
        return max(0.0, until_s - time.perf_counter())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until a command arrives."""
        return self.pause_s == IDLE_PAUSE_S

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def num_completed(self, during: During) -> int:
        """How many completed passes show that a failure `during` has been overcome: passes of its
        kind, or of any kind if it was outside of passes."""
        if during == "prefill" or during == "decode":
            return self._num_completed[during]
        return self._num_completed.total()

    def listen(self, post: Callable[[Command], None]) -> None:
        """Register for the completion of copies; `post`, which any thread may call, runs a command
        before a step."""
        self.lanes.prefixes.listen(lambda call: post(lambda pump: call()))

    # --- commands ------------------------------------------------------------------------------

    def submit(
        self, prepared: Sequence[PreparedChoice], capacity: Capacity | None = None
    ) -> list[Emitted]:
        """Queue the choices of a request. If over capacity, evict from the client that holds
        most.
        """
        self._quiet.clear()
        self._was_idle = False
        self._at_hand = [Generation(choice) for choice in prepared]
        self.scheduler.enqueue(self._at_hand)  # first: if one fails, its client is informed
        for generation in self._at_hand:
            self.lanes.prefixes.admit(generation.lease)
        self._at_hand = []
        return [] if capacity is None else self._evict(capacity)

    def set_unread(self, stream_id: int, *, is_unread: bool) -> None:
        """The stream's client has stopped reading, or reads again. While it does not read, its
        choices get no tokens, and other choices may take their lanes."""
        self.scheduler.set_unread(stream_id, is_unread=is_unread)

    def cancel(self, stream_id: int) -> list[Emitted]:
        """End every choice of the stream, in whatever state it is; its lanes are free when this
        returns."""
        self.lanes.release_deferred()
        self._end(lambda g: g.prepared.stream_id == stream_id, "cancelled", None)
        self.lanes.release_deferred()
        return self._outbox.take()

    def save_all(self) -> None:
        """Save what has ended, and hand over to the disk everything that belongs there."""
        self.lanes.release_deferred()
        self.lanes.prefixes.hand_over(wait=True)

    def end_all(self, words: str) -> list[Emitted]:
        """Cancel everything, and write to the disk what is worth keeping for the next start."""
        self.lanes.release_deferred()
        self._end(lambda g: True, "cancelled", words)
        self.save_all()
        return self._outbox.take()

    # --- after a failure -----------------------------------------------------------------------

    def fail_all(self, error: str, kind: ErrorKind = "failed") -> list[Emitted]:
        """End everything with an error. Saves nothing and reads no lane, so that every client is
        informed, whatever a step has raised."""
        self._fail(lambda g: True, error, kind)
        return self._outbox.take()

    def give_up(self, fault: Fault, back_in_s: int) -> list[Emitted]:
        """End everything for good: running generations with the fault, waiting ones with the advice
        to retry in `back_in_s` seconds."""
        self._fail(self.scheduler.running.__contains__, fault.words, fault.kind)
        self._fail(lambda g: True, fault.words, "unavailable", back_in_s)
        return self._outbox.take()

    def recover(self, fault: Fault) -> list[Emitted]:
        """End the running generations after a step or a command has raised; the queue stays. If
        this raises too, what it could not deliver is returned by the next call of this method or of
        `fail_all`. Nothing runs before `begin_again`."""
        self.doing = "between"
        ended = {*self.scheduler.running, *self._at_hand}
        self._at_hand = []
        if fault.during == "command":  # it may have brought what these wait for
            ended.update(g for g in self.scheduler.waiting if g.lease.awaited)
        self._fail(ended.__contains__, fault.words, fault.kind)
        return self._outbox.take()

    def begin_again(self) -> None:
        """Reset every lane to its initial state. Raises what a reset raises."""
        self._empty_lane = None
        for lane in range(self._num_lanes):
            self.steps.empty(lane)

    def _fail(self, chosen: Chosen, error: str, kind: ErrorKind, retry_after_s: int = 1) -> None:
        self.lanes.distrust()
        self._outbox.drop_undetokenized()
        self._end(chosen, "error", error, kind, retry_after_s)
        self.lanes.release_deferred()

    # --- a step --------------------------------------------------------------------------------

    def step(self, deliver: Deliver | None = None) -> list[Emitted]:
        """Give free lanes to waiting choices, then run the next step. Returns what is to be
        delivered now; the tokens of a step may be held back and passed to `deliver` while a device
        works on the decode step that follows. `deliver` None: nothing is held back."""
        if not self._may_linger(deliver):
            self.lanes.release_deferred()
        self.lanes.prefixes.hand_over()
        if self.scheduler.waiting:
            self._preempt()
            self._assign_lanes()
        restoring, prefilling, decoding = self.scheduler.partition()
        if restoring:
            self._end_restores(restoring)
            _, prefilling, decoding = self.scheduler.partition()
        step = self.scheduler.next_step(len(prefilling), len(decoding))
        if step != "decode":
            self.lanes.save_deferred()
        is_held_back = step == "decode" and self._runs_async and deliver is not None
        if self._outbox and not is_held_back:
            return self._outbox.take()
        if step == "idle":
            self.lanes.release_deferred()
            self._rest()
            return []
        self.doing, begin = step, time.perf_counter()
        if step == "prefill":
            self._prefill(self.scheduler.next_prefill(prefilling), deliver)
        else:
            alone = not prefilling and not self._is_lane_awaited
            self.steps.decode(decoding, alone=alone, meanwhile=lambda: self._meanwhile(deliver))
            self.lanes.save_deferred()
            self._is_lane_awaited = False
            ended = (g for g in self.scheduler.running if g.has_ended)  # unread ones too
            self._advanced(dict.fromkeys([*decoding, *ended]))
        seconds = time.perf_counter() - begin
        self.scheduler.account(step, seconds, both=bool(prefilling and decoding))
        if step == "prefill":
            is_held_back = len(prefilling) == 1 and self._may_save_late(deliver)
        emitted = [] if is_held_back and not self._outbox.has_end else self._outbox.take()
        self._num_completed[step] += 1
        self.doing = "between"
        return emitted

    def _may_linger(self, deliver: Deliver | None) -> bool:
        """Whether what is deferred may wait for the next decode step: that step comes soon, and
        nothing that waits needs the lanes, or what they hold."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        if not (self._runs_async and deliver is not None and self.lanes.is_late):
            return False
        if waiting:
            needed = self.lanes.has_prompts or self.scheduler.first_free_lane is None
            if needed or any(self.lanes.is_wanted(g.lease) for g in waiting):
                return False
        coming = [len(g.to_prefill) - g.num_prefilled for g in (*waiting, *running)]
        return 0 < max(coming, default=0) <= LINGER_TOKENS or any(g.is_decoding for g in running)

    def _may_save_late(self, deliver: Deliver | None) -> bool:
        """Whether prompts may be saved while the device works on the next decode step: none that
        waits could use them."""
        return self._runs_async and deliver is not None and not self.scheduler.waiting

    def _meanwhile(self, deliver: Deliver | None) -> None:
        """The device works on a step, and the host would wait: do some of what is deferred."""
        if deliver is None:
            return
        deliver(self._outbox.take())
        if self.lanes.has_prompts:
            self.lanes.save_deferred()
        elif self.lanes.has_deferred:
            self.lanes.release_deferred()
            self._empty_ahead()

    def _prefill(self, generation: Generation, deliver: Deliver | None) -> None:
        is_late = self._may_save_late(deliver) and self.lanes.may_save_late(generation)

        def queued(end: int, logits: Tensor | None) -> None:
            self.lanes.save_later(generation, end, logits, is_late=is_late and logits is not None)
            if logits is not None and self._runs_async and not is_late:
                self.lanes.save_deferred()  # costs nothing while the device computes

        if self.steps.prefill(generation, queued, fetches=self._runs_async, is_late=is_late):
            self._advanced([generation])
        if generation.num_prefilled == generation.lease.num_prompt_tokens:
            begin, end = generation.num_cached, generation.num_prefilled
            self.lanes.prefixes.observe_prefill(begin, end, generation.prefill_s)

    def _preempt(self) -> None:
        """Take a lane from a client that has had more than others, or that does not read. A lane
        whose next round is already in flight stays until its tokens are read; no further round is
        queued early then."""
        generation = self.scheduler.to_preempt(self._can_start)
        if generation is not None and generation.is_ahead and not generation.is_unread:
            self._is_lane_awaited = True
        elif generation is not None:
            speculation = self.steps.decoding.speculation(generation.on_lane)
            try:
                self.lanes.preempt(generation, speculation)
            finally:
                self.scheduler.requeue(generation)

    def _assign_lanes(self) -> None:
        """Clients take turns; a generation that waits for a prefix to arrive does not hold up
        others."""
        if self.scheduler.first_free_lane is not None:
            for generation in self.scheduler.in_turn():
                lane = self.scheduler.first_free_lane
                if lane is None:
                    break
                if self._can_start(generation):
                    self._at_hand = [generation]
                    self._empty(lane)
                    self._empty_lane = None
                    self.lanes.start(generation, lane)
                    self.scheduler.assign(generation, lane)
                    self._at_hand = []
        self.scheduler.pass_over()

    def _can_start(self, generation: Generation) -> bool:
        self._at_hand = [generation]
        can_start = self.lanes.can_start(generation, self.scheduler.running)
        self._at_hand = []
        return can_start

    def _end_restores(self, restoring: Iterable[Generation]) -> None:
        """Continue the generations whose prefix has arrived."""
        for generation in restoring:
            if self.lanes.prefixes.has_restored(generation.lease):
                generation.is_restoring = False
                if generation.lease.logits is not None:
                    begin_answer(generation, generation.lease.logits)
                    self._advanced([generation])

    def _empty(self, lane: int) -> None:
        """Empty a free lane for the next choice."""
        if lane != self._empty_lane:
            self.steps.empty(lane)
            self._empty_lane = lane

    def _empty_ahead(self) -> None:
        """Empty the lane of the next request, so that it need not wait for that."""
        lane = self.scheduler.first_free_lane
        if self._runs_async and lane is not None:
            self._empty(lane)

    def _rest(self) -> None:
        """There is nothing to do now; perhaps there was nothing at the last step either."""
        self._empty_ahead()
        if self._was_idle:
            self._quiet.set()
        self._was_idle = not self.scheduler.waiting and not self.scheduler.running

    # --- ends ----------------------------------------------------------------------------------

    def _advanced(self, generations: Iterable[Generation]) -> None:
        """The generations have received tokens, or have ended; ended ones leave their lanes."""
        for generation in generations:
            if not generation.has_ended:
                self._outbox.advanced(generation)
                continue
            lane = generation.on_lane
            speculation = self.steps.decoding.speculation(lane)
            self._outbox.ended(generation, speculation, self.lanes.paging.residence(lane))
            self.scheduler.retire(generation)
            self.lanes.release_later(generation)

    def _evict(self, capacity: Capacity) -> list[Emitted]:
        """End the requests for which there is no place beside the others."""
        streams = self.scheduler.streams_to_evict(capacity.num_places)
        if not streams:
            return []
        later_s = capacity.retry_after_s
        words = str(DisplacedFromQueue(later_s))
        self._end(lambda g: g.prepared.stream_id in streams, "error", words, "gave_way", later_s)
        return self._outbox.take()

    def _end(
        self,
        chosen: Chosen,
        reason: FinishReason,
        error: str | None,
        kind: ErrorKind = "failed",
        retry_after_s: int = 1,
    ) -> None:
        self._outbox.detokenize()  # first, since an end that is a failure shows no more text
        for generation in [g for g in self.scheduler.running if chosen(g)]:
            generation.end(reason, error, kind, retry_after_s)
            self._advanced([generation])
        for generation in [g for g in self.scheduler.waiting if chosen(g)]:
            self.scheduler.withdraw(generation)
            generation.end(reason, error, kind, retry_after_s)
            self._outbox.advanced(generation)
            self.lanes.prefixes.release(generation.lease)
