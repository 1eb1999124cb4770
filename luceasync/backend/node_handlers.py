"""Commands about nodes of a stage, which lie in memory lent by the parent, or in this process.

Copies of a device run concurrently with later commands. Their completion is reported to the parent
outside the channel, by the thread that detects it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from luceasync.backend.dispatch import Answers, handles, result
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import Ticket, joined
from luceasync.host_cache.nodes import Nodes, Span
from luceasync.host_cache.shard_nodes import tensors_in
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import WireError
from luceasync.nodes import NodeKey
from luceasync.pipeline.remote import answers, wire

NO_ROOM: Answers = [(answers.NodeRoom(is_there=False), ())]
ROOM: Answers = [(answers.NodeRoom(is_there=True), ())]

log = logging.getLogger(__name__)


class NodeHandlers:
    """Holds the nodes of one stage."""

    def __init__(
        self,
        parts: Sequence[Nodes],
        memory: HostMemory,
        set_offsets: Callable[[Sequence[int]], None],
        complete: Callable[[int], None],
    ) -> None:
        """`parts`: of each shard; `set_offsets` is called with the places of the next regions in
        `memory`, if the parent sends them; `complete`, which any thread may call, completes a
        ticket."""
        self._parts = parts
        self._memory = memory
        self._set_offsets = set_offsets
        self._complete = complete
        self._nodes: set[int] = set()

    @handles(wire.SaveNode)
    def save(
        self, command: wire.SaveNode, tensors: list[Tensor]
    ) -> Iterator[tuple[answers.NodeRoom, Sequence[Tensor]]]:
        key, span = _key(command.node), Span(command.begin, command.end, command.with_state)
        self._set_offsets(command.regions)
        try:
            copies = joined([part.save(command.lane, key, span) for part in self._parts])
        except MemoryError:
            if not command.answers:
                raise
            self._forget(key)
            yield answers.NodeRoom(is_there=False), ()
            return
        self._nodes.add(command.node)
        if command.answers:
            yield from self._answer_copies(copies, command.ticket)
        else:
            copies.when_done(lambda: self._complete_copies(copies, command.ticket))

    @handles(wire.RestoreNodes)
    def restore(
        self, command: wire.RestoreNodes, tensors: list[Tensor]
    ) -> Iterator[tuple[answers.NodeRoom, Sequence[Tensor]]]:
        keys = [self._known(node) for node in command.nodes]
        lane, num_tokens = command.lane, command.num_tokens
        copies = joined([part.restore(lane, keys, num_tokens) for part in self._parts])
        yield from self._answer_copies(copies, command.ticket)

    def _answer_copies(
        self, copies: Ticket, ticket: int
    ) -> Iterator[tuple[answers.NodeRoom, Sequence[Tensor]]]:
        """Raise the error of finished copies, if there is one."""
        have_arrived = copies.is_done
        if have_arrived:
            copies.wait()
        yield answers.NodeRoom(is_there=True, have_arrived=have_arrived), ()
        if not have_arrived:
            copies.when_done(lambda: self._complete_copies(copies, ticket))

    def _complete_copies(self, copies: Ticket, ticket: int) -> None:
        """Runs in a thread that has no caller to raise to: an error ends the process."""
        try:
            copies.wait()
            self._complete(ticket)
        except Exception:
            log.critical("copies between lanes and nodes have failed", exc_info=True)
            os._exit(1)

    @handles(wire.HoldNode)
    def hold(self, command: wire.HoldNode, tensors: list[Tensor]) -> None:
        key = self._known(command.node)
        for part in self._parts:
            part.hold(command.lane, key, command.end)

    @handles(wire.DropNode)
    def drop(self, command: wire.DropNode, tensors: list[Tensor]) -> None:
        for part in self._parts:
            part.drop(_key(command.node), state_only=command.state_only)
        if not command.state_only:
            self._nodes.discard(command.node)

    @handles(wire.AdoptNode)
    def adopt(self, command: wire.AdoptNode, tensors: list[Tensor]) -> Answers:
        key, span = _key(command.node), Span(command.begin, command.end, command.with_state)
        self._set_offsets(command.regions)
        try:
            for part in self._parts:
                regions = [self._memory.allocate(size) for size in part.sizes.of(span) if size]
                part.adopt(key, span, tensors_in(regions, part.shapes(span)))
        except MemoryError:
            self._forget(key)
            return NO_ROOM
        self._nodes.add(command.node)
        return ROOM

    @handles(wire.ExportNode)
    def export(self, command: wire.ExportNode, tensors: list[Tensor]) -> Answers:
        return result(self._piece(command))

    @handles(wire.FillNode)
    def fill(self, command: wire.FillNode, tensors: list[Tensor]) -> None:
        [piece] = tensors
        self._piece(command).copy_(piece)

    def _piece(self, command: wire.ExportNode | wire.FillNode) -> Tensor:
        key = self._known(command.node)
        tensors = [tensor for part in self._parts for tensor in part.export(key).values()]
        return piece_of(tensors, command)

    def _known(self, node: int) -> NodeKey:
        if node not in self._nodes:
            raise WireError(f"node {node} is not here")
        return _key(node)

    def _forget(self, key: NodeKey) -> None:
        for part in self._parts:
            part.drop(key)


def piece_of(tensors: Sequence[Tensor], command: wire.ExportNode | wire.FillNode) -> Tensor:
    """The bytes of a node's tensors that a command refers to, uint8 [bytes]. Raises WireError."""
    if command.index >= len(tensors):
        raise WireError(f"tensor {command.index} of a node of {len(tensors)}")
    whole = tensors[command.index].view(-1).view(torch.uint8)
    end = command.begin + command.num_bytes
    if end > len(whole):
        raise WireError(f"bytes until {end} of a tensor of {len(whole)}")
    return whole[command.begin : end]


def _key(node: int) -> NodeKey:
    return NodeKey(node.to_bytes(8))


class LentMemory:
    """A HostMemory that the parent allocates. It keeps a region until this process no longer reads
    or writes it."""

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory
        self._offsets: deque[int] = deque()

    def set_offsets(self, offsets: Sequence[int]) -> None:
        """Set where the next regions lie, in the order in which they will be allocated."""
        self._offsets = deque(offsets)

    def allocate(self, num_bytes: int) -> memoryview:
        """See HostMemory. Raises ValueError for a region outside the memory."""
        if not self._offsets:
            raise ValueError(f"no offset was given for {num_bytes} bytes")
        begin = self._offsets.popleft()
        if begin + num_bytes > self._memory.num_bytes:
            raise ValueError(
                f"{num_bytes} bytes at {begin} of a memory of {self._memory.num_bytes}"
            )
        return self._memory.view[begin : begin + num_bytes]

    def allocate_soon(self, num_bytes: int) -> memoryview:
        return self.allocate(num_bytes)

    def close(self) -> None:
        """No-op: the memory belongs to the parent."""
