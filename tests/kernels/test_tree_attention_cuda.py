"""Attention of small trees in CUDA C++: equal to torch's at every border of pages, units and
splits; only scratch is written; results come as rows or arranged for a product. Also compiles it
for other GPUs.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from luceasync.kernels import prepared_rows, quant_gemv_cuda, tree_attention_cuda
from luceasync.kernels.cuda_program import compiled
from luceasync.kernels.tree_attention_cuda import (
    TreeHeads,
    TreeParts,
    choose_split,
    constants_of,
    merge_constants_of,
    shared_of,
)
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention, heads_of
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.quant.gpu import TiledQuantWeight
from luceasync.models.quant.tiles import coding_of
from luceasync.models.trees import chain, torch_trees
from tests.kernels.cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_scratch,
    distance,
    random_parents,
    tree_rows,
)
from tests.kernels.offline import BINARIES, CARDS, KIB
from tests.kernels.places import gpu_of_nvidia, on_both
from tests.kernels.test_quant_gemv import ALL as FORMS
from tests.kernels.test_quant_gemv import matrix

BF16 = torch.bfloat16
SPECS = {
    "plain": AttentionSpec(8, 2, 64, 64, 10000.0, gated=False),
    "gated, partly rotated": AttentionSpec(6, 2, 128, 32, 10000.0, gated=True),
    "without head norms": AttentionSpec(3, 3, 32, 32, 1e4, gated=False, has_head_norms=False),
    "a large group": AttentionSpec(12, 1, 16, 16, 10000.0, gated=True),
}
LAYERS = {
    "4B": TreeHeads(8, 4, 128, 64, gated=False),
    "gated": TreeHeads(4, 6, 128, 32, gated=True),
    "narrow": TreeHeads(2, 7, 64, 32, gated=False),
}
CAPABILITIES = {name: int(name[3:]) for name, card in CARDS.items() if card.is_nvidia}
MOST_STACK_BYTES = 256  # of a lane: of what is ready before the first tile comes


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits, so that each takes several tiles of a context."""
    monkeypatch.setattr(tree_attention_cuda, "NUM_SPLITS", 3)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> torch.device:
    """The device that programs run on."""
    if request.param == "gpu":
        return gpu_of_nvidia()
    emulate = request.getfixturevalue("emulate")
    emulate(prepared_rows, _ARRANGE="arrange_rows")
    emulate(tree_attention_cuda, _ATTEND="attend_tree")
    emulate(quant_gemv_cuda, _PRODUCT="quant_gemv")
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(
        tree_attention_cuda, "SOURCE", tree_attention_cuda.MERGE_SOURCE
    )  # of the second program
    return emulate(tree_attention_cuda, _MERGE="merge_tree")


def case_of(name: str, row_indices: list[int], num_rows: int, place: torch.device) -> AttentionCase:
    """Two lanes; what is not committed is NaN."""
    torch.manual_seed(len(name))
    case = attention_case(SPECS[name], [1, 0], row_indices, num_rows, BF16, place)
    committed = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    for entry in case.rows.entries:
        committed[entry.lane, entry.read[: entry.begin].cpu()] = True
    for stored in (case.keys, case.values):
        stored[~committed.to(place)] = torch.nan
    return case


