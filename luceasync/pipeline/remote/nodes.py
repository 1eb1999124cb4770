"""What nodes hold of a stage in another process, which copies it to and from its lanes.

Two bodies: their bytes lie in memory that both map, made and given out here, so that a node in
memory moves nothing; or there alone, and are streamed where somebody wants them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from luceasync.errors import ConfigError, StageFailed
from luceasync.host_cache.arena import Arena, NoPageLock
from luceasync.host_cache.copy_stream import COPY_TIMEOUT_S, Arrived, Call, Ticket
from luceasync.host_cache.nodes import Chained, NodeSizes, Span
from luceasync.host_cache.shard_nodes import NodeParts, tensors_in
from luceasync.ipc.memory import SealedMemory
from luceasync.kv.cache import Shape
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.link import Link

# Memory for the nodes of another process: made and given out here, mapped by both. Knows no
# node and no process.


ALIGN_BYTES = 2 << 20  # of a memory for nodes
SLAB_BYTES = 32 << 20  # of it, whose pages are made at a time
SPARE_BYTES = 256 << 20  # of it, with pages that nobody uses yet


def whole_bytes(num_bytes: float) -> int:
    """Enough for so many, in whole pages of any kind."""
    return -(-int(num_bytes) // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES


def lend_memory(
    num_bytes: int, least_spare_bytes: int, closing: ExitStack
) -> tuple[Arena, SealedMemory]:
    """New memory, and what is lent of it; both go with `closing`. Pages are made while at least
    `least_spare_bytes` have none. Raises ConfigError where the system shares no memory.
    """
    try:
        memory = SealedMemory.create("luceasync-nodes", num_bytes, populate=False)
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-memory: no {num_bytes} bytes can be shared with another process "
            f"({error.strerror}); --ipc-transport stream shares none"
        ) from None
    closing.callback(memory.close)
    never = threading.Event()  # pages are made when they are needed, not while nothing runs
    spare_bytes = max(SPARE_BYTES, least_spare_bytes)
    arena = Arena(num_bytes, NoPageLock(), SLAB_BYTES, never, spare_bytes, mapping=memory.mapping)
    closing.callback(arena.close)
    return arena, memory


# Tickets of copies that another process makes. Knows no node and no lane; who asks for copies
# says which memory they read or write.


class RemoteTicket:
    """See Ticket. Until the copies are over, their memory is nobody else's."""

    def __init__(self, failure: Callable[[str], Exception], memory: object) -> None:
        """`failure` makes what wait() raises where the process has ended before."""
        self._failure = failure
        self._memory: object = memory
        self._is_over = threading.Event()
        self._have_arrived = False
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def over(self, have_arrived: bool) -> None:
        """They have arrived, or never will. Any thread may say so, once."""
        with self._lock:
            self._have_arrived = have_arrived
            self._memory = None
            calls, self._calls = self._calls, []
            self._is_over.set()
        for call in calls:
            call()

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """See Ticket."""
        if not self._is_over.wait(COPY_TIMEOUT_S):
            raise TimeoutError(f"copies of another process: not over within {COPY_TIMEOUT_S:g} s")
        if not self._have_arrived:
            raise self._failure("it has ended, and copies had not arrived")

    def when_done(self, call: Call) -> None:
        """See Ticket."""
        with self._lock:
            if not self._is_over.is_set():
                self._calls.append(call)
                return
        call()


class Region(NamedTuple):
    """Bytes of a node, and whether they are the state at its end."""

    view: memoryview
    is_state: bool


@dataclass(slots=True)
class Held:
    """The number under which the other process has it; `regions` where we gave them. Until the
    copies of `saved` have arrived nobody may read them.
    """

    number: int
    regions: list[Region]
    saved: Ticket = field(default_factory=Arrived)


class _Read(NamedTuple):
    """Regions that a lane is read from, of tokens `[begin, end)`."""

    begin: int
    end: int
    regions: Sequence[Region]

    def is_within(self, other: _Read) -> bool:
        """Whether it is of tokens of the other one."""
        return other.begin <= self.begin and self.end <= other.end


