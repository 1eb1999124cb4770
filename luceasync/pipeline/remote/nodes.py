"""What nodes hold of a stage in another process, which copies it to and from its lanes.

Two bodies: their bytes lie in memory that both processes map, allocated here, so that saving and
restoring moves nothing through the channel; or in the other process alone, streamed on demand.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from luceasync.errors import StageFailed
from luceasync.host_cache.arena import Arena
from luceasync.host_cache.copy_stream import COPY_TIMEOUT_S, Callback, DoneTicket, Ticket
from luceasync.host_cache.nodes import ChainedNode, NodeSizes, Span
from luceasync.host_cache.shard_nodes import NodeLayout, tensors_in
from luceasync.kv.cache import Shape
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.tensors import PIECE_BYTES

AHEAD_TIMEOUT_S = 600.0  # of a save behind passes that CPUs have yet to run


class RemoteTicket:
    """See Ticket: copies that another process makes. Keeps their memory until they are over."""

    def __init__(
        self,
        failure: Callable[[str], Exception],
        memory: object,
        timeout_s: float = COPY_TIMEOUT_S,
    ) -> None:
        """`failure` makes the error of wait() if the process has ended before; wait() gives up
        after `timeout_s`.
        """
        self._failure = failure
        self._timeout_s = timeout_s
        self._memory: object = memory
        self._is_over = threading.Event()
        self._have_arrived = False
        self._calls: list[Callback] = []
        self._lock = threading.Lock()

    def complete(self, have_arrived: bool) -> None:
        """The copies have arrived, or never will. Call once, from any thread."""
        with self._lock:
            self._have_arrived = have_arrived
            self._memory = None
            calls, self._calls = self._calls, []
            self._is_over.set()
        for call in calls:
            call()

    @property
    def is_done(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        if not self._is_over.wait(self._timeout_s):
            raise TimeoutError(f"copies of another process: not over within {self._timeout_s:g} s")
        if not self._have_arrived:
            raise self._failure("it has ended, and copies had not arrived")

    def when_done(self, call: Callback) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._calls.append(call)
                return
        call()


class NodeRegion(NamedTuple):
    """Bytes of a node, and whether they are the state at its end."""

    view: memoryview
    is_state: bool


@dataclass(slots=True)
class RemoteNode:
    """The number under which the other process has a node, and its regions if they were allocated
    here. Nothing may read them until the copies of `saved` have arrived.
    """

    number: int
    regions: list[NodeRegion]
    saved: Ticket = field(default_factory=DoneTicket)


class _LaneRegions(NamedTuple):
    """Regions that a lane reads, of tokens `[begin, end)`."""

    begin: int
    end: int
    regions: Sequence[NodeRegion]

    def is_within(self, other: _LaneRegions) -> bool:
        """Whether its tokens are among those of the other."""
        return other.begin <= self.begin and self.end <= other.end


class NodeBytes(Protocol):
    """Where the bytes of nodes lie, and how they come and go."""

    def allocate(self, span: Span) -> list[NodeRegion]:
        """Memory for a node, if it is allocated here. Raises MemoryError."""
        ...

    def offsets(self, regions: Sequence[NodeRegion]) -> tuple[int, ...]:
        """Where these are in the memory that was lent."""
        ...

    def read(self, node: RemoteNode, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """The tensors of a node, on the host."""
        ...

    def write(
        self, node: RemoteNode, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> None:
        """Copy tensors of these shapes to where the node is."""
        ...


class RemoteContents:
    """See Contents. Copies of the other process's devices go on beside this one."""

    def __init__(
        self,
        connection: BackendConnection,
        parts: NodeLayout,
        node_bytes: NodeBytes,
        *,
        saves_ahead: bool = False,
    ) -> None:
        """`saves_ahead`: the other process is told to save, and not asked whether there is room,
        for which it would have to finish the passes before.
        """
        self._connection = connection
        self._saves_ahead = saves_ahead
        self._parts = parts
        self._bytes = node_bytes
        self._of_lanes: dict[int, list[_LaneRegions]] = defaultdict(list)
        self._replaced: dict[int, list[_LaneRegions]] = {}  # queued passes may still read them
        self._last_ticket = 0
        self._last_number = 0  # never used again: the other process may still hold an old one

    @property
    def sizes(self) -> NodeSizes:
        return self._parts.sizes

    def shapes(self, span: Span) -> dict[str, Shape]:
        return self._parts.shapes(span)

    def save(self, lane: int, span: Span) -> tuple[RemoteNode, Ticket]:
        node = self._allocate(span)
        offsets, ticket = self._bytes.offsets(node.regions), self._next_ticket()
        command = wire.SaveNode(
            node.number,
            lane,
            span.begin,
            span.end,
            span.with_state,
            ticket,
            offsets,
            answers=not self._saves_ahead,
        )
        # The device copies after all queued passes: what these may have read is free with the copy.
        memory = [node.regions, self._replaced.pop(lane, ())]
        if self._saves_ahead:
            self._connection.send(command)
            node.saved = self._expected(ticket, memory, AHEAD_TIMEOUT_S)
        else:
            node.saved = self._start_copies(command, memory)
        return node, node.saved

    def restore(
        self, lane: int, chain: Sequence[ChainedNode[RemoteNode]], num_tokens: int
    ) -> Ticket:
        numbers = tuple(node.number for _, node in chain)
        command = wire.RestoreNodes(lane, numbers, num_tokens, self._next_ticket())
        return self._start_copies(command, [node.regions for _, node in chain])

    def export(self, span: Span, content: RemoteNode) -> dict[str, Tensor]:
        content.saved.wait()
        return self._bytes.read(content, self.shapes(span))

    def adopt(self, span: Span, tensors: Mapping[str, Tensor]) -> RemoteNode:
        """See Contents; the tensors are copied to where the other process reads them."""
        node = self._allocate(span)
        self._ask_for_room(self._adopt_command(span, node))
        self._bytes.write(node, tensors, self.shapes(span))
        return node

    def drop(self, content: RemoteNode, *, state_only: bool) -> None:
        """See Contents. The process hears of it before anything else can get the same memory."""
        self._connection.send_if_open(wire.DropNode(content.number, state_only))
        kept = [region for region in content.regions if state_only and not region.is_state]
        content.regions = kept

    def readopt(self, span: Span, content: RemoteNode) -> bool:
        """Hand a node to a process that takes the place of one that has ended. False if its bytes
        lay in that one alone, or had not all been copied.
        """
        try:
            content.saved.wait()
        except StageFailed:
            return False
        if not content.regions:
            return False
        command = self._adopt_command(span, content)
        return self._connection.ask(command, answers.NodeRoom).is_there

    def hold(self, lane: int, span: Span, content: RemoteNode, end: int) -> None:
        """See Nodes. Memory that was allocated here stays allocated while the other process reads
        it; what it read of these tokens before is released.
        """
        read, new = self._of_lanes[lane], _LaneRegions(span.begin, end, tuple(content.regions))
        self._replaced.setdefault(lane, []).extend(each for each in read if each.is_within(new))
        self._of_lanes[lane] = [*(each for each in read if not each.is_within(new)), new]
        self._connection.send_soon(wire.HoldNode(lane, content.number, end))

    def release(self, lane: int) -> None:
        """See Nodes. The process has been told to reset the lane."""
        self._of_lanes.pop(lane, None)
        self._replaced.pop(lane, None)

    def close(self) -> None:
        """Do nothing: the stage closes the connection."""

    def _allocate(self, span: Span) -> RemoteNode:
        """Raises MemoryError."""
        regions = self._bytes.allocate(span)
        self._last_number += 1
        return RemoteNode(self._last_number, regions)

    def _adopt_command(self, span: Span, node: RemoteNode) -> wire.AdoptNode:
        offsets = self._bytes.offsets(node.regions)
        return wire.AdoptNode(node.number, span.begin, span.end, span.with_state, offsets)

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _start_copies(self, command: wire.SaveNode | wire.RestoreNodes, memory: object) -> Ticket:
        """Raises MemoryError if there is no room; nothing is copied then."""
        if self._ask_for_room(command).have_arrived:
            return DoneTicket()
        return self._expected(command.ticket, memory)

    def _expected(self, ticket: int, memory: object, timeout_s: float = COPY_TIMEOUT_S) -> Ticket:
        """The ticket of copies whose end the process will tell."""
        expected = RemoteTicket(self._connection.failure, memory, timeout_s)
        self._connection.expect(ticket, expected.complete)
        return expected

    def _ask_for_room(self, command: wire.Command) -> answers.NodeRoom:
        """Raises MemoryError if there is none; the process holds nothing of the node then."""
        room = self._connection.ask(command, answers.NodeRoom)
        if not room.is_there:
            raise MemoryError("no room for a node in the memory of another process")
        return room


