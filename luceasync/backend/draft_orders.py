"""Orders to a drafter: what came is checked against what it computes itself, then run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.backend.pass_orders import Answers, Table
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.ipc.channel import Received
from luceasync.ipc.memory import SealedMemory
from luceasync.pipeline.remote.tensors import Spec, views
from luceasync.pipeline.remote.wire import Done, Room
from luceasync.speculation.adapt import Shape
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.passes import LocalDraft

# Rows of features that belong to nodes: in memory that was lent, or in this process's own. A
# node is known by its place: where it begins in what was lent, or a number. Knows no lane.


class RowMemory(Protocol):
    """Where they lie. `spec`: shape and dtype of all rows that are meant."""

    def make(self, place: int, spec: Spec) -> Tensor:
        """Rows of any content, for a new node. Raises MemoryError, and ValueError for a place that
        is none.
        """
        ...

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        """Rows of a node from its row `begin` on. Raises ValueError for those that it has not."""
        ...


class LentRows:
    """In memory that others map too, who say where."""

    def __init__(self, memory: SealedMemory, row_bytes: int) -> None:
        self._memory = memory
        self._row_bytes = row_bytes

    def make(self, place: int, spec: Spec) -> Tensor:
        return self.rows(place, 0, spec)

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        first = place + begin * self._row_bytes
        end = first + num_rows * self._row_bytes
        if end > self._memory.num_bytes:
            raise ValueError(f"rows until byte {end} of a memory of {self._memory.num_bytes}")
        return views(self._memory.view[first:end], [spec])[0]


class OwnRows:
    """In memory of this process."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._nodes: dict[int, Tensor] = {}

    def make(self, place: int, spec: Spec) -> Tensor:
        shape, dtype = spec
        num_bytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        made = torch.frombuffer(self._memory.allocate(num_bytes), dtype=dtype).view(shape)
        self._nodes[place] = made
        return made

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        if place not in self._nodes:
            raise ValueError(f"node {place} is asked for, and is not here")
        whole = self._nodes[place]
        if begin + num_rows > len(whole):
            raise ValueError(f"rows until {begin + num_rows} of a node that has {len(whole)}")
        return whole[begin : begin + num_rows]

    def forget(self, place: int) -> None:
        """Let a node go, if it is here."""
        self._nodes.pop(place, None)


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
