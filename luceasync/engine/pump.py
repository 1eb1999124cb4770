"""The engine thread's half: generations on lanes, one step at a time.

Owns the queue, the lanes and every generation. Synchronous, and knows no threads, loops or clients:
it is told what to submit and cancel, and says which deltas came of a step. What of a prompt need
not be run, and what is kept of it, is for `prefixes` to say.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from luceasync.engine.decoding import Decoding, choose_next
from luceasync.engine.generation import Generation, Prepared
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.scheduling import Balance
from luceasync.keeping.chunks import chunk_end
from luceasync.keeping.prefixes import Prefixes
from luceasync.request import Delta, FinishReason

Emitted = tuple[int, Delta]  # stream id, delta
Tell = Callable[[list[Emitted]], None]
Command = Callable[["Pump"], list[Emitted] | None]  # what it returns is to be told

IDLE_PAUSE_S = 1.0
LEAVING_PAUSE_S = 0.001  # in which an answer's end goes out before its prefix is kept


class Target(Protocol):
    """What the pump asks of a target; luceasync.pipeline.backend.LayerSplitBackend is one."""

    def prefill(
        self, lane: int, begin: int, tokens: Sequence[int], *, project: bool
    ) -> Tensor | None: ...

    def reset(self, lane: int) -> None: ...


class Pump:
    """Runs generations. `step` does one prefill chunk or one decode step for all decoding lanes."""

    def __init__(
        self,
        target: Target,
        decoding: Decoding,
        prefixes: Prefixes,
        *,
        num_lanes: int,
        chunk_tokens: int,
        computes_beside: bool = False,
        synchronize: Callable[[], None] = lambda: None,
        quiet: threading.Event | None = None,
    ) -> None:
        """`computes_beside`: devices compute while the host goes on. Then what a decode step gave
        is told during the next one: whoever listens wants the interpreter just when that is to be
        queued. `synchronize` waits until the device that gives the logits is done. `quiet` is set
        while there has been nothing to do for IDLE_PAUSE_S.
        """
        self._computes_beside = computes_beside
        self._synchronize = synchronize
        self._quiet = quiet or threading.Event()
        self._was_idle = False
        self._target = target
        self.decoding = decoding
        self.prefixes = prefixes
        self._chunk_tokens = chunk_tokens
        self._free_lanes = list(range(num_lanes))
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []  # in the order in which they got their lanes
        self._passed_over: set[Generation] = set()  # they wait, and not for the disk
        # What is still to be told, whatever fails meanwhile: deltas, and who has more to show.
        self._emitted: list[Emitted] = []
        self._unshown: list[Generation] = []
        # What waits until its tokens are told: prefixes to be kept, then choices that leave.
        self._to_keep: list[Callable[[], None]] = []
        self._leaving: deque[tuple[Generation, bool]] = deque()
        self._balance = Balance()
        self.num_prefilled_total = 0
        self.num_decoded_total = 0
        self.num_steps_total = 0

    def __repr__(self) -> str:
        decoding = sum(g.is_decoding for g in self._running)
        return (
            f"Pump({len(self._waiting)} waiting, {len(self._running) - decoding} prefilling, "
            f"{decoding} decoding, {len(self._free_lanes)} lanes free)"
        )

    @property
    def pause_s(self) -> float:
        """How long a step would do nothing unless a command comes before."""
        if any(not g.is_restoring or g.claim.has_arrived for g in self._running):
            return 0.0
        waiting = [g for g in self._waiting if not g.claim.awaited]
        if self._running:  # who was passed over waits for those, or for a lane of theirs
            waiting = [g for g in waiting if g not in self._passed_over]
        if waiting:
            return 0.0
        if self._to_keep or self._leaving:
            return LEAVING_PAUSE_S
        return 0.0 if self.prefixes.has_due_writes else IDLE_PAUSE_S

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do before a command comes."""
        return self.pause_s == IDLE_PAUSE_S

    def listen(self, post: Callable[[Command], None]) -> None:
        """Hear of what ends elsewhere. `post`, which any thread may call, has a command run before
        the next step.
        """
        self.prefixes.listen(lambda call: post(lambda pump: call()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, prepared: Sequence[Prepared]) -> None:
        """Queue the choices of a request."""
        self._quiet.clear()
        self._was_idle = False
        for generation in map(Generation, prepared):
            self.prefixes.admit(generation.claim)
            self._waiting.append(generation)

    def cancel(self, stream_id: int) -> list[Emitted]:
        """End every choice of the stream, wherever it is; its lanes are free when this returns."""
        self._catch_up()
        self._end_all(lambda g: g.prepared.stream_id == stream_id, "cancelled", None)
        self._catch_up()
        return self._told()

    def fail_all(self, error: str) -> list[Emitted]:
        """End everything with an error; nothing of it is kept, and no lane is looked at: whatever
        a step raised, this tells everybody.
        """
        self._to_keep.clear()
        self._unshown.clear()
        self._leaving = deque((generation, False) for generation, _ in self._leaving)
        self._end_all(lambda g: True, "error", error)
        self._catch_up()
        return self._told()

    def end_all(self, words: str) -> list[Emitted]:
        """Cancel everything, and write what is worth it: the next start takes it up."""
        self._catch_up()
        self._end_all(lambda g: True, "cancelled", words)
        self._catch_up()
        self.prefixes.hand_over(wait=True)
        return self._told()

    def keep_all(self) -> None:
        """Keep what has ended, and hand over all that the disk is to have of what was kept."""
        self._catch_up()
        self.prefixes.hand_over(wait=True)

    def step(self, tell: Tell | None = None) -> list[Emitted]:
        """Give free lanes to waiting choices, then do what is due. Returns what is to be told now;
        what a decode step gave may be held back and be given to `tell` while a device works on the
        next one. None: nothing is held back.
        """
        self._catch_up()
        self.prefixes.hand_over()
        self._assign_lanes()
        self._end_restores()
        prefilling = [g for g in self._running if g.is_prefilling]
        decoding = [g for g in self._running if g.is_decoding]
        step = self._balance.next_step(len(prefilling), len(decoding))
        is_told_later = step == "decode" and self._computes_beside and tell is not None
        if (self._emitted or self._unshown) and not is_told_later:
            return self._told()
        if step == "idle":
            self._rest()
            return []
        begin = time.perf_counter()
        if step == "prefill":
            self._prefill(prefilling[0])
        else:
            meanwhile = nothing if tell is None else lambda: tell(self._told())
            self._decode(decoding, alone=not prefilling, meanwhile=meanwhile)
        seconds = time.perf_counter() - begin
        self._balance.account(step, seconds, both=bool(prefilling and decoding))
        is_last = any(delta.finish for _, delta in self._emitted)
        return [] if is_told_later and not is_last else self._told()

    def _told(self) -> list[Emitted]:
        """What has come up, once."""
        while self._unshown:
            generation = self._unshown[0]
            delta = generation.shown()
            if delta is not None:
                self._emitted.append((generation.prepared.stream_id, delta))
            del self._unshown[0]
        told, self._emitted = self._emitted, []
        return told

    def _catch_up(self) -> None:
        """Keep what the last step has left in the lanes, before anything changes it."""
        while self._to_keep:
            self._to_keep.pop(0)()
        while self._leaving:
            self._leave(*self._leaving.popleft())

    def _assign_lanes(self) -> None:
        """In order; but whoever waits for what is still to come holds up nobody."""
        for generation in list(self._waiting):
            if not self._free_lanes:
                break
            prefilling = (g.claim for g in self._running if not g.is_decoding)
            if self.prefixes.prepare(generation.claim, prefilling):
                lane = self._free_lanes[0]
                self._target.reset(lane)
                self.decoding.start(lane)
                generation.start(lane, self.prefixes.take_up(generation.claim, lane))
                self._waiting.remove(generation)  # not before: whoever fails is told so
                self._free_lanes.remove(lane)
                self._running.append(generation)
        self._passed_over = {g for g in self._waiting if not g.claim.awaited}

    def _end_restores(self) -> None:
        """Let go on whose prefix has arrived."""
        for generation in [g for g in self._running if g.is_restoring]:
            if self.prefixes.is_taken_up(generation.claim):
                generation.is_restoring = False
                if generation.claim.logits is not None:
                    self._begin_answer(generation, generation.claim.logits)

    def _prefill(self, generation: Generation) -> None:
        """One chunk of one prompt; the last chunk gives the first token."""
        prompt = generation.prepared.prompt_ids
        begin = generation.num_prefilled
        end = chunk_end(begin, len(prompt), self._chunk_tokens, generation.claim.splits)
        started = time.perf_counter()
        lane, claim = generation.lane, generation.claim
        assert lane is not None
        is_last = end == len(prompt)
        logits = self._target.prefill(lane, begin, prompt[begin:end], project=is_last)
        self.decoding.prefilled(lane, begin, end - begin)
        generation.num_prefilled = end
        self.num_prefilled_total += end - begin
        self._to_keep.append(lambda: self.prefixes.prefilled(claim, lane, end, logits))
        if logits is not None:
            if self._computes_beside:  # what is kept costs nothing while the device is not done
                self._catch_up()
            self._synchronize()  # the host needs them next, and the time is theirs
        generation.prefill_s += time.perf_counter() - started
        if logits is not None:
            num_run = end - generation.num_cached
            self.prefixes.observed("prefill_tokens_per_s", num_run, generation.prefill_s)
            self._begin_answer(generation, logits)

    def _begin_answer(self, generation: Generation, logits: Tensor) -> None:
        """The first token, from the logits after the prompt, float32 [vocab]."""
        if generation.prepared.max_tokens == 0:
            generation.end("length")
        else:
            choose_next([generation], logits[None])
        self._advanced([generation])

    def _rest(self) -> None:
        """Nothing is to be done now, and nothing was at the last step."""
        if self._was_idle:
            self._quiet.set()
        self._was_idle = not self._waiting and not self._running

    def _decode(
        self, generations: list[Generation], *, alone: bool, meanwhile: Callable[[], None]
    ) -> None:
        """One step for every decoding lane; `alone`: no prefill waits for its turn."""
        before = sum(g.num_generated for g in generations)
        self.decoding.step(generations, alone=alone, meanwhile=meanwhile)
        self.num_steps_total += 1
        self.num_decoded_total += sum(g.num_generated for g in generations) - before
        self._advanced(generations)

    def _advanced(self, generations: Iterable[Generation]) -> None:
        """They have been given tokens, or have ended; those let go of their lanes."""
        for generation in generations:
            if not generation.has_ended:
                self._unshown.append(generation)
                continue
            last = self._completed(generation, generation.shown())
            self._emitted.append((generation.prepared.stream_id, last))
            self._let_go(generation)

    def _completed(self, generation: Generation, last: Delta | None) -> Delta:
        """The last delta of a choice on a lane, with what speculation did for it."""
        assert last is not None and last.finish is not None and generation.lane is not None
        speculation = self.decoding.speculation(generation.lane)
        return replace(last, finish=replace(last.finish, speculation=speculation))

    def _end_all(
        self, chosen: Callable[[Generation], bool], reason: FinishReason, error: str | None
    ) -> None:
        self._emitted = self._told()  # by itself: with an end that is a failure it is not shown
        for generation in [g for g in self._running if chosen(g)]:
            generation.end(reason, error)
            self._advanced([generation])
        for generation in [g for g in self._waiting if chosen(g)]:
            self._waiting.remove(generation)
            generation.end(reason, error)
            self._unshown.append(generation)
            self.prefixes.release(generation.claim)

    def _let_go(self, generation: Generation) -> None:
        """The choice runs no more. Its lane is free once what is in it has been kept."""
        self._running.remove(generation)
        self._unshown = [g for g in self._unshown if g is not generation]  # its end says all
        self._leaving.append((generation, generation.is_sound))

    def _leave(self, generation: Generation, is_kept: bool) -> None:
        lane = generation.lane
        assert lane is not None
        if not is_kept:
            self.prefixes.disown(generation.claim)
        elif not generation.is_restoring:
            is_cut = generation.prepared.detokenizer.stopped
            end = generation.num_committed
            self.prefixes.finished(generation.claim, lane, end, is_cut=is_cut)
        self.prefixes.release(generation.claim)
        self._free_lanes.append(lane)
        self._free_lanes.sort()
        self._passed_over.clear()
        generation.lane = None
