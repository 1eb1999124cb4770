"""What the draft's device does in a round: one pass that proposes, one that takes up what was kept.

Tensors of fixed shape in, tensors out; nothing waits for a device or looks at a value. Everything
that the host knows comes as one small tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from luceasync.dflash.adapt import Shape
from luceasync.dflash.features import FeatureRing
from luceasync.dflash.tree import Proposal, TreeProposer, propose_chain
from luceasync.target.transfer import Transfer, direct

REACH_STEP = 256  # what of the context a pass looks at grows in steps


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
        self, draft: Draft, ring: FeatureRing, head: Head, transfer: Transfer = direct
    ) -> None:
        self._draft = draft
        self.ring = ring
        self._head = head
        self._transfer = transfer
        self._trees: dict[int, TreeProposer] = {}  # by budget

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: Shape
    ) -> Proposal:
        """Rows to verify after each lane's last token, on the device of the target's head."""
        index = self._index([tokens, lanes, begins])
        reach = -(-max(begins) // REACH_STEP) * REACH_STEP
        hidden = self._draft.propose(*index, shape.block, reach=reach)
        logits = self._head.project_rows(hidden)  # [entries, slots, vocab]
        anchors = self._transfer(index[0], logits.device)
        if shape.budget is None:
            return propose_chain(anchors, logits)
        if shape.budget not in self._trees:
            tree = TreeProposer(shape.budget, logits.shape[-1], logits.device)
            self._trees[shape.budget] = tree
        return self._trees[shape.budget](anchors, logits)

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
        anew there.
        """
        for lane, begin in zip(lanes, begins, strict=True):
            if self.ring.valid(lane).stop != begin:
                self._draft.set_valid_from(lane, begin)
        padded = [[*path, *[0] * (num_rows - len(path))] for path in paths]
        counts = [len(path) for path in paths]
        index = self._index([lanes, begins, counts, *zip(*padded, strict=True)])
        rows = index[3:].t().contiguous()  # [entries, num_rows]
        here = [self._transfer(tap, self._draft.device).contiguous() for tap in taps]
        self.ring.scatter(here, index[0].int(), index[1], index[2].int(), rows.int())
        entry = torch.arange(len(lanes), device=rows.device)[:, None]
        features = torch.cat([tap[entry, rows] for tap in here], -1)
        self._draft.write_context(features, *index[:3])
        for lane, begin, count in zip(lanes, begins, counts, strict=True):
            self.ring.advance(lane, begin, count)

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
        self._draft.write_context(features, *self._index([[lane], [held.start], [len(held)]]))

    def _index(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """int64 [rows, entries] on the draft's device; each row is contiguous."""
        return torch.tensor(rows, dtype=torch.int64).to(self._draft.device, non_blocking=True)
