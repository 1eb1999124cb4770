"""A drafter in a process of its own, as speculator.DraftPasses has it: each verb a
message, and only rows that its ring keeps go there.

Owns what crosses. Knows neither who starts the process nor what becomes of one that is lost.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from luceasync.errors import DraftFailed, LuceasyncError
from luceasync.ipc.supervised import Call, Life, Supervised
from luceasync.pipeline.remote.link import Link
from luceasync.pipeline.remote.wire import PIECE_BYTES
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.adapt import Shape
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.features import FeatureSpec, LaneSpans, check_rows, check_taps
from luceasync.speculation.dflash.passes import Head

# A drafter's process over its lives: used while it is there, started again when it is lost.
# Owns whether there is one, and why there is none. Nobody waits for a start but the first: a
# thread does it. Knows no pass.


log = logging.getLogger(__name__)

T = TypeVar("T")
Advance = Callable[[int], None]

JOIN_S = 30.0
NAME = "the drafter"


class DraftLink(Link):
    """See Link. All methods raise DraftFailed."""

    def __init__(self, life: Life) -> None:
        super().__init__(life, 0)

    def failure(self, words: str) -> LuceasyncError:
        return DraftFailed(f"{words}; {self._started.last_words()}")


@dataclass(slots=True)
class Loaded:
    """A process that has loaded the drafter, and what is known of it. `num_unsettled`: see
    luceasync.speculation.dflash.graph.Runner.
    """

    link: DraftLink
    spans: LaneSpans
    num_unsettled: int = 0


class Start(Protocol):
    """Who has one loaded; luceasync.speculation.dflash.draft_process.Berth.start is one."""

    def __call__(self, process: Supervised, advance: Advance) -> Loaded:
        """Another life of it; `advance` hears what is read. Raises LuceasyncError, and what
        `advance` raises; the process has ended then.
        """
        ...


class DraftProcess:
    """Engine thread only, but for `off_reason`."""

    def __init__(self, process: Supervised, start: Start, stopping: threading.Event) -> None:
        """`process` waits for `stopping`, which is set here at the end."""
        self._process = process
        self._start = start
        self._stopping = stopping
        self._fresh: Loaded | None = None  # started by the thread, and not taken up yet
        self._thread: threading.Thread | None = None
        self.loaded: Loaded | None = None  # what is there now
        self.off_reason: str | None = None  # why there is none; any thread may ask

    def open(self, advance: Advance) -> None:
        """Start it for the first time. Raises as Start does."""
        self.loaded = self._start(self._process, advance)

    def run(self, work: Callable[[Loaded], T], otherwise: T) -> T:
        """What comes of `work`, or `otherwise` where nothing is there, or what is there fails."""
        if self.loaded is None:
            return otherwise
        try:
            return work(self.loaded)
        except DraftFailed as error:
            self._lose(error)
            return otherwise

    def notice(self) -> None:
        """Let go of one that is known to be gone, and take up one that is there again."""
        self.run(lambda loaded: loaded.link.notice(), None)
        if self.loaded is None and self._fresh is not None:
            self.loaded, self._fresh = self._fresh, None
            self.off_reason = None
            log.warning("%s is there again", NAME)

    def probe(self) -> None:
        """Ask for a sign of life."""
        self.notice()
        self.run(lambda loaded: loaded.link.probe(), None)

    def close(self) -> None:
        """End it. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.loaded = self._fresh = None
        self._process.stop()

    def _lose(self, error: DraftFailed) -> None:
        self.loaded = None
        self.off_reason = f"{NAME} is gone: {_without_lines(error)}"
        log.error("%s is gone, and lanes decode plainly: %s", NAME, error)
        self._process.failed(str(error))
        name = f"starts {NAME}"
        self._thread = threading.Thread(target=self._start_again, name=name, daemon=True)
        self._thread.start()

    def _start_again(self) -> None:
        """In the thread, until it is there or nobody wants it any more."""
        while not self._stopping.is_set():
            try:
                self._process.stop()
                self._process.wait()
                self._fresh = self._start(self._process, self._advance)
            except Exception as error:
                if not self._stopping.is_set():
                    log.error("%s was not started again: %s", NAME, error)
            else:
                return

    def _advance(self, num_bytes: int) -> None:
        if self._stopping.is_set():
            raise DraftFailed("nobody waits for it any more")


def _without_lines(error: DraftFailed) -> str:
    """What clients are told: no log lines."""
    return str(error).partition("\n")[0].removesuffix("; its last lines:")


CHUNK_BYTES = 16 << 20  # of the rows of a prompt that go in one message
CHUNK_ROWS = 64  # whose multiples they are


class Ends(Head[Proposal], Protocol):
    """Of a target: its embedding too."""

    def embed(self, tokens: Tensor) -> Tensor: ...


