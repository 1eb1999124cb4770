"""A drafter in a process of its own, as luceasync.dflash.decode.DraftPasses has it: each verb a
message, and only rows that its ring keeps go there.

Owns what crosses. Knows neither who starts the process nor what becomes of one that is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from luceasync.dflash import wire
from luceasync.dflash.adapt import Shape
from luceasync.dflash.feature_spec import FeatureSpec, check_rows, check_taps
from luceasync.dflash.passes import Head
from luceasync.dflash.process import DraftProcess, Loaded
from luceasync.errors import DraftFailed
from luceasync.ipc.pace import Call
from luceasync.pipeline.transfer import on_host
from luceasync.pipeline.wire import PIECE_BYTES
from luceasync.ranking.proposals import Proposal

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
