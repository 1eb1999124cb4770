"""Experts in host memory, and slots for some of them on a GPU.

A pass of few rows finds its experts in slots or has them copied there, which the device decides by
itself; a longer one has whole layers copied ahead. Where an expert lies changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from luceasync.errors import ModelError
from luceasync.kernels.experts_routing import MAX_ROWS
from luceasync.kernels.experts_slots import COUNTS, SlotCopies, SlotTable
from luceasync.models.ops import ExpertGroup, RoutedExperts
from luceasync.models.quant.packed import Packed
from luceasync.models.triton_experts import (
    KernelExperts,
    PlainExperts,
    Shared,
    TiledChoice,
    TiledQuantExperts,
    TritonRoutedExperts,
    choose,
    quantised_experts,
)
from luceasync.models.triton_ops import TritonOps
from luceasync.models.weights import Choice, ExpertWeights, Router, Routing, SwiGLU, Weight

NUM_BUFFERS = 2  # for whole layers: one is read while the next is copied
ALIGNMENT_BYTES = 256


class ExpertHost(Protocol):
    """The device, as far as host memory that it can read and copies beside its work go."""

    @property
    def device(self) -> torch.device: ...

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy in host memory that kernels of the device can read. Raises ModelError."""
        ...

    def close(self) -> None:
        """Hold nothing more; what is held stays."""
        ...

    def side_stream(self, *used: Tensor) -> AbstractContextManager[object]:
        """See Platform."""
        ...

    def join_side_stream(self) -> None:
        """See Platform."""
        ...


class SlottedExperts:
    """ExpertWeights of which `near` has those in slots, and `far` all, in host memory."""

    def __init__(self, resident: KernelExperts, num_slots: int, host: ExpertHost) -> None:
        """`resident`: the experts on the device, whose memory may be freed afterwards."""
        self.far_tensors = {name: host.hold(t) for name, t in resident.tensors.items()}
        self.near_tensors = {
            name: t.new_zeros(t.shape[0], num_slots, *t.shape[2:])
            for name, t in resident.tensors.items()
        }
        self.far = resident.made_of(self.far_tensors)
        self.near = self.far.made_of(self.near_tensors)

    def alike(self, weight: Weight) -> Shared | None:
        """See SharingExperts."""
        return self.near.alike(weight)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return next(iter(self.near_tensors.values())).device

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.near_tensors.values())

    @property
    def layer_bytes(self) -> int:
        """Bytes of all experts in a buffer."""
        return sum(_aligned(tensor.nbytes) for tensor in self.far_tensors.values())

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """See SlotCopies."""
        return [
            (far[part], self.near_tensors[name][part])
            for name, far in self.far_tensors.items()
            for part in range(len(far))
        ]

    def copied_to(self, buffer: Tensor) -> Tensor:
        """Copy all experts to a buffer, uint8; return the rest of it."""
        for name, target in self._views(buffer).items():
            target.copy_(self.far_tensors[name], non_blocking=True)
        return buffer[self.layer_bytes :]

    def made_of(self, buffer: Tensor) -> ExpertWeights:
        """The experts in a buffer that `copied_to` has filled."""
        return self.far.made_of(self._views(buffer))

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        found, begin = {}, 0
        for name, tensor in self.far_tensors.items():
            own = buffer[begin : begin + tensor.nbytes]
            found[name] = own.view(tensor.dtype).view(tensor.shape)
            begin += _aligned(tensor.nbytes)
        return found

    def linear(self, x: Tensor, choice: Choice, shared: Shared | None = None) -> Tensor:
        """See SharingExperts; for choices whose tiles name slots."""
        return self.near.linear(x, choice, shared, self.far)

    def swiglu(self, x: Tensor, choice: Choice, shared: Shared | None = None) -> Tensor:
        """See SharingExperts; as `linear`."""
        return self.near.swiglu(x, choice, shared, self.far)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class LayerSlots:
    """The slots of one layer for experts that have a matrix in each of some SlottedExperts."""

    def __init__(self, ops: SlottedOps, experts: Sequence[ExpertWeights], number: int) -> None:
        """`number`: of the layer, among those with slots."""
        self._ops = ops
        self._number = number
        self._experts = [own for own in experts if isinstance(own, SlottedExperts)]
        assert len(self._experts) == len(experts)
        device = self._experts[0].device
        pairs = [pair for own in self._experts for pair in own.pairs]
        num_experts, num_slots = (len(each) for each in pairs[0])
        self.table = SlotTable.empty(num_experts, num_slots, device, ops.host.hold)
        self._copies = SlotCopies(pairs, device)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(own.far.num_bytes for own in self._experts) // len(self.table.slot_of)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a buffer for all experts."""
        return sum(own.layer_bytes for own in self._experts)

    def fill(self, choice: TiledChoice) -> None:
        """Copy what a choice has given slots to."""
        assert choice.fills is not None
        self._copies.run(choice.fills)

    def copy_to(self, buffer: Tensor) -> None:
        """Copy all experts to a buffer."""
        for own in self._experts:
            buffer = own.copied_to(buffer)

    def whole(self) -> list[ExpertWeights]:
        """All experts, in a buffer that is theirs until the layer after the next one asks."""
        buffer, found = self._ops.whole_layer(self._number), []
        for own in self._experts:
            found.append(own.made_of(buffer))
            buffer = buffer[own.layer_bytes :]
        return found


