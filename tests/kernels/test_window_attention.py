"""The kernel of windows and its twin in torch agree in steps, trees, chunks and commits. Where a
ring was never written it holds NaN, which the kernel may not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from luceasync.kernels import prefill_attention, window_attention
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.sliding import SlidingSpec
from luceasync.models.mixers.sliding_torch import TorchSliding
from luceasync.models.mixers.sliding_triton import TritonSliding
from luceasync.models.pass_rows import NO_LANE, PADDING_ENTRY, AcceptedRows, Entry, Paths, Rows
from luceasync.models.trees import torch_trees
from tests.kernels.cases import TOLERANCE, distance, random_parents
from tests.kernels.gluon_emulated import emulate

LANES = 3
NOWHERE = slice(0, 0)


def spec_of(window: int) -> SlidingSpec:
    return SlidingSpec(6, 2, 24, 16, 10000.0, gated=True, window=window)


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_attention, "NUM_SPLITS", 2)


@dataclass(frozen=True)
class Case:
    """A pass of lanes of the kernel and of its twin, each with rings of its own."""

    spec: SlidingSpec
    projected: Tensor
    norms: HeadNorms
    rings: tuple[Tensor, Tensor]
    entries: tuple[Entry, ...]
    positions: Tensor

    def rows(self, body: TorchSliding | TritonSliding) -> Rows:
        device = self.projected.device
        lanes = torch.tensor([e.lane for e in self.entries], dtype=torch.int32, device=device)
        prepared = {self.spec: body.prepare(self.positions)}
        return Rows(self.entries, lanes, self.positions, torch.empty(0), prepared)

    def own_rings(self, *, nan: bool) -> tuple[Tensor, Tensor]:
        """Copies, in which NaN or 0 stands where nothing was written."""
        if nan:
            return self.rings[0].clone(), self.rings[1].clone()
        return self.rings[0].nan_to_num(), self.rings[1].nan_to_num()


def case_of(
    window: int,
    lanes: Sequence[int],
    begins: Sequence[int],
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: SlidingSpec | None = None,
) -> Case:
    spec = spec or spec_of(window)
    width = 2 * spec.query_dim + 2 * spec.kv_dim
    projected = torch.randn(len(lanes), num_rows, width).to(device, dtype)
    query, key = (1 + torch.randn(spec.head_dim).to(device) / 10 for _ in range(2))
    rings = []
    for _ in range(2):
        ring = torch.randn(LANES, window, spec.num_kv_heads, spec.head_dim)
        for lane, begin in zip(lanes, begins, strict=True):
            if lane != NO_LANE:
                ring[lane, begin:] = torch.nan
        rings.append(ring.to(device, dtype))
    entries = tuple(
        PADDING_ENTRY if lane == NO_LANE else Entry(lane, at, at + num_rows, NOWHERE, NOWHERE)
        for lane, at in zip(lanes, begins, strict=True)
    )
    positions = torch.tensor(begins)[:, None] + torch.arange(num_rows)
    norms = HeadNorms(query, key, 1e-6)
    return Case(spec, projected, norms, (rings[0], rings[1]), entries, positions.int().to(device))


@pytest.mark.parametrize("window", [5, 64, 130])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_rows_of_lanes_and_what_they_leave(window: int, num_rows: int, dtype, device) -> None:
    case = case_of(window, [2, 0, NO_LANE], [131, 3, 0], num_rows, dtype, device)
    found, left = {}, {}
    for body in (TorchSliding(case.spec), TritonSliding(case.spec)):
        # Chunks are torch's products, which need numbers where rings of new lanes have zeros.
        is_kernel = isinstance(body, TritonSliding) and num_rows == 1
        left[body] = case.own_rings(nan=is_kernel)
        found[body] = body.attend(case.projected, case.norms, left[body], case.rows(body))[:2]
    (one, other), (a, b) = found.values(), left.values()
    assert distance(other, one) < TOLERANCE[dtype]
    for ring, twin in zip(b, a, strict=True):
        assert distance(ring.nan_to_num(), twin) < TOLERANCE[dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes other sizes of heads")
@pytest.mark.parametrize("window", [5, 64, 130])
def test_rows_of_a_prompt_by_the_emulated_kernel(window: int, device, monkeypatch) -> None:
    emulate(monkeypatch, prefill_attention, "_attend_prompt_kernel")
    monkeypatch.setitem(prefill_attention.BLOCK_KEYS, 24, 64)
    monkeypatch.setattr(prefill_attention, "can_attend", lambda q: True)
    test_rows_of_lanes_and_what_they_leave(window, 70, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("begin", [0, 300, 5000])
def test_rows_of_a_prompt_with_sizes_of_real_models(head_dim: int, begin: int, device) -> None:
    """Those that the kernel for Hopper takes."""
    spec = SlidingSpec(8, 4, head_dim, head_dim, 10000.0, gated=True, window=512)
    case = case_of(512, [1], [begin], 700, torch.bfloat16, device, spec)
    bodies = TorchSliding(spec), TritonSliding(spec)
    left = [case.own_rings(nan=False) for _ in bodies]
    one, other = (
        body.attend(case.projected, case.norms, rings, case.rows(body))
        for body, rings in zip(bodies, left, strict=True)
    )
    assert distance(other, one) < TOLERANCE[torch.bfloat16]
    for ring, twin in zip(*left, strict=True):
        assert distance(twin, ring) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [5, 64])
def test_trees_and_their_commits(window: int, dtype, device) -> None:
    parents = random_parents(3, 11).to(device)
    trees = torch_trees(parents, 1)
    case = case_of(window, [2, 0, NO_LANE], [131, 3, 0], 11, dtype, device)
    begins = case.positions[:, :1]
    case = replace(case, positions=(begins + trees.depths).int())
    path = [0, *(row for row in range(1, 11) if parents[0, row] == 0)][:2]
    found, left = {}, {}
    for body in (TorchSliding(case.spec), TritonSliding(case.spec)):
        rings = left[body] = case.own_rings(nan=isinstance(body, TritonSliding))
        shape = (1, 3, 11, case.spec.num_kv_heads, case.spec.head_dim)
        scratch = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        inner = tuple(each[0] for each in scratch)
        rows = case.rows(body)
        out = body.attend_tree(case.projected, case.norms, rings, rows, trees, inner)
        found[body] = out[:2]
        stacks = tuple(ring[None] for ring in rings)
        body.commit(scratch, stacks, paths_of(path, case, device))
    (one, other), (a, b) = found.values(), left.values()
    assert distance(other, one) < TOLERANCE[dtype]
    for ring, twin in zip(b, a, strict=True):
        assert distance(ring.nan_to_num(), twin) < TOLERANCE[dtype]


def paths_of(path: list[int], case: Case, device: torch.device) -> Paths:
    """The first entry keeps the path, the others nothing."""
    begin = int(case.positions[0, 0])
    kept = AcceptedRows(0, 2, begin, begin, NOWHERE, torch.tensor(path, device=device))
    filled = [[*path, *[0] * (11 - len(path))], [0] * 11, [0] * 11]
    numbers = ([2, 0, NO_LANE], [begin, 3, 0], [begin, 3, 0], filled, [len(path), 0, 0])
    given = (torch.tensor(each, dtype=torch.int32, device=device) for each in numbers)
    return Paths((kept,), *given, torch.empty(0))
