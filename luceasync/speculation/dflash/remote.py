"""A drafter in another process: each verb is a command, and only rows that its ring keeps go there.

Owns what crosses. Knows neither what starts the process nor what becomes of one that is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from luceasync.errors import DraftFailed
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.features import FeatureSpec, check_rows, check_taps
from luceasync.speculation.dflash.process import CHUNK_BYTES, CHUNK_ROWS, DraftLife, DraftProcess
from luceasync.speculation.drafter import Target


class RemoteDraft:
    """See DraftPasses."""

    def __init__(
        self,
        process: DraftProcess,
        target: Target,
        spec: FeatureSpec,
        sizes: wire.DraftSizes,
        capacity_tokens: int,
        head: Callable[[Tensor, Tensor, int | None], Proposal] | None = None,
    ) -> None:
        """The caller owns `process`; `capacity_tokens`: of a lane's ring there. `head` makes
        proposals of its rows; None: the target's.
        """
        self.capacity_tokens = capacity_tokens
        self._process = process
        self._target = target
        self._head = head or target.propose_from
        self._spec = spec
        self._sizes = sizes

    @property
    def num_unsettled(self) -> int:
        """As of the last proposal."""
        return self._process.run(lambda life: life.num_unsettled, 0)

    @property
    def off_reason(self) -> str | None:
        return self._process.off_reason

    def in_rounds(self, shape: RoundShape, end: int) -> None:
        return None  # it is in another process

    def refresh(self) -> None:
        self._process.refresh()

    def check_alive(self) -> None:
        self._process.check_alive()

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> Proposal:
        """See DraftPasses; the proposal is on the device of the target's head."""
        anchors = on_host(tokens, np.int64)
        rows = self._target.embed(anchors)
        command = wire.ProposeBlock(tuple(lanes), tuple(begins), shape.block)
        hidden = self._process.run(lambda life: self._propose(life, command, rows), None)
        if hidden is None:
            raise DraftFailed(self._process.off_reason or "there is no drafter")
        return self._head(hidden, anchors, shape.budget)

    def _propose(self, life: DraftLife, command: wire.ProposeBlock, rows: Tensor) -> Tensor:
        number = life.connection.send(command, [rows])
        answer, [hidden] = life.connection.answer_with(
            number, wire.DraftRows, command.returns(self._sizes), command.call_kind
        )
        life.num_unsettled = answer.num_unsettled
        return hidden

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        tokens: Tensor | None = None,
    ) -> None:
        check_taps(self._spec, taps)
        num_entries, num_there = taps[0].shape[:2]
        check_rows(self._sizes.num_lanes, num_entries, num_there, lanes, begins, paths)
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
        command = wire.AbsorbPaths(tuple(lanes), tuple(begins), lengths, num_rows)

        def send(life: DraftLife) -> None:
            life.connection.send(command, [_stacked([_pick(tap, entries, rows) for tap in taps])])
            for lane, begin, length in zip(lanes, begins, lengths, strict=True):
                life.spans.advance(lane, begin, length)

        self._process.run(send, None)

    def absorb_chunk(
        self,
        taps: Sequence[Tensor],
        lane: int,
        begin: int,
        num_tokens: int,
        tokens: Tensor | None = None,
    ) -> None:
        """See TapRing. Of a chunk that is longer than the ring, only the end goes there."""
        at_once = max(1, CHUNK_BYTES // (self._sizes.row_bytes * CHUNK_ROWS)) * CHUNK_ROWS

        def send(life: DraftLife) -> None:
            first = max(0, num_tokens - self.capacity_tokens)
            for start in range(first, num_tokens, at_once):
                end = min(start + at_once, num_tokens)
                kept = _stacked([tap[0, start:end] for tap in taps])
                life.connection.send(wire.AbsorbChunk(lane, begin + start, end - start), [kept])
                life.spans.advance(lane, begin + start, end - start)

        self._process.run(send, None)

    def reset(self, lane: int, begin: int = 0) -> None:
        def send(life: DraftLife) -> None:
            life.connection.send(wire.ResetDraftLane(lane, begin))
            life.spans.reset(lane)

        self._process.run(send, None)


def _pick(tap: Tensor, entries: Sequence[int], rows: Sequence[int]) -> Tensor:
    """[entries, rows, hidden] -> [picked, hidden], on the tap's device."""
    index = on_host([entries, rows], np.int64).to(tap.device, non_blocking=True)
    return tap[index[0], index[1]]


def _stacked(taps: Sequence[Tensor]) -> Tensor:
    """[picked, hidden] of each tap -> [taps, picked, hidden]: on their device if they share one, so
    that they come to the host in one copy, else on the host.
    """
    if any(tap.device != taps[0].device for tap in taps):
        taps = [tap.cpu() for tap in taps]
    return torch.stack([*taps])
