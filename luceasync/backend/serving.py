"""What a backend's process does with each message: the verbs of a stage, in the order they come.

Owns the stage. Whatever goes wrong ends the process: the other end sees that at once, and has its
last log lines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from luceasync.backend.node_orders import LentMemory, NodeOrders
from luceasync.backend.pass_orders import PassOrders
from luceasync.errors import ChannelClosed, LuceasyncError
from luceasync.host_cache.arena import HostMemory
from luceasync.ipc.channel import Received
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import Home
from luceasync.models.config import read_spec
from luceasync.models.formats import format_of
from luceasync.pipeline.devices import host_memory, offers_of, pinned_by
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Event
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.tensors import Sizes, Spec, lend, payload_bytes, put, specs_of, take
from luceasync.pipeline.remote.wire import NODES
from luceasync.pipeline.stage import LocalStage

CALL_S = 300.0
POLL_S = 60.0
LOOK_S = 1e-3  # how often a device is asked whether it has read what was lent to it
TOLD_BYTES = 32 << 20  # of weights that were read, between two messages about it

log = logging.getLogger(__name__)

Order = Callable[[Any, Received[Any]], None]


class Wire:
    """The channel, as orders use it."""

    def __init__(self, home: Home) -> None:
        self._channel = home.channel
        self._lent: deque[tuple[Event, Any]] = deque()  # payloads that a device may still read

    def answer(self, got: Received[Any], message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Answer an order, with tensors of any device."""
        room = None
        if tensors:
            room = self._channel.reserve(payload_bytes(specs_of(tensors)), CALL_S)
            put(room, tensors)
        while self._lent:  # who hears an answer may let others write where that lay
            event, payload = self._lent.popleft()
            if not event.query():
                event.synchronize()
            payload.free()
        self._channel.send(message, room, answers=got.number, deadline_s=CALL_S)

    def say(self, message: Message) -> None:
        """What nobody has asked for."""
        self._channel.send(message, deadline_s=CALL_S)

    def given(self, got: Received[Any], specs: Sequence[Spec]) -> list[Tensor]:
        """What came with an order, on the host."""
        if not specs:
            if got.payload is not None:
                self.refuse(f"{type(got.message).__name__} came with a payload")
            return []
        if got.payload is None:
            self.refuse(f"{type(got.message).__name__} came without what it speaks of")
        return take(got.payload, specs)

    def lent(self, got: Received[Any], spec: Spec) -> Tensor:
        """The one tensor that came with an order, where it lies, until `free_after`."""
        if got.payload is None:
            self.refuse(f"{type(got.message).__name__} came without what it speaks of")
        return lend(got.payload, [spec])[0]

    def free_after(self, event: Event, got: Received[Any]) -> None:
        """What came with an order is no longer read once a device has come to the event."""
        self._lent.append((event, got.payload))

    def next(self) -> Received[Any] | None:
        """The next order, or None: none has come for a while."""
        self._free()
        while self._lent and not self._channel.poll(LOOK_S):
            self._free()
        return self._channel.receive(CALL_S) if self._channel.poll(POLL_S) else None

    def _free(self) -> None:
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()[1].free()

    def refuse(self, words: str) -> NoReturn:
        """Close the channel on what may not come."""
        self._channel.close(words)
        raise ChannelClosed(words)


