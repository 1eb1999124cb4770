"""A backend that runs a stage: layers of a model on this process's devices.

Owns the stage, and memory for its nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luceasync.backend.dispatch import Answers, Dispatcher, handlers_of, handles, result
from luceasync.backend.node_handlers import LentMemory, NodeHandlers
from luceasync.backend.pass_handlers import PassHandlers
from luceasync.errors import LuceasyncError
from luceasync.host_cache.arena import HostMemory
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import WireError
from luceasync.ipc.wiring import ParentConnection
from luceasync.models.files import ModelFiles
from luceasync.pipeline.devices import host_memory, offers_of, page_lock_for
from luceasync.pipeline.offer import own_name
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.tensors import StageSizes
from luceasync.pipeline.stage import LocalStage

log = logging.getLogger(__name__)


class StageBackend:
    """The work of one process, from the greeting to the end."""

    def __init__(
        self, parent: ParentConnection, model: ModelFiles | None, names: Mapping[str, str]
    ) -> None:
        """`names`: the devices that are offered under different names."""
        self._parent = parent
        self._model = model
        self._names = names
        self._stage: LocalStage | None = None
        self._memory: HostMemory | None = None
        self._dispatcher = Dispatcher(parent.channel)
        self._dispatcher.handlers |= handlers_of(self)

    @torch.inference_mode()
    def run(self) -> None:
        """Run commands until the parent is gone, which raises ChannelClosed."""
        self._dispatcher.serve()

    def close(self) -> None:
        """Free everything."""
        if self._stage is not None:
            self._stage.close()
        if self._memory is not None:
            self._memory.close()
        self._parent.close()

    @handles(wire.OfferDevices)
    def offer(self, command: wire.OfferDevices, tensors: list[Tensor]) -> Answers:
        try:
            real = [_real_name(name, self._names) for name in command.names]
            offers = offers_of(real, command.flag)
        except LuceasyncError as error:
            return [(answers.CommandFailure(str(error)), ())]
        renamed = zip(offers, command.names, strict=True)
        return [(answers.Offers(tuple(replace(offer, name=name) for offer, name in renamed)), ())]

    @handles(wire.LoadStage)
    def load(self, command: wire.LoadStage, tensors: list[Tensor]) -> None:
        model = self._model
        if model is None or self._stage is not None:
            raise WireError("LoadStage came twice, or without a model directory")
        self._dispatcher.load(lambda advance: self._load(model, command, advance))

    def _load(
        self, model: ModelFiles, command: wire.LoadStage, advance: Callable[[int], None]
    ) -> None:
        plan, spec = with_own_names(command.plan, self._names), model.spec
        number, dispatcher = command.number, self._dispatcher
        names = [shard.device for shard in plan.here]
        self._parent.channel.register(page_lock_for(names))
        if plan.runs_async:
            self._parent.channel.keep_awake()
        self._memory, set_offsets = self._node_memory(names, command.node_bytes)
        with model.weights.open() as source:
            stage = LocalStage(spec, plan, source, advance, command.taps, self._memory, number)
        self._stage = stage
        if plan.suits_one_thread:  # after reading, since threads unpack weights
            torch.set_num_threads(1)
        sizes = StageSizes(spec, plan, number)
        taps = [tap for tap in command.taps if tap in sizes.layers]
        dispatcher.sizes = sizes

        def input_is_queued() -> None:
            dispatcher.free_after(stage.taken())

        passes = PassHandlers(stage.passes, sizes, taps, input_is_queued, stage.prepare)
        completions = self._parent.completions
        assert completions is not None, "a backend is started with all that it needs"
        nodes = NodeHandlers(stage.nodes, self._memory, set_offsets, completions.send)
        dispatcher.handlers |= handlers_of(passes) | handlers_of(nodes)
        log.info("layers %d:%d are loaded", sizes.layers.start, sizes.layers.stop)

    def _node_memory(
        self, names: Sequence[str], num_bytes: int
    ) -> tuple[HostMemory, Callable[[Sequence[int]], None]]:
        """Memory lent by the parent, or otherwise our own; and the function that sets where the
        next regions lie."""
        lent = lent_memory(self._parent, names)
        if lent is None:
            return host_memory(names, num_bytes), lambda offsets: None
        memory = LentMemory(lent)
        return memory, memory.set_offsets

    @handles(wire.Synchronize)
    def synchronize(self, command: wire.Synchronize, tensors: list[Tensor]) -> Answers:
        if self._stage is None:
            raise WireError("Synchronize came before a model was loaded")
        self._stage.synchronize()
        return result()

    @handles(wire.CountExperts)
    def count_experts(self, command: wire.CountExperts, tensors: list[Tensor]) -> Answers:
        if self._stage is None:
            raise WireError("CountExperts came before a model was loaded")
        counts = self._stage.expert_counts()
        each = (counts.get(name, 0) for name in ("hits", "misses", "read through", "bytes"))
        return [(answers.ExpertCounts(*each), ())]


def lent_memory(parent: ParentConnection, names: Sequence[str]) -> SealedMemory | None:
    """Memory that the parent lent for nodes, pinned for these devices; None: use our own."""
    lent = parent.lent.get(wire.NODES)
    if lent is not None:
        lent.register(page_lock_for(names))
    return lent


def with_own_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan, with this process's devices named as in torch."""
    shards, devices = [], []
    for shard, device in zip(plan.shards, plan.devices, strict=True):
        if device.is_here:
            real = _real_name(device.name, names)
            shard, device = replace(shard, device=real), replace(device, name=real)
        shards.append(shard)
        devices.append(device)
    return replace(plan, shards=tuple(shards), devices=tuple(devices))


def _real_name(name: str, names: Mapping[str, str]) -> str:
    """torch's name of the device: names used by a server on another machine begin with this
    machine's name."""
    local = own_name(name)
    return names.get(local, local)
