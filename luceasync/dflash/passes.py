"""What the draft's device does in a round: one pass that proposes, one that takes up what was kept.

Tensors of fixed shape in, tensors out; nothing waits for a device or looks at a value. Everything
that the host knows comes as one small tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from luceasync.dflash.adapt import Shape
from luceasync.dflash.feature_spec import check_rows
from luceasync.dflash.features import FeatureRing
from luceasync.dflash.graph import Runner, run_eagerly
from luceasync.dflash.tree import Proposal, TreeProposer, propose_chain
from luceasync.target.transfer import Transfer, direct

MIN_REACH = 256  # tokens of context


class Head(Protocol):
    """The part of a target that a draft borrows."""

    def project_rows(self, rows: Tensor) -> Tensor: ...


class Draft(Protocol):
    """luceasync.dflash.draft.DraftNetwork, which says what each means."""

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


class DraftPasses:
    """The draft with its ring of features and the target's head. Engine thread only."""

    def __init__(
        self,
        draft: Draft,
        ring: FeatureRing,
        head: Head,
        transfer: Transfer = direct,
        run: Runner = run_eagerly,
    ) -> None:
        self._draft = draft
        self.ring = ring
        self._head = head
        self._transfer = transfer
        self._run = run
        self._trees: dict[int, TreeProposer] = {}  # by budget

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: Shape
    ) -> Proposal:
        """Rows to verify after each lane's last token, on the device of the target's head; they
        hold until the next pass.
        """
        reach = min(reach_for(max(begins)), self.ring.capacity_tokens)

        def work(index: Tensor) -> Proposal:
            hidden = self._draft.propose(*index, shape.block, reach=reach)
            logits = self._head.project_rows(hidden)  # [entries, slots, vocab]
            anchors = self._transfer(index[0], logits.device)
            return self._proposer(shape, logits)(anchors, logits)

        with self._on_device():
            return self._run((shape, reach), work, self._index([tokens, lanes, begins]))

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        """Take up the rows of `paths`, at most `num_rows` each, of `taps` [entries, rows, hidden]:
        they stand at positions from `begins` on. A lane that does not go on where it ended begins
        anew there. Raises ValueError for rows that cannot be; nothing is written then.
        """
        self._take_up(taps, lanes, begins, paths, num_rows, self._run)

    def absorb_chunk(self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int) -> None:
        """As `absorb`, for all rows of a chunk of a prompt, whose size may be any."""
        self._take_up(taps, [lane], [begin], [range(num_tokens)], num_tokens, run_eagerly)

    def _take_up(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        run: Runner,
    ) -> None:
        check_rows(self.ring.spec, self.ring.num_lanes, taps, lanes, begins, paths)
        for lane, begin in zip(lanes, begins, strict=True):
            if self.ring.valid(lane).stop != begin:
                self._draft.set_valid_from(lane, begin)
        padded = [[*path, *[0] * (num_rows - len(path))] for path in paths]
        counts = [len(path) for path in paths]
        with self._on_device():
            index = self._index([lanes, begins, counts, *zip(*padded, strict=True)])
            here = [self._transfer(tap, self._draft.device) for tap in taps]
            run("absorb", self._write, index, *here)
        for lane, begin, count in zip(lanes, begins, counts, strict=True):
            self.ring.advance(lane, begin, count)

    def _write(self, index: Tensor, *taps: Tensor) -> None:
        """index: int64 [3 + num_rows, entries]: lanes, begins, counts, and the paths' rows."""
        lanes, begins, counts = index[:3]
        rows = index[3:].t().contiguous()  # [entries, num_rows]
        taps = tuple(tap.contiguous() for tap in taps)
        self.ring.scatter(taps, lanes.int(), begins, counts.int(), rows.int())
        entry = torch.arange(rows.shape[0], device=rows.device)[:, None]
        features = torch.cat([tap[entry, rows] for tap in taps], -1)
        self._draft.write_context(features, lanes, begins, counts)

    def _proposer(self, shape: Shape, logits: Tensor) -> Callable[[Tensor, Tensor], Proposal]:
        if shape.budget is None:
            return propose_chain
        if shape.budget not in self._trees:
            tree = TreeProposer(shape.budget, logits.shape[-1], logits.device)
            self._trees[shape.budget] = tree
        return self._trees[shape.budget]

    def reset(self, lane: int, begin: int = 0) -> None:
        """The lane goes on at position `begin`, and has no features of what is before it."""
        self.ring.reset(lane)
        self._draft.set_valid_from(lane, begin)

    def restore(self, lane: int, begin: int, rows: Tensor) -> None:
        """The lane has these features, [tokens, taps * hidden], of positions from `begin` on, and
        no others. Raises ValueError for rows that are none of this drafter's.
        """
        self.ring.reset(lane)
        self.ring.restore(lane, begin, rows)
        held = self.ring.valid(lane)
        self._draft.set_valid_from(lane, held.start)
        features = self.ring.rows(lane, held.start, held.stop)[None]
        with self._on_device():
            index = self._index([[lane], [held.start], [len(held)]])
            self._draft.write_context(features, *index)

    def _index(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """int64 [rows, entries] on the draft's device; each row is contiguous."""
        return torch.tensor(rows, dtype=torch.int64).to(self._draft.device, non_blocking=True)

    def _on_device(self) -> AbstractContextManager[object]:
        """Inside it kernels are launched on the draft's device."""
        device = self._draft.device
        return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def reach_for(position: int) -> int:
    """How much of the context a pass looks at, so that few sizes come up: two in each octave."""
    reach = MIN_REACH
    while reach < position:
        reach = reach * 3 // 2 if reach & (reach - 1) == 0 else reach // 3 * 4
    return reach