class SharedBytes:
    """See NodeBytes: in memory that both processes map."""

    def __init__(self, parts: NodeLayout, arena: Arena) -> None:
        self._parts = parts
        self._arena = arena

    def allocate(self, span: Span) -> list[NodeRegion]:
        sizes = self._parts.region_bytes(span)
        return [NodeRegion(self._arena.allocate(size), is_state) for size, is_state in sizes]

    def offsets(self, regions: Sequence[NodeRegion]) -> tuple[int, ...]:
        return tuple(self._arena.offset_of(region.view) for region in regions)

    def read(self, node: RemoteNode, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """See NodeBytes; the views keep their memory, whatever becomes of the node."""
        return tensors_in([region.view for region in node.regions], shapes)

    def write(
        self, node: RemoteNode, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> None:
        for name, own in self.read(node, shapes).items():
            own.copy_(tensors[name])


class StreamedBytes:
    """See NodeBytes: in the other process's memory alone."""

    def __init__(self, connection: BackendConnection) -> None:
        self._connection = connection

    def allocate(self, span: Span) -> list[NodeRegion]:
        return []

    def offsets(self, regions: Sequence[NodeRegion]) -> tuple[int, ...]:
        return ()

    def read(self, node: RemoteNode, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        read_node(self._connection, node.number, [*tensors.values()])
        return tensors

    def write(
        self, node: RemoteNode, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> None:
        write_node(self._connection, node.number, [tensors[name] for name in shapes])


def read_node(connection: BackendConnection, node: int, into: Sequence[Tensor]) -> None:
    """Stream all tensors of a node, in the order in which the other process has them."""
    for index, begin, piece in _pieces(into):
        [part] = connection.call(wire.ExportNode(node, index, begin, len(piece)))
        piece.copy_(part)


def write_node(connection: BackendConnection, node: int, tensors: Sequence[Tensor]) -> None:
    """Stream tensors to a node that the other process has room for."""
    for index, begin, piece in _pieces(tensors):
        connection.send(wire.FillNode(node, index, begin, len(piece)), [piece])


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Each tensor's bytes in turn: its index, where the piece begins, and a view of the piece."""
    for index, tensor in enumerate(tensors):
        whole = tensor.view(-1).view(torch.uint8)
        for begin in range(0, len(whole), PIECE_BYTES):
            yield index, begin, whole[begin : begin + PIECE_BYTES]
