"""Attention of one row per lane in CUDA C++: equal to torch's at every border of pages, units and
splits, independent of other lanes and of which program is last. Also compiles it for other GPUs.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from luceasync.kernels import attention_cuda
from luceasync.kernels.attention_cuda import (
    AttentionHeads,
    AttentionSplit,
    choose_split,
    constants_of,
    shared_of,
)
from luceasync.kernels.cuda_program import compiled
from luceasync.kernels.prepared_rows import room_for_few
from luceasync.models.mixers.attention import RECENT_ROWS, AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention, heads_of
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.pass_rows import NO_LANE
from tests.kernels.cases import TOLERANCE, AttentionCase, attention_case, distance
from tests.kernels.offline import BINARIES, CARDS, KIB
from tests.kernels.places import gpu_of_nvidia, on_both
from tests.kernels.test_quant_gemv_cuda import plain

BF16 = torch.bfloat16
FEW = AttentionSplit(2, 2, 3)  # splits: on long contexts each takes several turns of its warps
SPECS = {
    "plain": AttentionSpec(8, 2, 64, 64, 10000.0, gated=False),
    "gated, partly rotated": AttentionSpec(6, 2, 128, 32, 10000.0, gated=True),
    "without head norms": AttentionSpec(3, 3, 32, 32, 1e4, gated=False, has_head_norms=False),
    "a large group": AttentionSpec(12, 1, 64, 16, 10000.0, gated=True),
    "eight of a group": AttentionSpec(8, 1, 16, 16, 10000.0, gated=False),
}
CAPABILITIES = {name: int(name[3:]) for name, card in CARDS.items() if card.is_nvidia}
LAYERS = {
    "4B": AttentionHeads(8, 4, 128, 64, gated=False),
    "gated": AttentionHeads(4, 6, 128, 32, gated=True, newest=RECENT_ROWS),
    "narrow": AttentionHeads(2, 7, 64, 32, gated=False),
    "a group of 16": AttentionHeads(2, 16, 128, 64, gated=True),
}

MOST_STACK_BYTES = 16  # of a lane: rarely used


@pytest.fixture
def place(request: pytest.FixtureRequest) -> torch.device:
    """The device that programs run on."""
    if request.param == "gpu":
        return gpu_of_nvidia()
    return request.getfixturevalue("emulate")(attention_cuda, _PROGRAM="attend_row")


@dataclass
class Body:
    """An AttentionBody for the rows of a decode step, with one split."""

    spec: AttentionSpec
    chosen: AttentionSplit | None = FEW
    is_arranged: bool = False
    arrivals: Tensor | None = field(default=None)

    def attend(self, projected, norms, state, rows) -> Tensor:
        keys, values, *ring = state
        cos, sin = rows.prepared[self.spec]
        if self.arrivals is None:
            self.arrivals = attention_cuda.new_arrivals(keys.device)
        width = self.spec.num_heads * self.spec.head_dim
        room = room_for_few(projected, len(projected), width) if self.is_arranged else None
        out = attention_cuda.attend(
            projected[:, 0],
            (norms.query, norms.key, norms.eps),
            keys,
            values,
            rows.lanes,
            rows.row_indices[:, 0],
            rows.tables,
            (cos[:, 0], sin[:, 0]),
            arrivals=self.arrivals,
            num_heads=self.spec.num_heads,
            rotary_dim=self.spec.rotary_dim,
            gated=self.spec.gated,
            ring=ring[0] if ring else None,
            few=room,
            chosen=self.chosen,
        )
        out = (plain(room) if room is not None else out)[:, None]
        assert not self.arrivals.any(), "all have come, and the next launch begins anew"
        return out


def case_of(
    name: str, lanes: list[int], row_indices: list[int], place: torch.device
) -> AttentionCase:
    """Unwritten rows are NaN."""
    torch.manual_seed(len(name))
    case = attention_case(SPECS[name], lanes, row_indices, 1, BF16, place)
    written = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    for entry in case.rows.entries:
        written[entry.lane, entry.read[: entry.begin].cpu()] = True
    for stored in (case.keys, case.values):
        stored[~written.to(place)] = torch.nan
    return case


SPLITS = (FEW, AttentionSplit(4, 1, 2), AttentionSplit(1, 3, 64))
ALL = [
    (name, row_index, SPLITS)
    for name in SPECS
    for row_index in (0, 1, 15, 16, 63, 64, 65, 300, 1500)
]
EMULATED = [
    *(("plain", row_index, (FEW,)) for row_index in (0, 1, 15, 16, 63, 64, 65)),
    *((name, 300, (SPLITS[i % 3],)) for i, name in enumerate(SPECS)),
]


@on_both("name, row_index, splits", ALL, EMULATED)
def test_one_row_attends_as_torch_computes_it(name: str, row_index: int, splits, place) -> None:
    case = case_of(name, [1, 0], [row_index, 5], place)
    truth = case.copy()
    expected = truth.run(TorchAttention)
    for chosen in splits:
        found = case.copy()
        out = found.run(lambda spec, chosen=chosen: Body(spec, chosen))
        assert distance(out, expected) < TOLERANCE[BF16], chosen
        assert distance(found.keys.nan_to_num(9), truth.keys.nan_to_num(9)) < TOLERANCE[BF16] / 4
        assert torch.equal(found.values.nan_to_num(9), truth.values.nan_to_num(9))


@on_both("row_indices", [[70, 9, 130], [1500, 9, 2000]], [[70, 9, 130]])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(row_indices: list[int], place) -> None:
    case = case_of("plain", [0, 1, 2], row_indices, place)
    together = case.copy().run(Body)
    others = replace(case.copy(), projected=case.projected.clone())
    others.keys[0].zero_()
    others.values[1].fill_(3)
    others.projected[:2] = 1
    assert torch.equal(others.run(Body)[2], together[2])
    rows = replace(case.rows, lanes=case.rows.lanes[2:], row_indices=case.rows.row_indices[2:])
    rows.prepared.update({case.spec: tuple(each[2:] for each in case.rows.prepared[case.spec])})
    alone = replace(case.copy(), projected=case.projected[2:], rows=rows)
    assert torch.equal(alone.run(Body)[0], together[2])


@on_both("name", ["plain", "a large group"], ["plain", "gated, partly rotated"])
def test_rows_are_arranged_for_the_next_product(name: str, place) -> None:
    case = case_of(name, [2, 0, 1], [70, 9, 130], place)
    expected = case.copy().run(Body)
    assert torch.equal(case.copy().run(lambda spec: Body(spec, is_arranged=True)), expected)


@on_both("row_index", [300, 1500, 30000], [300])
def test_every_run_gives_the_same_bits(row_index: int, place) -> None:
    """Programs end in another order each time, and the counters are those of the previous run."""
    case = case_of("gated, partly rotated", [0, 1], [row_index, 40], place)
    body = Body(case.spec)
    first = case.copy().run(lambda spec: body)
    for _ in range(3):
        assert torch.equal(case.copy().run(lambda spec: body), first)


@on_both("row_index", [70, 1500], [70])
def test_padding_gives_zeros_and_writes_nothing(row_index: int, place) -> None:
    case = case_of("plain", [0, 1], [row_index, 9], place)
    case.rows.lanes[1] = NO_LANE
    before = case.keys.clone()
    out = case.run(Body)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert torch.equal(case.keys[1].nan_to_num(9), before[1].nan_to_num(9))
    assert not torch.equal(case.keys[0].nan_to_num(9), before[0].nan_to_num(9))


@on_both("name", [*SPECS], ["gated, partly rotated", "a large group"])
def test_the_ring_keeps_the_queries_of_every_lane(name: str, place) -> None:
    case = case_of(name, [2, 0], [130, 5], place)
    spec, plain = case.spec, case.copy().run(Body)
    shape = (3, RECENT_ROWS, spec.num_heads, spec.head_dim)
    ring = torch.full(shape, torch.nan, dtype=BF16, device=place)
    state = (case.keys, case.values, ring)
    assert torch.equal(Body(spec).attend(case.projected, case.norms, state, case.rows), plain)
    queries = heads_of(case.projected, spec, case.norms, case.rows.prepared[spec])[0]
    for entry, (lane, row_index) in enumerate([(2, 130), (0, 5)]):
        at = row_index % RECENT_ROWS
        assert distance(ring[lane, at], queries[entry, 0]) < TOLERANCE[BF16] / 4
        ring[lane, at] = torch.nan
    assert ring.isnan().all(), "nothing else is written"


@on_both("name", ["plain"], ["plain"])
def test_the_body_of_a_layer_picks_it_and_counts_again(
    name: str, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cuda, "can_attend", lambda *given: True)
    case = case_of(name, [1, 0], [150, 5], place)
    body, expected = TritonAttention(case.spec), case.copy().run(lambda spec: Body(spec, None))
    for _ in range(2):
        assert torch.equal(case.copy().run(lambda spec: body), expected)


@pytest.mark.parametrize(
    ("num_heads", "rotary_dim", "keys", "is_served"),
    [
        (8, 64, {}, True),
        (8, 64, {"is_cuda": False}, False),
        (8, 64, {"dtype": torch.float32}, False),
        (34, 64, {}, False),
        (8, 62, {}, False),
        (8, 64, {"shape": (2, 64, 2, 24)}, False),
        (8, 64, {"shape": (2, 64, 5000, 64)}, False),
    ],
)
def test_others_are_left_to_triton(
    num_heads: int, rotary_dim: int, keys, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_cuda, "can_compile", lambda index: True)
    device = torch.device("cuda:0")
    usual = {"is_cuda": True, "dtype": BF16, "shape": (2, 64, 2, 64), "device": device}
    stored = SimpleNamespace(**usual | keys)
    projected = torch.empty(1, 8, dtype=BF16)
    assert attention_cuda.can_attend(projected, stored, num_heads, rotary_dim) is is_served


@pytest.mark.gpu
@pytest.mark.parametrize("row_index", [700, 8000, 32000])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_long_context_is_attended_as_torch_computes_it(gated: bool, row_index: int) -> None:
    wide = AttentionSpec(24, 4, 128, 64, 1e7, True)
    narrow = AttentionSpec(32, 8, 128, 128, 1e6, False)
    spec = wide if gated else narrow
    case = attention_case(spec, [1, 0], [row_index, 700], 1, BF16, gpu_of_nvidia())
    expected = case.copy().run(TorchAttention)
    assert distance(case.copy().run(lambda spec: Body(spec, None)), expected) < 1e-2


@pytest.mark.parametrize("name", LAYERS)
def test_a_context_is_divided_alike_wherever_the_memory_is_enough(name: str) -> None:
    heads = LAYERS[name]
    found = {choose_split(heads, n, kib * KIB) for n in (1, 2, 8) for kib in (99, 163, 227)}
    assert len({(each.warps, each.splits) for each in found}) == 1


needs_tools = pytest.mark.skipif(not (BINARIES / "cuobjdump").exists(), reason="no cuobjdump")


@needs_tools
@pytest.mark.slow
@pytest.mark.covered(2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("card", CAPABILITIES)
def test_the_program_fits_every_card(card: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    most_bytes = CARDS[card].shared_kib * KIB - attention_cuda.STATIC_BYTES
    chosen = choose_split(LAYERS[name], 1, most_bytes)
    assert shared_of(LAYERS[name], chosen) <= most_bytes
    capability = divmod(CAPABILITIES[card], 10)
    constants = constants_of(LAYERS[name], chosen, overlaps=capability >= (9, 0))
    binary = tmp_path / "program.cubin"
    binary.write_bytes(compiled(attention_cuda.SOURCE, constants, capability))
    told = [str(BINARIES / "cuobjdump"), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack_bytes = re.search(r"attend_row:\s*REG:(\d+) STACK:(\d+)", usage).groups()
    assert int(registers) * chosen.warps * 32 <= 65536
    assert int(stack_bytes) <= MOST_STACK_BYTES
