"""What the draft's device does in a round: one pass that proposes, one that absorbs what was kept.

Tensors of fixed shape in, tensors out; nothing waits for a device or reads a value. Everything that
the host knows comes as one small tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.pass_rows import round_up_rows
from luceasync.pipeline.passes import RoundWork
from luceasync.pipeline.transfer import Transfer, direct, on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.context import reach_for
from luceasync.speculation.dflash.features import FeatureRing, check_rows
from luceasync.speculation.dflash.graph import EagerRunner, Runner
from luceasync.speculation.drafter import DraftInRounds

LONG_ROWS = 128  # more than a short prefill chunk has

P = TypeVar("P")


class DraftModel(Protocol):
    """The draft model; see luceasync.speculation.dflash.draft.DraftNetwork."""

    device: torch.device

    def propose(
        self,
        anchors: Tensor,
        lanes: Tensor,
        begins: Tensor,
        block: int,
        *,
        reach: int | None = None,
    ) -> Tensor: ...

    def write_context(
        self, features: Tensor, lanes: Tensor, begins: Tensor, counts: Tensor
    ) -> None: ...

    def set_valid_from(self, lane: int, position: int) -> None: ...


class LocalDraft(Generic[P]):
    """See luceasync.speculation.drafter.DraftPasses: a draft and its ring of features in this
    process. Engine thread only.
    """

    off_reason = None  # it lives as long as this process

    def __init__(
        self,
        draft: DraftModel,
        ring: FeatureRing,
        head: Callable[[Tensor, Tensor, int | None], P],
        transfer: Transfer = direct,
        run: Runner | None = None,
        reach_for: Callable[[int], int | None] = reach_for,
        short_rows: Sequence[int] = (),
        *,
        is_beside: bool = False,
    ) -> None:
        """`head` turns hidden rows into proposals, as the target's `propose_from` does. `run`: how
        passes are run, None: operation by operation. `reach_for`: see draft_ops.TorchDraftOps.
        `short_rows`: sizes to which short prefill chunks are padded, as the target's passes are;
        their rows are absorbed as a round's are. `is_beside`: the whole target is on the draft's
        device.
        """
        self._draft = draft
        self.ring = ring
        self._head = head
        self._transfer = transfer
        self._run = run or EagerRunner()
        self._reach_for = reach_for
        self._short_rows = sorted(short_rows)
        self._is_beside = is_beside
        self._parts: dict[tuple[RoundShape, int | None], DraftInRounds] = {}

    @property
    def num_unsettled(self) -> int:
        return self._run.num_unsettled

    @property
    def capacity_tokens(self) -> int:
        return self.ring.capacity_tokens

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> P:
        """See DraftPasses. The proposal is on the device of the head."""
        reach = self._reach_for(max(begins))

        def work(index: Tensor) -> P:
            anchors, lanes, begins = self._here(index)
            hidden = self._draft.propose(anchors, lanes, begins, shape.block, reach=reach)
            return self._head(hidden, anchors, shape.budget)

        with self._on_device():
            index = on_host([tokens, lanes, begins], np.int64)
            proposal: P = self._run((shape, reach), work, index)
            return proposal

    def in_rounds(self, shape: RoundShape, end: int) -> DraftInRounds | None:
        if shape.budget is not None or not self._is_beside:
            return None
        key = shape, self._reach_for(end)
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        return self._parts[key]

    def _part(self, shape: RoundShape, reach: int | None) -> DraftInRounds:
        draft, ring = self._draft, self.ring

        def propose(anchors: Tensor, lanes: Tensor, begins: Tensor) -> Tensor:
            hidden = draft.propose(anchors, lanes, begins, shape.block, reach=reach)
            proposal = self._head(hidden, anchors, None)
            assert isinstance(proposal, Proposal), "beside the target there is its head"
            return proposal.tokens

        def absorb(
            taps: Sequence[Tensor],
            proposed: Tensor,
            lanes: Tensor,
            begins: Tensor,
            counts: Tensor,
            rows: Tensor,
        ) -> None:
            taps = tuple(tap.contiguous() for tap in taps)
            features = ring.scatter(taps, lanes, begins.long(), counts, rows)
            draft.write_context(features, lanes, begins, counts)

        work = RoundWork(shape.block, propose, absorb)
        return DraftInRounds(work, self._follow, ring.advance)

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        tokens: Tensor | None = None,
    ) -> None:
        self._check(taps, lanes, begins, paths)
        counts = [len(path) for path in paths]
        padded = [[*path, *[0] * (num_rows - len(path))] for path in paths]
        index = on_host([*lanes, *begins, *counts, *itertools.chain(*padded)], np.int32)
        with self._on_device():
            here = [self._transfer(tap, self._draft.device) for tap in taps]
            self._run("absorb", self._write, index, *here)
        for lane, begin, count in zip(lanes, begins, counts, strict=True):
            self.ring.advance(lane, begin, count)

    def absorb_chunk(
        self,
        taps: Sequence[Tensor],
        lane: int,
        begin: int,
        num_tokens: int,
        tokens: Tensor | None = None,
    ) -> None:
        num_rows = taps[0].shape[1]
        if num_rows in self._short_rows and all(tap.shape[1] == num_rows for tap in taps):
            self.absorb(taps, [lane], [begin], [range(num_tokens)], num_rows)
            return
        taps = [tap[:, :num_tokens] for tap in taps]  # some shards pad chunks, others do not
        ends = range(num_tokens)[:: max(num_tokens - 1, 1)]
        self._check(taps, [lane], [begin], [ends])
        with self._on_device():
            here = [self._transfer(tap[0], self._draft.device) for tap in taps]
            rows = torch.cat(here, -1)
            self.ring.restore(lane, begin, rows)
            self._write_context(lane, begin, rows)

    def warm_up(self, shapes: Sequence[RoundShape]) -> None:
        """Run every pass of one lane, with padding alone. After NUM_WARM_UPS times no request waits
        for kernels to be compiled or a graph to be captured.
        """
        spec = self.ring.spec
        for shape in shapes:
            self.propose([0], [-1], [0], shape)
        of_chunks = {(num_rows, num_rows) for num_rows in self._short_rows}
        of_rounds = {(1, 1), *((shape.num_rows, shape.block) for shape in shapes)}
        for num_verified, num_kept in of_chunks | of_rounds:
            tap = self.ring.store.new_zeros(1, num_verified, spec.hidden_size)
            index = on_host([-1, *[0] * (2 + num_kept)], np.int32)
            with self._on_device():
                self._run("absorb", self._write, index, *[tap] * len(spec.taps))
        with self._on_device():  # restored features, and long prefill chunks
            for num_rows in (*self._short_rows, LONG_ROWS):
                self._write_context(-1, 0, self.ring.store.new_zeros(num_rows, spec.width))

    def _check(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Raise ValueError for invalid rows; else see `_follow`."""
        num_entries, num_rows = taps[0].shape[:2]  # the ring checks the other taps
        check_rows(self.ring.num_lanes, num_entries, num_rows, lanes, begins, paths)
        self._follow(lanes, begins)

    def _follow(self, lanes: Sequence[int], begins: Sequence[int]) -> None:
        """Rows from `begins` on come next: restart lanes that do not go on at their end."""
        for lane, begin in zip(lanes, begins, strict=True):
            if self.ring.valid(lane).stop != begin:
                self._draft.set_valid_from(lane, begin)

    def _write(self, index: Tensor, *taps: Tensor) -> None:
        """index: int32 [(3 + rows) * entries]: lanes, begins, counts, and the rows of the paths."""
        num_entries = len(taps[0])
        index = self._here(index)
        lanes, begins, counts = index[: 3 * num_entries].view(3, -1)
        paths = index[3 * num_entries :].view(num_entries, -1)
        taps = tuple(tap.contiguous() for tap in taps)
        features = self.ring.scatter(taps, lanes, begins.long(), counts, paths)
        self._draft.write_context(features, lanes, begins, counts)

    def _write_context(self, lane: int, begin: int, rows: Tensor) -> None:
        """rows: [tokens, taps * hidden], of positions from `begin` on."""
        num_tokens = len(rows)
        index = self._here(on_host([[lane], [begin], [num_tokens]], np.int64))
        sizes = (n for n in self._short_rows if n >= num_tokens)
        num_rows = next(sizes, round_up_rows(num_tokens, per_octave=4))
        if num_rows > num_tokens:  # so that kernels are compiled for few sizes
            rows = F.pad(rows, (0, 0, 0, num_rows - num_tokens))
        self._draft.write_context(rows[None], *index)

    def reset(self, lane: int, begin: int = 0) -> None:
        self.ring.reset(lane)
        self._draft.set_valid_from(lane, begin)

    def restore(self, lane: int, begin: int, rows: Tensor) -> None:
        """Give the lane these features, [tokens, taps * hidden], of positions from `begin` on, and
        no others. Raises ValueError for rows of another drafter.
        """
        self.ring.reset(lane)
        self.ring.restore(lane, begin, rows)
        held = self.ring.valid(lane)
        self._draft.set_valid_from(lane, held.start)
        with self._on_device():
            self._write_context(lane, held.start, self.ring.rows(lane, held.start, held.stop))

    def refresh(self) -> None:
        """Do nothing: it lives as long as this process."""

    def check_alive(self) -> None:
        """Do nothing: it lives as long as this process."""

    def _here(self, index: Tensor) -> Tensor:
        return index.to(self._draft.device, non_blocking=True)

    def _on_device(self) -> AbstractContextManager[object]:
        """Launch kernels on the draft's device inside it."""
        return self.ring.platform.on_device()