class NodeBytes(Protocol):
    """Where the bytes of nodes lie, and how they come and go."""

    def allocate(self, span: Span) -> list[Region]:
        """Memory for a node, where we give it out. Raises MemoryError."""
        ...

    def places(self, regions: Sequence[Region]) -> tuple[int, ...]:
        """Where that is, in the other process's words."""
        ...

    def read(self, held: Held, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """The tensors of a node, on the host."""
        ...

    def write(self, held: Held, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        """Copy tensors of these shapes to where the node is."""
        ...


class RemoteContents:
    """See Contents. Copies of a device go on there while this process does other things."""

    def __init__(self, link: Link, parts: NodeParts, content: NodeBytes) -> None:
        self._link = link
        self._parts = parts
        self._bytes = content
        self._of_lanes: dict[int, list[_Read]] = defaultdict(list)  # that they are read from
        self._replaced: dict[int, list[_Read]] = {}  # that passes under way may still read
        self._next_ticket = 1
        self._next_number = 1  # none comes again: the other process may still hold an old one

    @property
    def sizes(self) -> NodeSizes:
        """See Nodes."""
        return self._parts.sizes

    def shapes(self, span: Span) -> dict[str, Shape]:
        """See Nodes."""
        return self._parts.shapes(span)

    def save(self, lane: int, span: Span) -> tuple[Held, Ticket]:
        """See Contents. Raises MemoryError."""
        held = self._new(span)
        at, ticket = self._bytes.places(held.regions), self._number_of_ticket()
        order = wire.Save(held.number, lane, span.begin, span.end, span.with_state, ticket, at)
        # What passes before it may have read is free with it: the device takes out behind them.
        held.saved = self._ask_for_copies(order, [held.regions, self._replaced.pop(lane, ())])
        return held, held.saved

    def restore(self, lane: int, chain: Sequence[Chained[Held]], num_tokens: int) -> Ticket:
        """See Contents."""
        numbers = tuple(held.number for _, held in chain)
        order = wire.Restore(lane, numbers, num_tokens, self._number_of_ticket())
        return self._ask_for_copies(order, [held.regions for _, held in chain])

    def export(self, span: Span, content: Held) -> dict[str, Tensor]:
        """See Contents."""
        content.saved.wait()
        return self._bytes.read(content, self.shapes(span))

    def adopt(self, span: Span, tensors: Mapping[str, Tensor]) -> Held:
        """See Contents; they are copied to where the other process has them. Raises MemoryError."""
        held = self._new(span)
        at = self._bytes.places(held.regions)
        self._ask_for_room(wire.Adopt(held.number, span.begin, span.end, span.with_state, at))
        self._bytes.write(held, tensors, self.shapes(span))
        return held

    def drop(self, content: Held, *, state_only: bool) -> None:
        """See Contents. The process hears of it before it is told of anything else that might lie
        in the same place.
        """
        self._link.mention(wire.Drop(content.number, state_only))
        kept = [region for region in content.regions if state_only and not region.is_state]
        content.regions = kept

    def renew(self, span: Span, content: Held) -> bool:
        """Have it held by a process that takes the place of one that has ended; False: its bytes
        lay there alone, or had not all come.
        """
        try:
            content.saved.wait()
        except StageFailed:
            return False
        if not content.regions:
            return False
        at = self._bytes.places(content.regions)
        order = wire.Adopt(content.number, span.begin, span.end, span.with_state, at)
        return self._link.ask(order, wire.Room).is_there

    def hold(self, lane: int, span: Span, content: Held, end: int) -> None:
        """See Nodes. Memory that we gave stays ours as long as the other process reads it: not what
        it had of these tokens before.
        """
        read, new = self._of_lanes[lane], _Read(span.begin, end, tuple(content.regions))
        self._replaced.setdefault(lane, []).extend(each for each in read if each.is_within(new))
        self._of_lanes[lane] = [*(each for each in read if not each.is_within(new)), new]
        self._link.tell_soon(wire.Hold(lane, content.number, end))

    def release(self, lane: int) -> None:
        """See Nodes. The process has been told that the lane begins anew."""
        self._of_lanes.pop(lane, None)
        self._replaced.pop(lane, None)

    def close(self) -> None:
        """See Contents: whoever has the link closes it."""

    def _new(self, span: Span) -> Held:
        """Room for a node, where we give it out. Raises MemoryError."""
        held = Held(self._next_number, self._bytes.allocate(span))
        self._next_number += 1
        return held

    def _number_of_ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _ask_for_copies(self, order: wire.Save | wire.Restore, memory: object) -> Ticket:
        """Their ticket. Raises MemoryError where there is no room; nothing is copied then."""
        if self._ask_for_room(order).have_arrived:
            return Arrived()
        ticket = RemoteTicket(self._link.failure, memory)
        self._link.expect(order.ticket, ticket.over)
        return ticket

    def _ask_for_room(self, order: wire.Save | wire.Restore | wire.Adopt) -> wire.Room:
        """Raise MemoryError where there is none; the process holds nothing of it then."""
        room = self._link.ask(order, wire.Room)
        if not room.is_there:
            raise MemoryError("no room for a node in the memory of another process")
        return room


class SharedBytes:
    """In memory that both processes map."""

    def __init__(self, parts: NodeParts, arena: Arena) -> None:
        self._parts = parts
        self._arena = arena

    def allocate(self, span: Span) -> list[Region]:
        """See NodeBytes."""
        sizes = self._parts.region_bytes(span)
        return [Region(self._arena.allocate(size), is_state) for size, is_state in sizes]

    def places(self, regions: Sequence[Region]) -> tuple[int, ...]:
        """See NodeBytes."""
        return tuple(self._arena.offset_of(region.view) for region in regions)

    def read(self, held: Held, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """See NodeBytes; views keep their memory, whatever becomes of the node."""
        return tensors_in([region.view for region in held.regions], shapes)

    def write(self, held: Held, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        """See NodeBytes."""
        for name, own in self.read(held, shapes).items():
            own.copy_(tensors[name])


class StreamedBytes:
    """In the other process's memory alone."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def allocate(self, span: Span) -> list[Region]:
        """See NodeBytes."""
        return []

    def places(self, regions: Sequence[Region]) -> tuple[int, ...]:
        """See NodeBytes."""
        return ()

    def read(self, held: Held, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        """See NodeBytes."""
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for index, begin, piece in _pieces(tensors):
            order = wire.Export(held.number, index, begin, len(piece))
            [came] = self._link.fetch(order, [((len(piece),), torch.uint8)])
            piece.copy_(came)
        return tensors

    def write(self, held: Held, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> None:
        """See NodeBytes."""
        for index, begin, piece in _pieces({name: tensors[name] for name in shapes}):
            self._link.tell(wire.Fill(held.number, index, begin, len(piece)), [piece])


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Bytes of each tensor in turn: its index, where the piece begins, and the piece."""
    for index, tensor in enumerate(tensors.values()):
        whole = tensor.view(-1).view(torch.uint8)
        for begin in range(0, len(whole), wire.PIECE_BYTES):
            yield index, begin, whole[begin : begin + wire.PIECE_BYTES]
