"""The engine thread's half: generations on lanes, one step at a time.

Puts roster, steps, outbox, leftovers and balance together. Synchronous, and knows no threads,
loops or clients: it is told what to submit and cancel, and says which deltas came of a step. What
of a prompt need not be run, and what is kept of it, is for `prefixes` to say.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from luceasync.engine.admission import Room
from luceasync.engine.decoding import Decoding
from luceasync.engine.faults import During, Fault
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.scheduler import Balance, Roster, Step, next_prefill
from luceasync.engine.sequence import Generation
from luceasync.engine.steps import Leftovers, Prefiller, Steps, begin_answer
from luceasync.engine.streams import Emitted, Outbox
from luceasync.errors import GaveWay
from luceasync.pipeline.paging import Paging
from luceasync.prefix_cache.cache import Prefixes
from luceasync.request import ErrorKind, FinishReason

# Who gets a free lane, and who leaves one to somebody that waits: done as the roster says. Owns
# the restoring into lanes. Knows no steps and nothing of what is told.


class Seating:
    """Moves generations of the roster to lanes and away from them."""

    def __init__(
        self,
        target: Prefiller,
        decoding: Decoding,
        prefixes: Prefixes,
        roster: Roster,
        leftovers: Leftovers,
        lanes: Paging,
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


Tell = Callable[[list[Emitted]], None]
Chosen = Callable[[Generation], bool]
Command = Callable[["Pump"], list[Emitted] | None]  # what it returns is to be told

IDLE_PAUSE_S = 1.0
LEAVING_PAUSE_S = 0.02  # in which an answer's end goes out, at most, before its prefix is kept


class Pump:
    """Runs generations. `step` does one prefill chunk or one decode step for all decoding lanes."""

    def __init__(
        self,
        target: Prefiller,
        decoding: Decoding,
        prefixes: Prefixes,
        *,
        num_lanes: int,
        chunk_tokens: int,
        computes_beside: bool = False,
        synchronize: Callable[[], None] = lambda: None,
        quiet: threading.Event | None = None,
        lanes: Paging,
    ) -> None:
        """`computes_beside`: devices compute while the host goes on. What a step gave is then told
        during the next one: whoever listens wants the interpreter just when that is to be queued.
        `synchronize` waits until the device that gives the logits is done. `quiet` is set while
        there has been nothing to do for IDLE_PAUSE_S. `lanes`: what of them is on devices.
        """
        self._computes_beside = computes_beside
        self._quiet, self._was_idle = quiet or threading.Event(), False
        self._target = target
        self.decoding = decoding
        self.prefixes = prefixes
        self._num_lanes = num_lanes
        self.roster = Roster(num_lanes)
        self._outbox, self.lanes = Outbox(), lanes
        self._leftovers = Leftovers(prefixes, self.roster, lanes)
        self.ends_are_told = self._leftovers.told  # whoever listens has had the last deltas
        self._seating = Seating(target, decoding, prefixes, self.roster, self._leftovers, lanes)
        self.steps = Steps(
            target,
            decoding,
            prefixes,
            self._leftovers,
            chunk_tokens=chunk_tokens,
            computes_beside=computes_beside,
            synchronize=synchronize,
        )
        self._balance, self._num_completed = Balance(), Counter[Step]()
        self._submitted: list[Generation] = []  # while they are: they end with that
        self.doing: During = "between"  # at this moment, or when the last step has failed

    def __repr__(self) -> str:
        return f"Pump({self.roster})"

    @property
    def pause_s(self) -> float:
        """How long a step would do nothing unless a command comes before."""
        if self.roster.has_work:
            return 0.0
        if self._leftovers and not self._leftovers.are_told:
            return LEAVING_PAUSE_S
        return 0.0 if self._leftovers or self.prefixes.has_due_writes else IDLE_PAUSE_S

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do before a command comes."""
        return self.pause_s == IDLE_PAUSE_S

    @property
    def num_waiting(self) -> int:
        return len(self.roster.waiting)

    @property
    def num_running(self) -> int:
        return len(self.roster.running)

    def num_completed(self, during: During) -> int:
        """How many passes have been completed that show that a failure `during` has passed: of its
        kind, or of any kind where it was in none.
        """
        if during == "prefill" or during == "decode":
            return self._num_completed[during]
        return self._num_completed.total()

    def listen(self, post: Callable[[Command], None]) -> None:
        """Hear of what ends elsewhere: `post`, of any thread, has a command run before a step."""
        self.prefixes.listen(lambda call: post(lambda pump: call()))

    # --- commands ------------------------------------------------------------------------------

    def submit(self, prepared: Sequence[PreparedChoice], room: Room | None = None) -> list[Emitted]:
        """Queue the choices of a request. Where that is more than there is room for, who holds
        most makes some.
        """
        self._quiet.clear()
        self._was_idle = False
        self._submitted = [Generation(choice) for choice in prepared]
        self.roster.queue(self._submitted)  # first: whoever fails is told so
        for generation in self._submitted:
            self.prefixes.admit(generation.lease)
        self._submitted = []
        return [] if room is None else self._turn_out(room)

    def read(self, stream_id: int, *, is_behind: bool) -> None:
        """The stream's client leaves unread what it is sent, or reads again: meanwhile its choices
        get no more tokens, and their lanes are there for others.
        """
        self.roster.read(stream_id, is_behind=is_behind)

    def cancel(self, stream_id: int) -> list[Emitted]:
        """End every choice of the stream, wherever it is; its lanes are free when this returns."""
        self._leftovers.clear()
        self._end(lambda g: g.prepared.stream_id == stream_id, "cancelled", None)
        self._leftovers.clear()
        return self._outbox.take()

    def keep_all(self) -> None:
        """Keep what has ended, and hand over all that the disk is to have of what was kept."""
        self._leftovers.clear()
        self.prefixes.hand_over(wait=True)

    def end_all(self, words: str) -> list[Emitted]:
        """Cancel everything, and write what is worth it: the next start takes it up."""
        self._leftovers.clear()
        self._end(lambda g: True, "cancelled", words)
        self.keep_all()
        return self._outbox.take()

    # --- after a failure -----------------------------------------------------------------------

    def fail_all(self, error: str, kind: ErrorKind = "failed") -> list[Emitted]:
        """End everything with an error; nothing of it is kept, and no lane is looked at: whatever
        a step raised, this tells everybody.
        """
        self._fail(lambda g: True, error, kind)
        return self._outbox.take()

    def give_up(self, fault: Fault, back_in_s: int) -> list[Emitted]:
        """End everything, since this pump does nothing any more: who ran is told of the fault, who
        waited may come back in so many seconds.
        """
        self._fail(self.roster.running.__contains__, fault.words, fault.kind)
        self._fail(lambda g: True, fault.words, "unavailable", back_in_s)
        return self._outbox.take()

    def recover(self, fault: Fault) -> list[Emitted]:
        """End what ran when a step or a command has raised; what waits goes on waiting. What cannot
        be told because this raises is told by the next call, of this or `fail_all`. Nothing runs
        before `begin_again`.
        """
        self.doing = "between"
        ended = {*self.roster.running, *self._submitted}
        if self._seating.at_hand is not None:
            ended.add(self._seating.at_hand)
        self._submitted, self._seating.at_hand = [], None
        if fault.during == "command":  # it may have been the one that these wait for
            ended.update(g for g in self.roster.waiting if g.lease.awaited)
        self._fail(ended.__contains__, fault.words, fault.kind)
        return self._outbox.take()

    def begin_again(self) -> None:
        """Make every lane as if nothing had run on it. Raises what a reset raises."""
        for lane in range(self._num_lanes):
            self._target.reset(lane)
            self.decoding.start(lane)

    def _fail(self, chosen: Chosen, error: str, kind: ErrorKind, retry_after_s: int = 1) -> None:
        self._leftovers.distrust()
        self._outbox.leave_unread()
        self._end(chosen, "error", error, kind, retry_after_s)
        self._leftovers.clear()

    # --- a step --------------------------------------------------------------------------------

    def step(self, tell: Tell | None = None) -> list[Emitted]:
        """Give free lanes to waiting choices, then do what is due. Returns what is to be told now;
        what a decode step gave may be held back and be given to `tell` while a device works on the
        next one. None: nothing is held back.
        """
        self._leftovers.clear()
        self.prefixes.hand_over()
        if self.roster.waiting:
            self._seating.make_way()
            self._seating.assign_lanes()
        restoring, prefilling, decoding = self.roster.parted()
        if restoring:
            self._end_restores(restoring)
            _, prefilling, decoding = self.roster.parted()
        step = self._balance.next_step(len(prefilling), len(decoding))
        is_told_later = step == "decode" and self._computes_beside and tell is not None
        if self._outbox and not is_told_later:
            return self._outbox.take()
        if step == "idle":
            self._rest()
            return []
        self.doing, begin = step, time.perf_counter()
        if step == "prefill":
            chosen = prefilling[next_prefill([g.has_spoken for g in prefilling])]
            has_more = self.steps.prefill(chosen)
            self._advanced([chosen] if has_more else [])
        else:
            meanwhile = nothing if tell is None else lambda: tell(self._outbox.take())
            self.steps.decode(decoding, alone=not prefilling, meanwhile=meanwhile)
            self._advanced(decoding)
        seconds = time.perf_counter() - begin
        self._balance.account(step, seconds, both=bool(prefilling and decoding))
        told = [] if is_told_later and not self._outbox.has_end else self._outbox.take()
        self._num_completed[step] += 1
        self.doing = "between"
        return told

    def _turn_out(self, room: Room) -> list[Emitted]:
        """End the requests that have no place beside the others."""
        gone, later_s = self.roster.turned_out(room.num_places), room.retry_after_s
        if not gone:
            return []
        words = str(GaveWay(later_s))
        self._end(lambda g: g.prepared.stream_id in gone, "error", words, "gave_way", later_s)
        return self._outbox.take()

    def _end_restores(self, restoring: Iterable[Generation]) -> None:
        """Let go on whose prefix has arrived."""
        for generation in restoring:
            if self.prefixes.is_taken_up(generation.lease):
                generation.is_restoring = False
                if generation.lease.logits is not None:
                    begin_answer(generation, generation.lease.logits)
                    self._advanced([generation])

    def _rest(self) -> None:
        """Nothing is to be done now, and nothing was at the last step."""
        if self._was_idle:
            self._quiet.set()
        self._was_idle = not self.roster.waiting and not self.roster.running

    # --- what becomes of generations -----------------------------------------------------------

    def _advanced(self, generations: Iterable[Generation]) -> None:
        """They have been given tokens, or have ended; those let go of their lanes."""
        for generation in generations:
            if not generation.has_ended:
                self._outbox.advanced(generation)
                continue
            assert generation.lane is not None
            told = self.decoding.speculation(generation.lane), self.lanes.told(generation.lane)
            self._outbox.ended(generation, *told)
            self.roster.let_go(generation)
            self._leftovers.ended(generation)

    def _end(
        self,
        chosen: Chosen,
        reason: FinishReason,
        error: str | None,
        kind: ErrorKind = "failed",
        retry_after_s: int = 1,
    ) -> None:
        self._outbox.make_out()  # by itself: with an end that is a failure it is not shown
        for generation in [g for g in self.roster.running if chosen(g)]:
            generation.end(reason, error, kind, retry_after_s)
            self._advanced([generation])
        for generation in [g for g in self.roster.waiting if chosen(g)]:
            self.roster.give_up(generation)
            generation.end(reason, error, kind, retry_after_s)
            self._outbox.advanced(generation)
            self.prefixes.release(generation.lease)
