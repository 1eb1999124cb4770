"""Slots of experts on a device hold what the slow truth says, whatever came before."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from luceasync.kernels.experts_slots import COUNTS, NO_SLOT, SlotCopies, SlotTable
from luceasync.models.expert_slots import SlottedOps
from luceasync.models.ops import Norm
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.random import random_packed
from luceasync.models.triton_ops import TritonOps
from luceasync.models.weights import Router, Routing
from tests.kernels.cases import random
from tests.kernels.experts_double import replace_kernels
from tests.kernels.test_experts import routed
from tests.reference.slots import LruSlots

NUM_EXPERTS = 13


@pytest.mark.parametrize("num_slots", [2, 5, 13])
def test_slots_hold_what_was_used_last(num_slots: int, device) -> None:
    truth, table = LruSlots(num_slots), SlotTable.empty(NUM_EXPERTS, num_slots, device)
    generator = torch.Generator().manual_seed(num_slots)
    for step in range(12):
        num_rows = (1, 1, 3, 9)[step % 4]
        logits = 2 * torch.randn(num_rows, NUM_EXPERTS, generator=generator)
        has_shared = step % 2 == 0
        choice = routed(logits.to(device), None, Routing(2), has_shared)
        experts = [tile[0] for tile in choice.tiles.tolist() if 0 <= tile[0] < NUM_EXPERTS]
        slot_of, expected = truth.take(experts)
        slotted = routed(logits.to(device), None, Routing(2), has_shared, table)
        moved, fills = slotted.tiles, slotted.fills
        assert [(e, s) for e, s in fills.tolist() if s != NO_SLOT] == expected
        assert table.expert_of.tolist() == [NO_SLOT if e is None else e for e in truth.expert_of]
        assert table.counts.tolist() == [truth.counts[name] for name in COUNTS]
        near, shared, far = [], [], []
        for expert, begin, end in choice.tiles.tolist():
            if expert == NUM_EXPERTS:
                shared.append([num_slots, begin, end])
            elif expert in slot_of:
                near.append([slot_of[expert], begin, end])
            elif expert >= 0:
                far.append([num_slots + 1 + expert, begin, end])
        every = near + shared + far
        assert moved.tolist()[: len(every)] == every
        assert all(tile[0] == -1 for tile in moved.tolist()[len(every) :])


def test_experts_are_copied_to_their_slots_alone(device) -> None:
    hosts = [torch.randint(0, 99, (4, n, 2), dtype=torch.int32) for n in (5, 3000)]
    if device.type == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    slots = [torch.zeros(3, *host.shape[1:], dtype=torch.int32, device=device) for host in hosts]
    fills = torch.tensor([[3, 0], [1, 2], [0, NO_SLOT]], dtype=torch.int32, device=device)
    SlotCopies(list(zip(hosts, slots, strict=True)), device).run(fills)
    for host, there in zip(hosts, slots, strict=True):
        assert torch.equal(there.cpu()[[0, 2]], host[[3, 1]])
        assert not there[1].any()


class Host:
    """An ExpertHost whose device reads the host's memory as its own, or a GPU's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def hold(self, tensor: Tensor) -> Tensor:
        host = tensor.cpu()
        return host.pin_memory() if self.device.type == "cuda" else host.clone()

    def close(self) -> None:
        """Nothing more is held."""

    def side_stream(self, *used: Tensor) -> AbstractContextManager[object]:
        return nullcontext()

    def join_side_stream(self) -> None:
        """There is one stream."""


def layers(ops: TritonOps, kind: str, dtype: torch.dtype, device: torch.device):
    """Two layers, and those of the same numbers in any ops."""
    generator = torch.Generator(device).manual_seed(5)
    found = []
    for _ in range(2):
        exact = {"device": device, "generator": generator}
        norm = Norm(ops, torch.ones(64, device=device), 1e-6)
        router = ops.float_matrix(torch.randn(6, 64, **exact))
        gate = ops.float_matrix(torch.randn(1, 64, **exact) * 0.1)
        shared = [torch.randn(n, m, **exact).to(dtype) * 0.1 for n, m in ((128, 64), (64, 64))]
        halves = []
        for num_parts, shape in ((2, (2 * 6 * 64, 64)), (1, (6 * 64, 64))):
            if kind:
                packed = random_packed(ENCODINGS[kind], shape, generator)
                halves.append(ops.quantised_experts(packed, 6, num_parts, torch.bfloat16))
            else:
                rows = (torch.randn(shape, **exact) * 0.1).to(dtype)
                halves.append(ops.experts(rows, 6, num_parts))
        routed = Router(Routing(2), norm, router, None, gate)
        found.append(ops.routed(routed, *halves, ops.gated(*map(ops.pack, shared))))
    return found


def test_the_double_is_what_kernels_are(device) -> None:
    """Whole engines run with it: tests.engine.test_expert_slots."""
    if device.type == "cuda":
        pytest.skip("the double is for CPUs")
    inputs = [random(n, 64, dtype=torch.float32, device=device) for n in (3, 9, 70, 1)]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            ops = SlottedOps(4, Host(device))
            layer, _ = layers(ops, "", torch.float32, device)
            ops.allocate()
            results = [layer.add_to(x.clone()) for x in inputs]
            found.append((results, layer.table.expert_of.tolist(), ops.counts()))
            replace_kernels(patch)
    (results, *slots), (doubles, *expected) = found
    for result, double in zip(results, doubles, strict=True):
        torch.testing.assert_close(double, result)
    assert slots == expected


@pytest.mark.parametrize(
    ("kind", "num_slots"),
    [
        ("", 6),
        ("", 3),
        pytest.param("", 2, marks=pytest.mark.thorough),
        ("", 1),
        pytest.param("Q8_0", 3, marks=pytest.mark.thorough),
        ("Q4_1", 2),
    ],
)
def test_results_are_the_same_bits_wherever_experts_are(kind, num_slots, device) -> None:
    """A GPU multiplies bfloat16, the interpreter float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    resident = layers(TritonOps(), kind, dtype, device)
    ops = SlottedOps(num_slots, Host(device))
    slotted = layers(ops, kind, dtype, device)
    ops.allocate()
    num_of_prompt = (70,) if num_slots == 1 else ()  # it takes long
    for num_rows in (1, 3, 1) if kind else (1, 3, *num_of_prompt, 9, 1, 2):
        x = random(num_rows, 64, dtype=dtype, device=device)
        expected, found = x.clone(), x.clone()
        for plain, own in zip(resident, slotted, strict=True):
            expected, found = plain.add_to(expected), own.add_to(found)
        assert torch.equal(found, expected)
    counts = ops.counts()
    assert counts["read through"] == 0 if num_slots == 6 else counts["read through"] > 0
    assert counts["hits"] > 0