class Serving:
    """One process's work, from its greeting to its end."""

    def __init__(self, home: Home, model_dir: Path | None, names: Mapping[str, str]) -> None:
        """`names`: the devices that are offered under other names than their own."""
        self._home = home
        self._wire = Wire(home)
        self._model_dir = model_dir
        self._names = names
        self._group: LocalStage | None = None
        self._memory: HostMemory | None = None
        self._orders: dict[type[Message], Order] = {wire.Ask: self._offer, wire.Load: self._load}

    @torch.inference_mode()
    def run(self) -> None:
        """Do as is said. Raises ChannelClosed when the other end is gone."""
        obey(self._wire, self._orders)

    def close(self) -> None:
        """Let everything go."""
        if self._group is not None:
            self._group.close()
        if self._memory is not None:
            self._memory.close()
        self._home.close()

    def _offer(self, order: wire.Ask, got: Received[Any]) -> None:
        try:
            real = [self._names.get(name, name) for name in order.names]
            offers = offers_of(real, order.flag)
        except LuceasyncError as error:
            self._wire.answer(got, wire.Failed(str(error)))
            return
        renamed = zip(offers, order.names, strict=True)
        told = tuple(replace(offer, name=name) for offer, name in renamed)
        self._wire.answer(got, wire.Offered(told))

    def _load(self, order: wire.Load, got: Received[Any]) -> None:
        if self._model_dir is None or self._group is not None:
            self._wire.refuse("Load came twice, or where no model directory was named")
        plan = with_own_names(order.plan, self._names)
        model_dir = self._model_dir
        say_how_it_went(self._wire, lambda: self._open(model_dir, plan, order))

    def _open(self, model_dir: Path, plan: Plan, order: wire.Load) -> None:
        spec, number = read_spec(model_dir), order.number
        if plan.suits_one_thread:
            torch.set_num_threads(1)
        names = [shard.device for shard in plan.here]
        self._home.channel.register(pinned_by(names))
        if plan.computes_beside:
            self._home.channel.keep_awake()
        memory, lay = self._node_memory(names, order.node_bytes)
        self._memory = memory
        progress = Progress(self._wire)
        with format_of(model_dir).open(model_dir) as source:
            stage = LocalStage(spec, plan, source, progress.advance, order.taps, memory, number)
        self._group = stage
        progress.tell()
        sizes = Sizes(spec, plan, number)
        taps = [tap for tap in order.taps if tap in sizes.layers]
        limits = plan.parallel, plan.max_ctx_tokens
        pages = plan.num_pages
        self._orders |= PassOrders(
            self._wire, stage.passes, sizes, taps, (*limits, pages), stage.taken, stage.prepare
        ).table
        assert self._home.telling is not None, "a backend is started with all that it needs"
        tell = self._home.telling.tell
        self._orders |= NodeOrders(self._wire, stage.nodes, memory, lay, limits, tell).table
        self._orders[wire.Synchronize] = self._synchronize
        log.info("layers %d:%d are loaded", sizes.layers.start, sizes.layers.stop)

    def _node_memory(
        self, names: Sequence[str], num_bytes: int
    ) -> tuple[HostMemory, Callable[[Sequence[int]], None]]:
        """What was lent, else our own; and who hears where regions lie."""
        lent = lent_memory(self._home, names)
        if lent is None:
            return host_memory(names, num_bytes), lambda regions: None
        memory = LentMemory(lent)
        return memory, memory.tell

    def _synchronize(self, order: wire.Synchronize, got: Received[Any]) -> None:
        assert self._group is not None
        self._group.synchronize()
        self._wire.answer(got, wire.Done())


def obey(link: Wire, orders: Mapping[type[Message], Order]) -> NoReturn:
    """Do what is said, one thing after the other; orders may become more meanwhile. Raises
    ChannelClosed when the other end is gone.
    """
    while True:
        got = link.next()
        if got is None:
            continue
        order = orders.get(type(got.message))
        if order is None:
            link.refuse(f"{type(got.message).__name__} came before a model was loaded")
        order(got.message, got)


def say_how_it_went(link: Wire, load: Callable[[], None]) -> None:
    """Load a model, and say that it is done, or why it is not."""
    try:
        load()
    except torch.OutOfMemoryError as error:
        words = ". ".join(str(error).split(". ")[:3])
        link.say(wire.Failed(f"a device of a backend ran out of memory: {words}"))
    except ChannelClosed:
        raise
    except LuceasyncError as error:
        link.say(wire.Failed(str(error)))
    else:
        link.say(wire.Done())


def lent_memory(home: Home, names: Sequence[str]) -> SealedMemory | None:
    """Memory for nodes that was lent, pinned for these devices; None: our own is to be used."""
    lent = home.lent.get(NODES)
    if lent is not None:
        lent.register(pinned_by(names))
    return lent


class Progress:
    """Tells how many bytes of weights were read, not at every tensor."""

    def __init__(self, link: Wire) -> None:
        self._link = link
        self._num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= TOLD_BYTES:
            self.tell()

    def tell(self) -> None:
        self._link.say(wire.Read(self._num_bytes))
        self._num_bytes = 0


def with_own_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with this process's devices as torch knows them."""
    shards, devices = [], []
    for shard, device in zip(plan.shards, plan.devices, strict=True):
        if device.is_here:
            real = names.get(device.name, device.name)
            shard, device = replace(shard, device=real), replace(device, name=real)
        shards.append(shard)
        devices.append(device)
    return replace(plan, shards=tuple(shards), devices=tuple(devices))
