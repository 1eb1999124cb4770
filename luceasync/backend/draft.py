"""A backend that runs a drafter: its commands, and memory for the rows of its nodes.

Owns the network, the ring of features, and memory for nodes. Knows nothing of the target except the
width of its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.backend.dispatch import Answers, Dispatcher, handlers_of, handles, result
from luceasync.backend.node_handlers import NO_ROOM, ROOM, piece_of
from luceasync.backend.stage import lent_memory
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import copy_beside
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import WireError
from luceasync.ipc.wiring import ParentConnection
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.devices import host_memory, page_lock_for
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.remote.tensors import Spec, tensor_bytes, views
from luceasync.pipeline.remote.wire import DropNode, ExportNode, FillNode
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.draft import draft_ops_on, open_network
from luceasync.speculation.dflash.graph import NUM_WARM_UPS
from luceasync.speculation.dflash.load import ring_of, runner_on
from luceasync.speculation.dflash.passes import LocalDraft

log = logging.getLogger(__name__)


class RowMemory(Protocol):
    """Memory for rows of nodes. `spec`: shape and dtype of the rows."""

    def allocate(self, place: int, spec: Spec) -> Tensor:
        """Rows for a new node, with arbitrary content. Raises MemoryError, and WireError for a
        place outside the memory."""
        ...

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        """Rows of a node from its row `begin` on. Raises WireError for rows that it does not
        have."""
        ...


class LentRows:
    """A RowMemory that the parent allocates. A place is the offset at which a node begins."""

    def __init__(self, memory: SealedMemory, row_bytes: int) -> None:
        self._memory = memory
        self._row_bytes = row_bytes

    def allocate(self, place: int, spec: Spec) -> Tensor:
        return self.rows(place, 0, spec)

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        first = place + begin * self._row_bytes
        end = first + num_rows * self._row_bytes
        if end > self._memory.num_bytes:
            raise WireError(f"rows until byte {end} of a memory of {self._memory.num_bytes}")
        return views(self._memory.view[first:end], [spec])[0]


class OwnRows:
    """A RowMemory in this process. A place is the number of a node."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._nodes: dict[int, Tensor] = {}

    def allocate(self, place: int, spec: Spec) -> Tensor:
        [rows] = views(self._memory.allocate(tensor_bytes(spec)), [spec])
        self._nodes[place] = rows
        return rows

    def rows(self, place: int, begin: int, spec: Spec) -> Tensor:
        (num_rows, _), _ = spec
        whole = self.node(place)
        if begin + num_rows > len(whole):
            raise WireError(f"rows until {begin + num_rows} of a node that has {len(whole)}")
        return whole[begin : begin + num_rows]

    def node(self, place: int) -> Tensor:
        """All rows of a node. Raises WireError."""
        if place not in self._nodes:
            raise WireError(f"node {place} is not here")
        return self._nodes[place]

    def drop(self, place: int) -> None:
        """Forget a node, if it exists."""
        self._nodes.pop(place, None)


class SentEmbedding:
    """The part of the target's embedding that the drafter has: the rows that were sent with a
    proposal, and the row of the mask token. Tokens are numbers of rows here."""

    def __init__(self, mask: Tensor, num_lanes: int, device: torch.device) -> None:
        """mask: [hidden]."""
        self._rows = mask.to(device).repeat(num_lanes + 1, 1)
        self.mask_token = num_lanes

    def replace(self, rows: Tensor) -> list[int]:
        """Replace the rows by `rows` [entries, hidden]. Returns their tokens."""
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        return [*range(len(rows))]

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [..., hidden] of tokens int64 [...]."""
        return F.embedding(tokens, self._rows)


class DraftHandlers:
    """Runs the passes of a drafter."""

    def __init__(
        self,
        draft: LocalDraft[Tensor],
        embedding: SentEmbedding,
        command: wire.LoadDraft,
        memory: RowMemory,
    ) -> None:
        self._draft = draft
        self._embedding = embedding
        self._sizes = command.sizes
        self._short_rows = sorted(command.short_rows)
        self._memory = memory

    @handles(wire.ProposeBlock)
    def propose(self, command: wire.ProposeBlock, tensors: list[Tensor]) -> Answers:
        [rows] = tensors
        tokens, shape = self._embedding.replace(rows), RoundShape(command.block)
        hidden = self._draft.propose(tokens, command.lanes, command.begins, shape)
        return [(wire.DraftRows(self._draft.num_unsettled), [hidden])]

    @handles(wire.AbsorbPaths)
    def absorb(self, command: wire.AbsorbPaths, tensors: list[Tensor]) -> None:
        [kept] = tensors
        lanes, num_rows = command.lanes, command.num_rows
        taps = kept.new_zeros(len(kept), len(lanes), num_rows, self._sizes.hidden)
        paths = [range(length) for length in command.lengths]
        begin = 0
        for entry, path in enumerate(paths):
            taps[:, entry, : len(path)] = kept[:, begin : begin + len(path)]
            begin += len(path)
        self._draft.absorb([*taps], lanes, command.begins, paths, num_rows)

    @handles(wire.AbsorbChunk)
    def absorb_chunk(self, command: wire.AbsorbChunk, tensors: list[Tensor]) -> None:
        [kept] = tensors
        num_tokens = command.num_tokens
        if whole := [n for n in self._short_rows if n >= num_tokens]:
            # padded like the target's passes
            kept = F.pad(kept, (0, 0, 0, whole[0] - num_tokens))
        taps = [tap[None] for tap in kept]
        self._draft.absorb_chunk(taps, command.lane, command.begin, num_tokens)

    @handles(wire.ResetDraftLane)
    def reset(self, command: wire.ResetDraftLane, tensors: list[Tensor]) -> None:
        self._draft.reset(command.lane, command.begin)

    @handles(wire.SaveRows)
    def save(self, command: wire.SaveRows, tensors: list[Tensor]) -> Answers:
        ring = self._draft.ring
        rows = ring.rows(command.lane, command.begin, command.end)
        try:
            kept = self._memory.allocate(command.place, self._sizes.features(len(rows)))
        except MemoryError:
            return NO_ROOM
        copy_beside([(_bytes(kept), _bytes(rows))])
        ring.platform.synchronize()
        return ROOM

    @handles(wire.RestoreRows)
    def restore(self, command: wire.RestoreRows, tensors: list[Tensor]) -> Answers:
        parts = [
            self._memory.rows(place, begin, self._sizes.features(end - begin))
            for place, begin, end in command.parts
        ]
        self._draft.restore(command.lane, command.begin, torch.cat(parts))
        return result()


class RowHandlers:
    """Holds rows of nodes in this process's own memory."""

    def __init__(self, rows: OwnRows, sizes: wire.DraftSizes) -> None:
        self._rows = rows
        self._sizes = sizes

    @handles(wire.AdoptRows)
    def adopt(self, command: wire.AdoptRows, tensors: list[Tensor]) -> Answers:
        try:
            self._rows.allocate(command.place, self._sizes.features(command.num_rows))
        except MemoryError:
            return NO_ROOM
        return ROOM

    @handles(FillNode)
    def fill(self, command: FillNode, tensors: list[Tensor]) -> None:
        [piece] = tensors
        piece_of([self._rows.node(command.node)], command).copy_(piece)

    @handles(ExportNode)
    def export(self, command: ExportNode, tensors: list[Tensor]) -> Answers:
        return result(piece_of([self._rows.node(command.node)], command))

    @handles(DropNode)
    def drop(self, command: DropNode, tensors: list[Tensor]) -> None:
        self._rows.drop(command.node)


