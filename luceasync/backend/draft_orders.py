"""Orders to a drafter: what came is checked against what it computes itself, then run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.backend.draft_nodes import OwnRows, RowMemory
from luceasync.backend.pass_orders import Answers, Table
from luceasync.dflash import wire
from luceasync.dflash.adapt import Shape
from luceasync.dflash.passes import LocalDraft
from luceasync.hoststore.copy_stream import copy_beside
from luceasync.ipc.channel import Received
from luceasync.pipeline.wire import Done, Room


class SentRows:
    """The embedding as a drafter has it: the rows that came with a proposal, and the mask's. A
    token is the number of a row here.
    """

    def __init__(self, mask: Tensor, num_lanes: int, device: torch.device) -> None:
        """mask: [hidden]."""
        self._rows = mask.to(device).repeat(num_lanes + 1, 1)
        self.mask_token = num_lanes

    def take(self, rows: Tensor) -> list[int]:
        """Have these, [entries, hidden], in place of those before; the tokens that they are."""
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        return [*range(len(rows))]

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., hidden] of tokens int64 [...]."""
        return F.embedding(tokens, self._rows)


class AsRows:
    """A head that is not here: a proposal is its hidden rows."""

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Tensor:
        return rows


class DraftOrders:
    """Runs passes of a drafter. `table`: what is done with each message."""

    def __init__(
        self,
        link: Answers,
        draft: LocalDraft[Tensor],
        embedding: SentRows,
        order: wire.LoadDraft,
        memory: RowMemory,
    ) -> None:
        self._link = link
        self._draft = draft
        self._embedding = embedding
        self._sizes = wire.DraftSizes(order.spec, order.dtype)
        self._block = order.spec.block
        self._num_lanes, self._max_tokens = order.num_lanes, order.max_ctx_tokens
        self._short_rows = sorted(order.short_rows)
        self._memory = memory
        self.table: Table = {
            wire.ProposeRows: self._propose,
            wire.Absorb: self._absorb,
            wire.AbsorbChunk: self._absorb_chunk,
            wire.ResetLane: self._reset,
            wire.SaveRows: self._save,
            wire.RestoreRows: self._restore,
        }

    def _propose(self, order: wire.ProposeRows, got: Received[Any]) -> None:
        self._check_lanes(order.lanes, order.begins)
        if not 2 <= order.block <= self._block:
            self._link.refuse(f"a block of {order.block} of a drafter of {self._block}")
        [rows] = self._link.given(got, [self._sizes.hidden_rows(len(order.lanes))])
        tokens = self._embedding.take(rows)
        hidden = self._draft.propose(tokens, order.lanes, order.begins, Shape(order.block))
        self._link.answer(got, wire.Proposed(self._draft.num_unsettled), [hidden])

    def _absorb(self, order: wire.Absorb, got: Received[Any]) -> None:
        self._check_lanes(order.lanes, order.begins)
        if len(order.lengths) != len(order.lanes) or max(order.lengths) > order.num_rows:
            self._link.refuse(f"paths of {order.lengths} rows for lanes {order.lanes}")
        [kept] = self._link.given(got, [self._sizes.taps(sum(order.lengths))])
        taps = kept.new_zeros(len(kept), len(order.lanes), order.num_rows, self._sizes.hidden)
        paths = [range(length) for length in order.lengths]
        begin = 0
        for entry, path in enumerate(paths):
            taps[:, entry, : len(path)] = kept[:, begin : begin + len(path)]
            begin += len(path)
        self._draft.absorb([*taps], order.lanes, order.begins, paths, order.num_rows)

    def _absorb_chunk(self, order: wire.AbsorbChunk, got: Received[Any]) -> None:
        self._check_lanes([order.lane], [order.begin + order.num_tokens - 1])
        [kept] = self._link.given(got, [self._sizes.taps(order.num_tokens)])
        whole = [n for n in self._short_rows if n >= order.num_tokens]
        if whole:  # as the target's own passes fill them up
            kept = F.pad(kept, (0, 0, 0, whole[0] - order.num_tokens))
        taps = [tap[None] for tap in kept]
        self._draft.absorb_chunk(taps, order.lane, order.begin, order.num_tokens)

    def _reset(self, order: wire.ResetLane, got: Received[Any]) -> None:
        self._check_lanes([order.lane], [0])
        self._draft.reset(order.lane, order.begin)

    def _save(self, order: wire.SaveRows, got: Received[Any]) -> None:
        self._check_lanes([order.lane], [0])
        ring = self._draft.ring
        rows = ring.rows(order.lane, order.begin, order.end)
        try:
            kept = self._memory.make(order.place, self._sizes.features(len(rows)))
        except MemoryError:
            self._link.answer(got, Room(False))
            return
        copy_beside([(_bytes(kept), _bytes(rows))])
        ring.platform.synchronize()
        self._link.answer(got, Room(True))

    def _restore(self, order: wire.RestoreRows, got: Received[Any]) -> None:
        self._check_lanes([order.lane], [order.begin])
        parts = [
            self._memory.rows(place, begin, self._sizes.features(end - begin))
            for place, begin, end in order.parts
        ]
        self._draft.restore(order.lane, order.begin, torch.cat(parts))
        self._link.answer(got, Done())

    def _check_lanes(self, lanes: Sequence[int], begins: Sequence[int]) -> None:
        if len(lanes) != len(begins) or not lanes or len(set(lanes)) != len(lanes):
            self._link.refuse(f"lanes {[*lanes]} and begins {[*begins]}")
        if max(lanes) >= self._num_lanes or max(begins) >= self._max_tokens:
            self._link.refuse(
                f"lane {max(lanes)} of {self._num_lanes}, "
                f"position {max(begins)} of {self._max_tokens}"
            )


class RowOrders:
    """Orders about rows of nodes in this process's own memory. `table`: see DraftOrders."""

    def __init__(self, link: Answers, rows: OwnRows, sizes: wire.DraftSizes) -> None:
        self._link = link
        self._rows = rows
        self._sizes = sizes
        self.table: Table = {
            wire.AdoptRows: self._adopt,
            wire.FillRows: self._fill,
            wire.ExportRows: self._export,
            wire.DropRows: self._drop,
        }

    def _adopt(self, order: wire.AdoptRows, got: Received[Any]) -> None:
        try:
            self._rows.make(order.place, self._sizes.features(order.num_rows))
        except MemoryError:
            self._link.answer(got, Room(False))
            return
        self._link.answer(got, Room(True))

    def _fill(self, order: wire.FillRows, got: Received[Any]) -> None:
        spec = self._sizes.features(order.end - order.begin)
        [rows] = self._link.given(got, [spec])
        self._rows.rows(order.place, order.begin, spec).copy_(rows)

    def _export(self, order: wire.ExportRows, got: Received[Any]) -> None:
        spec = self._sizes.features(order.end - order.begin)
        self._link.answer(got, Done(), [self._rows.rows(order.place, order.begin, spec)])

    def _drop(self, order: wire.DropRows, got: Received[Any]) -> None:
        self._rows.forget(order.place)


def _bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8)