def run(
    case: AttentionCase, parents: Tensor, *, queries: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Output and scratch."""
    parts, scratch = parts_of(case, parents, queries)
    return parts.rows(), scratch


def parts_of(
    case: AttentionCase, parents: Tensor, queries: Tensor | None = None
) -> tuple[TreeParts, tuple[Tensor, Tensor]]:
    spec = case.spec
    rows, scratch = tree_rows(case.rows, spec, parents), attention_scratch(case)
    parts = tree_attention_cuda.attend_tree(
        case.projected,
        (case.norms.query, case.norms.key, case.norms.eps),
        case.keys,
        case.values,
        rows.lanes,
        rows.row_indices,
        rows.tables,
        rows.prepared[spec],
        torch_trees(parents.to(case.keys.device), 1).ancestors,
        scratch,
        num_heads=spec.num_heads,
        rotary_dim=spec.rotary_dim,
        gated=spec.gated,
        queries=queries,
    )
    return parts, scratch


def truth_of(case: AttentionCase, parents: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Those of torch."""
    rows, scratch = tree_rows(case.rows, case.spec, parents), attention_scratch(case)
    trees = torch_trees(parents.to(case.keys.device), 1)
    state = (case.keys.nan_to_num(0), case.values.nan_to_num(0))
    body = TorchAttention(case.spec)
    out = body.attend_tree(case.projected, case.norms, state, rows, trees, scratch)
    return out, scratch


@on_both(
    "name, row_index, num_rows",
    [
        (name, row_index, num_rows)
        for name in SPECS
        for row_index in (0, 1, 15, 16, 63, 64, 65, 300, 1500)
        for num_rows in (1, 9, 16)
    ],
    [
        *(("plain", row_index, 9) for row_index in (0, 16, 64, 65)),
        ("plain", 300, 16),
        ("gated, partly rotated", 140, 5),
        ("without head norms", 49, 3),
        ("a large group", 70, 16),
    ],
)
def test_rows_see_what_is_committed_and_their_ancestors(
    name: str, row_index: int, num_rows: int, place
) -> None:
    case, parents = case_of(name, [row_index, 5], num_rows, place), random_parents(2, num_rows)
    before, (expected, written) = case.copy(), truth_of(case, parents)
    out, scratch = run(case, parents)
    assert distance(out, expected) < TOLERANCE[BF16]
    assert distance(scratch[0], written[0]) < TOLERANCE[BF16] / 4
    assert torch.equal(scratch[1], written[1])
    for found, given in ((case.keys, before.keys), (case.values, before.values)):
        assert torch.equal(found.nan_to_num(9), given.nan_to_num(9))


@on_both("name", [*SPECS], ["a large group"])
def test_queries_are_written_where_they_are_wanted(name: str, place) -> None:
    case, parents = case_of(name, [70, 5], 7, place), random_parents(2, 7)
    spec, plain = case.spec, run(case, parents)[0]
    shape = (*case.projected.shape[:2], spec.num_heads, spec.head_dim)
    queries = torch.full(shape, torch.nan, dtype=BF16, device=place)
    assert torch.equal(run(case, parents, queries=queries)[0], plain)
    prepared = tree_rows(case.rows, spec, parents).prepared[spec]
    expected = heads_of(case.projected, spec, case.norms, prepared)[0]
    assert distance(queries, expected) < TOLERANCE[BF16] / 4


@on_both("num_rows", [9, 14, 16], [11])
def test_rows_come_out_arranged_as_they_would_be_by_a_launch_of_its_own(
    num_rows: int, place
) -> None:
    name = "gated, partly rotated"
    case = attention_case(SPECS[name], [0], [130], num_rows, BF16, place)
    codings = [coding_of(FORMS[each]) for each in ("Q4_K", "Q8_0")]
    parts, _ = parts_of(case, chain(1, num_rows, place))
    wanted = prepared_rows.arrange(parts.rows()[0], codings)
    found = parts.arranged(codings)
    assert len(found) == num_rows and found.lifts == wanted.lifts
    assert torch.equal(found.columns, wanted.columns)
    assert torch.equal(found.group_sums, wanted.group_sums)


@on_both("num_rows", [5, 16], [16])
def test_a_layer_gives_its_output_what_attention_has_arranged(
    num_rows: int, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention_cuda, "can_attend", lambda *given: True)
    monkeypatch.setattr(quant_gemv_cuda, "can_multiply", lambda x: True)
    spec = SPECS["gated, partly rotated"]
    case, parents = (
        attention_case(spec, [0], [70], num_rows, BF16, place),
        chain(1, num_rows, place),
    )
    output = TiledQuantWeight(matrix(FORMS["Q4_K"], 48, spec.query_dim, place)[0], 0, BF16)
    x = torch.randn(1, num_rows, 48, device=place).to(BF16)
    body, rows = TritonAttention(spec), tree_rows(case.rows, spec, parents)
    given = (case.projected, case.norms, (case.keys, case.values), rows, torch_trees(parents, 1))
    mixed = body.attend_tree(*given, attention_scratch(case))
    added = body.add_tree(*given, attention_scratch(case), output, x)
    assert torch.equal(added, output.linear_add(mixed, x))


@on_both("row_index", [300, 1500], [300])
def test_every_run_gives_the_same_bits_whatever_other_lanes_hold(row_index: int, place) -> None:
    parents = random_parents(2, 4)
    case = case_of("plain", [row_index, 200], 4, place)
    first, _ = run(case, parents)
    rows = replace(
        case.rows,
        entries=case.rows.entries[:1],
        lanes=case.rows.lanes[:1],
        row_indices=case.rows.row_indices[:1],
    )
    alone = replace(case, projected=case.projected[:1].contiguous(), rows=rows)
    assert torch.equal(run(case, parents)[0], first)
    assert torch.equal(run(alone, parents[:1])[0], first[:1])


@on_both("row_index", [70, 1500], [70])
def test_padding_gives_zeros(row_index: int, place) -> None:
    case = case_of("plain", [row_index, 9], 5, place)
    case.rows.lanes[1] = NO_LANE
    out, _ = run(case, random_parents(2, 5))
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize(
    ("num_rows", "rotary_dim", "keys", "is_served"),
    [
        (16, 64, {}, True),
        (16, 64, {"is_cuda": False}, False),
        (16, 64, {"dtype": torch.float32}, False),
        (17, 64, {}, False),
        (16, 62, {}, False),
        (16, 64, {"shape": (2, 64, 2, 256)}, False),
    ],
)
def test_others_are_left_to_triton(
    num_rows: int, rotary_dim: int, keys, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention_cuda, "can_compile", lambda index: True)
    monkeypatch.setattr(tree_attention_cuda, "shared_bytes", lambda keys: 99 * KIB)
    device = torch.device("cuda:0")
    usual = {"is_cuda": True, "dtype": BF16, "shape": (2, 64, 2, 128), "device": device}
    stored = SimpleNamespace(**usual | keys)
    projected = torch.empty(1, num_rows, 8, dtype=BF16)
    assert tree_attention_cuda.can_attend(projected, stored, 8, rotary_dim) is is_served


@pytest.mark.gpu
@pytest.mark.parametrize("row_index", [700, 8000, 32000])
def test_a_long_context_is_attended_as_torch_computes_it(row_index: int) -> None:
    spec = AttentionSpec(32, 8, 128, 128, 1e6, False)
    case = attention_case(spec, [1, 0], [row_index, 700], 16, BF16, gpu_of_nvidia())
    parents = random_parents(2, 16)
    assert distance(run(case, parents)[0], truth_of(case, parents)[0]) < 1e-2


@pytest.mark.skipif(not (BINARIES / "cuobjdump").exists(), reason="no cuobjdump")
@pytest.mark.slow
@pytest.mark.covered(2)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("card", CAPABILITIES)
def test_the_programs_fit_every_card(card: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    heads, chosen = LAYERS[name], choose_split(LAYERS[name], 16)
    most_bytes = CARDS[card].shared_kib * KIB - tree_attention_cuda.STATIC_BYTES
    assert shared_of(heads, chosen) <= most_bytes
    capability = divmod(CAPABILITIES[card], 10)
    constants = constants_of(heads, 16, chosen, overlaps=capability >= (9, 0))
    merging = merge_constants_of(heads, 16, chosen, overlaps=capability >= (9, 0))
    assert compiled(tree_attention_cuda.MERGE_SOURCE, merging, capability)
    binary = tmp_path / "program.cubin"
    binary.write_bytes(compiled(tree_attention_cuda.SOURCE, constants, capability))
    told = [str(BINARIES / "cuobjdump"), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack_bytes = re.search(r"attend_tree:\s*REG:(\d+) STACK:(\d+)", usage).groups()
    assert int(registers) * chosen.warps * 32 <= 65536
    assert int(stack_bytes) <= MOST_STACK_BYTES