class SlottedOps(TritonOps):
    """TritonOps with `num_slots` slots for the experts of each layer, all of which are in host
    memory.
    """

    def __init__(self, num_slots: int, host: ExpertHost) -> None:
        self._num_slots = num_slots
        self.host = host
        self._layers: list[LayerSlots] = []
        self._buffers: list[Tensor] = []
        self._num_copied_bytes = 0  # of whole layers

    def allocate(self) -> None:
        """Allocate buffers for whole layers, once all layers are read."""
        self.host.close()
        most = max(layer.layer_bytes for layer in self._layers)
        for _ in range(NUM_BUFFERS):
            self._buffers.append(torch.empty(most, dtype=torch.uint8, device=self.host.device))

    def counts(self) -> dict[str, int]:
        """Experts of all layers' passes so far by what became of them, and the bytes that crossed
        the bus for them. Any thread; waits for nothing.
        """
        counts = [layer.table.shown.tolist() for layer in self._layers]
        sums = dict(zip(COUNTS, map(sum, zip(*counts, strict=True)), strict=True))
        pairs = zip(counts, self._layers, strict=True)
        num_bytes = sum(sum(own[1:]) * layer.expert_bytes for own, layer in pairs)
        return sums | {"bytes": num_bytes + self._num_copied_bytes}

    def experts(self, rows: Tensor, num_experts: int, num_parts: int) -> ExpertWeights:
        return SlottedExperts(
            PlainExperts(rows, num_experts, num_parts), self._num_slots, self.host
        )

    def quantised_experts(
        self, packed: Packed, num_experts: int, num_parts: int, dtype: torch.dtype
    ) -> ExpertWeights:
        resident = quantised_experts(packed, num_experts, num_parts, dtype)
        if not isinstance(resident, TiledQuantExperts):
            raise ModelError(
                f"--expert-memory: experts of {packed.shape[1]} columns in {packed.layout.name} "
                "run on no kernel that reads host memory; leave the flag out"
            )
        return SlottedExperts(resident, self._num_slots, self.host)

    def routed(
        self, router: Router, gate_up: ExpertWeights, down: ExpertWeights, shared: SwiGLU | None
    ) -> RoutedExperts:
        return SlottedRoutedExperts(self, router, gate_up, down, shared)

    def grouped(self, *experts: ExpertWeights) -> ExpertGroup:
        return SlottedGroup(self, experts)

    def slots_of(self, *experts: ExpertWeights) -> LayerSlots:
        """The slots of the next layer."""
        self._layers.append(LayerSlots(self, experts, len(self._layers)))
        return self._layers[-1]

    def whole_layer(self, number: int) -> Tensor:
        """The buffer with all experts of a layer; the next layer's are copied meanwhile. Layers of
        a pass ask in order.
        """
        if number == 0:
            self._copy(number)
        self.host.join_side_stream()
        if number + 1 < len(self._layers):
            self._copy(number + 1)
        return self._buffers[number % NUM_BUFFERS]

    def _copy(self, number: int) -> None:
        buffer = self._buffers[number % NUM_BUFFERS]
        self._num_copied_bytes += self._layers[number].layer_bytes
        with self.host.side_stream(buffer):
            self._layers[number].copy_to(buffer)


class SlottedRoutedExperts(TritonRoutedExperts):
    """TritonRoutedExperts of a layer with slots."""

    def __init__(
        self,
        ops: SlottedOps,
        router: Router,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        shared: SwiGLU | None,
    ) -> None:
        super().__init__(ops, router, gate_up, down, shared)
        self._slots = ops.slots_of(gate_up, down)
        self.table = self._slots.table

    def add_to(self, x: Tensor) -> Tensor:
        if len(x) <= MAX_ROWS:
            return super().add_to(x)
        gate_up, down = self._slots.whole()
        return self._add(x, gate_up, down)

    def _results(self, normed: Tensor, choice: TiledChoice) -> Tensor:
        self._slots.fill(choice)
        return super()._results(normed, choice)


class SlottedGroup(ExpertGroup):
    """The ExpertGroup of a layer with slots."""

    def __init__(self, ops: SlottedOps, experts: Sequence[ExpertWeights]) -> None:
        super().__init__(ops, experts)
        self._slots = ops.slots_of(*experts)

    def choose(self, logits: Tensor, routing: Routing) -> Choice:
        return choose(logits, None, routing, self._slots.table)

    def weights(self, choice: Choice) -> Sequence[ExpertWeights]:
        if not isinstance(choice, TiledChoice):
            return self._slots.whole()
        self._slots.fill(choice)
        return super().weights(choice)