class RemoteDraft:
    """See DraftPasses."""

    def __init__(
        self,
        process: DraftProcess,
        ends: Ends,
        spec: FeatureSpec,
        sizes: wire.DraftSizes,
        num_lanes: int,
        capacity_tokens: int,
    ) -> None:
        """`process` is owned by whoever made it; `capacity_tokens`: of a lane's ring there."""
        self.capacity_tokens = capacity_tokens
        self._num_lanes = num_lanes
        self._process = process
        self._ends = ends
        self._spec = spec
        self._sizes = sizes

    @property
    def num_unsettled(self) -> int:
        """As it was told last."""
        return self._process.run(lambda loaded: loaded.num_unsettled, 0)

    @property
    def off_reason(self) -> str | None:
        return self._process.off_reason

    def notice(self) -> None:
        self._process.notice()

    def probe(self) -> None:
        self._process.probe()

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: Shape
    ) -> Proposal:
        """See DraftPasses; the rows are where the target's head is."""
        anchors = on_host(tokens, np.int64)
        rows = self._ends.embed(anchors)
        order = wire.ProposeRows(tuple(lanes), tuple(begins), shape.block)
        hidden = self._process.run(lambda loaded: self._ask(loaded, order, rows), None)
        if hidden is None:
            raise DraftFailed(self._process.off_reason or "there is no drafter")
        return self._ends.propose_from(hidden, anchors, shape.budget)

    def _ask(self, loaded: Loaded, order: wire.ProposeRows, rows: Tensor) -> Tensor:
        number = loaded.link.tell(order, [rows])
        spec = self._sizes.hidden_rows(len(order.lanes), order.block - 1)
        call = Call("propose", len(order.lanes) * order.block)
        said, [hidden] = loaded.link.said(number, wire.Proposed, [spec], call)
        loaded.num_unsettled = said.num_unsettled
        return hidden

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        """See TapRing."""
        check_taps(self._spec, taps)
        num_entries, num_there = taps[0].shape[:2]
        check_rows(self._num_lanes, num_entries, num_there, lanes, begins, paths)
        at_once = max(1, CHUNK_BYTES // (self._sizes.row_bytes * max(num_rows, 1)))
        for i in range(0, len(lanes), at_once):
            part = slice(i, i + at_once)
            few = [tap[part] for tap in taps]
            self._absorb(few, lanes[part], begins[part], paths[part], num_rows)

    def _absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        lengths = tuple(len(path) for path in paths)
        if not sum(lengths):
            return
        entries = [i for i, path in enumerate(paths) for _ in path]
        rows = [*itertools.chain(*paths)]
        order = wire.Absorb(tuple(lanes), tuple(begins), lengths, num_rows)

        def send(loaded: Loaded) -> None:
            loaded.link.tell(order, [_beside([_picked(tap, entries, rows) for tap in taps])])
            for lane, begin, length in zip(lanes, begins, lengths, strict=True):
                loaded.spans.advance(lane, begin, length)

        self._process.run(send, None)

    def absorb_chunk(self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int) -> None:
        """See TapRing. Of a chunk that is longer than the ring only the end goes there."""
        at_once = max(1, CHUNK_BYTES // (self._sizes.row_bytes * CHUNK_ROWS)) * CHUNK_ROWS

        def send(loaded: Loaded) -> None:
            first = max(0, num_tokens - self.capacity_tokens)
            for start in range(first, num_tokens, at_once):
                end = min(start + at_once, num_tokens)
                kept = _beside([tap[0, start:end] for tap in taps])
                loaded.link.tell(wire.AbsorbChunk(lane, begin + start, end - start), [kept])
                loaded.spans.advance(lane, begin + start, end - start)

        self._process.run(send, None)

    def reset(self, lane: int, begin: int = 0) -> None:
        """See DraftPasses."""

        def send(loaded: Loaded) -> None:
            loaded.link.tell(wire.ResetLane(lane, begin))
            loaded.spans.reset(lane)

        self._process.run(send, None)


def ring_bytes(sizes: wire.DraftSizes, num_lanes: int, block: int) -> tuple[int, int]:
    """Of the rings to the drafter and from it: two pieces of a prompt or of what several lanes have
    accepted, and two proposals.
    """
    least = max(CHUNK_ROWS, block) * sizes.row_bytes  # what goes in one message at any rate
    asked = num_lanes * sizes.hidden * sizes.dtype.itemsize
    to = max(CHUNK_BYTES, least, PIECE_BYTES, asked)
    back = max(PIECE_BYTES, block * asked)
    return 2 * to + (1 << 20), 2 * back + (1 << 20)


def _picked(tap: Tensor, entries: Sequence[int], rows: Sequence[int]) -> Tensor:
    """tap: [entries, rows, hidden] -> [picked, hidden], where it is."""
    index = on_host([entries, rows], np.int64).to(tap.device, non_blocking=True)
    return tap[index[0], index[1]]


def _beside(picked: Sequence[Tensor]) -> Tensor:
    """[picked, hidden] of each tap -> [taps, picked, hidden]: on their device if they share one, so
    that they come to the host in one copy, else on the host.
    """
    if any(part.device != picked[0].device for part in picked):
        picked = [part.cpu() for part in picked]
    return torch.stack([*picked])