def _bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8)


class DraftBackend:
    """The work of one process, from the greeting to the end."""

    def __init__(self, parent: ParentConnection, draft_dir: Path, names: Mapping[str, str]) -> None:
        """`names`: the devices that are offered under different names."""
        self._parent = parent
        self._draft_dir = draft_dir
        self._names = names
        self._closing = ExitStack()
        self._dispatcher = Dispatcher(parent.channel)
        self._dispatcher.handlers |= handlers_of(self)

    @torch.inference_mode()
    def run(self) -> None:
        """Run commands until the parent is gone, which raises ChannelClosed."""
        self._dispatcher.serve()

    def close(self) -> None:
        """Free everything."""
        self._closing.close()
        self._parent.close()

    @handles(wire.LoadDraft)
    def load(self, command: wire.LoadDraft, tensors: list[Tensor]) -> None:
        del self._dispatcher.handlers[wire.LoadDraft]  # once
        [mask] = tensors
        self._dispatcher.load(lambda advance: self._load(command, mask, advance))

    def _load(self, command: wire.LoadDraft, mask: Tensor, advance: Callable[[int], None]) -> None:
        if command.has_one_thread:
            torch.set_num_threads(1)
        name = self._names.get(command.device, command.device)
        platform = open_platform(name)
        self._parent.channel.register(page_lock_for([name]))
        embedding = SentEmbedding(mask, command.num_lanes, platform.device)
        memory = self._row_memory(name, command)
        network = open_network(
            self._draft_dir,
            replace(command.spec, mask_token=embedding.mask_token),
            platform.ops,
            embedding.embed,
            num_lanes=command.num_lanes,
            max_ctx_tokens=command.max_ctx_tokens,
            dtype=torch_dtype(command.dtype),
            device=platform.device,
            advance=advance,
            choose=draft_ops_on(platform),
            transfer=platform.row_transfer(),
        )
        self._closing.callback(network.close)
        run = runner_on(platform)
        self._closing.callback(run.close)
        draft: LocalDraft[Tensor] = LocalDraft(
            network,
            ring_of(network, platform, command.num_lanes, command.max_ctx_tokens),
            lambda rows, anchors, budget: rows,  # the target's head is in another process
            run=run,
            reach_for=network.reach_for,
            short_rows=command.short_rows,
        )
        platform.warm_up(lambda: draft.warm_up(command.shapes), NUM_WARM_UPS)
        self._dispatcher.sizes = command.sizes
        handlers = DraftHandlers(draft, embedding, command, memory)
        self._dispatcher.handlers |= handlers_of(handlers)
        log.info("a drafter of %d layers is loaded", command.spec.num_layers)

    def _row_memory(self, name: str, command: wire.LoadDraft) -> RowMemory:
        """Memory lent by the parent, or otherwise our own, which has its own commands."""
        lent = lent_memory(self._parent, [name])
        if lent is not None:
            return LentRows(lent, command.sizes.row_bytes)
        memory = host_memory([name], command.node_bytes)
        self._closing.callback(memory.close)
        rows = OwnRows(memory)
        self._dispatcher.handlers |= handlers_of(RowHandlers(rows, command.sizes))
        return rows
