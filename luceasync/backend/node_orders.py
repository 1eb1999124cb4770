"""Orders about nodes: they lie in memory that was lent, or in this process's own.

Copies of a device go on while other orders are done; when they have arrived is told beside the
channel, from whichever thread hears it.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from luceasync.backend.pass_orders import Answers, Table
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import Ticket, together
from luceasync.host_cache.nodes import Nodes, Span
from luceasync.host_cache.shard_nodes import tensors_in
from luceasync.ipc.channel import Received
from luceasync.ipc.memory import SealedMemory
from luceasync.nodes import NodeKey
from luceasync.pipeline.remote import wire

log = logging.getLogger(__name__)


class NodeOrders:
    """Holds nodes of one stage. `table`: what is done with each message."""

    def __init__(
        self,
        link: Answers,
        parts: Sequence[Nodes],
        memory: HostMemory,
        lay: Callable[[Sequence[int]], None],
        limits: tuple[int, int],
        tell: Callable[[int], None],
    ) -> None:
        """`parts`: of each shard; `lay` is told where the next regions of `memory` lie, where the
        other end says that. `limits`: lanes, and tokens of each. `tell`, which is called in any
        thread, says that the copies of a ticket have arrived.
        """
        self._tell = tell
        self._num_lanes, self._max_tokens = limits
        self._lay = lay
        self._link = link
        self._parts = parts
        self._memory = memory
        self._held: set[int] = set()
        self.table: Table = {
            wire.Save: self._save,
            wire.Restore: self._restore,
            wire.Hold: self._hold,
            wire.Drop: self._drop,
            wire.Export: self._export,
            wire.Adopt: self._adopt,
            wire.Fill: self._fill,
        }

    def _check_lane(self, lane: int, num_tokens: int) -> None:
        if lane >= self._num_lanes or num_tokens > self._max_tokens:
            told = f"{num_tokens} tokens of lane {lane}"
            self._link.refuse(f"{told}; there are {self._num_lanes}, of {self._max_tokens} tokens")

    def _check_span(self, order: wire.Save | wire.Adopt) -> None:
        if order.begin >= order.end:
            self._link.refuse(f"a node of tokens [{order.begin}, {order.end})")

    def _save(self, order: wire.Save, got: Received[Any]) -> None:
        self._check_span(order)
        self._check_lane(order.lane, order.end)
        key, span = _key(order.node), Span(order.begin, order.end, order.with_state)
        self._lay(order.regions)
        try:
            copies = together([part.save(order.lane, key, span) for part in self._parts])
        except MemoryError:
            self._forget(key)
            self._link.answer(got, wire.Room(is_there=False))
            return
        self._held.add(order.node)
        self._answer_copies(got, copies, order.ticket)

    def _restore(self, order: wire.Restore, got: Received[Any]) -> None:
        self._check_lane(order.lane, order.num_tokens)
        if not order.nodes:
            self._link.refuse("a chain of no nodes is to be restored")
        if unknown := [node for node in order.nodes if node not in self._held]:
            self._link.refuse(f"node {unknown[0]} is to be restored, and is not here")
        keys = [_key(node) for node in order.nodes]
        parts = self._parts
        copies = together([part.restore(order.lane, keys, order.num_tokens) for part in parts])
        self._answer_copies(got, copies, order.ticket)

    def _answer_copies(self, got: Received[Any], copies: Ticket, number: int) -> None:
        """Raises what went wrong with them, where they are over."""
        have_arrived = copies.is_done
        if have_arrived:
            copies.wait()
        self._link.answer(got, wire.Room(is_there=True, have_arrived=have_arrived))
        if not have_arrived:
            copies.when_done(lambda: self._tell_of(copies, number))

    def _tell_of(self, copies: Ticket, number: int) -> None:
        """In whichever thread hears that they are over: nobody there could be told of an error."""
        try:
            copies.wait()
            self._tell(number)
        except Exception:
            log.critical("copies between lanes and nodes have failed", exc_info=True)
            os._exit(1)

    def _hold(self, order: wire.Hold, got: Received[Any]) -> None:
        if order.node not in self._held:
            self._link.refuse(f"node {order.node} is to be held, and is not here")
        for part in self._parts:
            part.hold(order.lane, _key(order.node), order.end)

    def _drop(self, order: wire.Drop, got: Received[Any]) -> None:
        for part in self._parts:
            part.drop(_key(order.node), state_only=order.state_only)
        if not order.state_only:
            self._held.discard(order.node)

    def _adopt(self, order: wire.Adopt, got: Received[Any]) -> None:
        self._check_span(order)
        key, span = _key(order.node), Span(order.begin, order.end, order.with_state)
        self._lay(order.regions)
        try:
            for part in self._parts:
                regions = [self._memory.allocate(size) for size in part.sizes.of(span) if size]
                part.adopt(key, span, tensors_in(regions, part.shapes(span)))
        except MemoryError:
            self._forget(key)
            self._link.answer(got, wire.Room(is_there=False))
            return
        self._held.add(order.node)
        self._link.answer(got, wire.Room(is_there=True))

    def _export(self, order: wire.Export, got: Received[Any]) -> None:
        self._link.answer(got, wire.Done(), [self._piece(order)])

    def _fill(self, order: wire.Fill, got: Received[Any]) -> None:
        target = self._piece(order)
        [piece] = self._link.given(got, [((order.num_bytes,), target.dtype)])
        target.copy_(piece)

    def _piece(self, order: wire.Export | wire.Fill) -> Tensor:
        """The bytes of a node that are meant."""
        if order.node not in self._held:
            self._link.refuse(f"node {order.node} is asked for, and is not here")
        tensors = [t for part in self._parts for t in part.export(_key(order.node)).values()]
        if order.index >= len(tensors):
            self._link.refuse(f"tensor {order.index} of a node of {len(tensors)}")
        whole = tensors[order.index].view(-1).view(torch.uint8)
        end = order.begin + order.num_bytes
        if end > len(whole):
            self._link.refuse(f"bytes until {end} of a tensor of {len(whole)}")
        return whole[order.begin : end]

    def _forget(self, key: NodeKey) -> None:
        for part in self._parts:
            part.drop(key)


def _key(node: int) -> NodeKey:
    return NodeKey(node.to_bytes(8))


# Memory that another process has made and gives out: regions lie where it says. Knows no node.


class LentMemory:
    """See HostMemory. Who lent it keeps a region until nobody here reads or writes it."""

    def __init__(self, memory: SealedMemory) -> None:
        self._memory = memory
        self._told: deque[int] = deque()

    def tell(self, offsets: Sequence[int]) -> None:
        """Where the next regions lie, in the order in which they will be asked for."""
        self._told = deque(offsets)

    def allocate(self, num_bytes: int) -> memoryview:
        """See HostMemory. Raises ValueError for a place that is none."""
        if not self._told:
            raise ValueError(f"no place was told for {num_bytes} bytes")
        begin = self._told.popleft()
        if begin + num_bytes > self._memory.num_bytes:
            raise ValueError(
                f"{num_bytes} bytes at {begin} of a memory of {self._memory.num_bytes}"
            )
        return self._memory.view[begin : begin + num_bytes]

    def close(self) -> None:
        """It is not ours."""
