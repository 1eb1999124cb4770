"""Attention of trees of rows: equal to torch's at every page border; only scratch is
written.
"""

from dataclasses import replace

import pytest
import torch

from luceasync.kernels import tree_attention
from luceasync.kernels.tree_attention import NUM_SPLITS, tile
from luceasync.models.mixers.attention import VERIFY_SPLITS, AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.trees import torch_trees
from tests.kernels.cases import (
    TOLERANCE,
    AttentionCase,
    attention_case,
    attention_scratch,
    distance,
    random_parents,
    tree_rows,
)

SPECS = {
    "plain": AttentionSpec(4, 2, 32, 32, 10000.0, gated=False),
    "gated, partly rotated": AttentionSpec(6, 2, 64, 16, 10000.0, gated=True),
    "without head norms": AttentionSpec(4, 2, 32, 32, 1e4, gated=False, has_head_norms=False),
    "tiny, one head": AttentionSpec(1, 1, 16, 16, 10000.0, gated=True),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return request.param


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits, so that short contexts have several chunks each, and the interpreter little to
    do.
    """
    monkeypatch.setattr(tree_attention, "NUM_SPLITS", 4)


def run(body, case: AttentionCase, parents: torch.Tensor):
    """Output and scratch."""
    rows, scratch = tree_rows(case.rows, case.spec, parents), attention_scratch(case)
    trees = torch_trees(parents.to(case.keys.device), 1)
    state = (case.keys, case.values)
    out = body(case.spec).attend_tree(case.projected, case.norms, state, rows, trees, scratch)
    return out, scratch


def test_the_splits_are_those_that_the_plan_counts_with() -> None:
    assert NUM_SPLITS == VERIFY_SPLITS


@pytest.mark.covered(2)
@pytest.mark.parametrize("position", [0, 63, 64, 300])
def test_rows_see_what_is_committed_and_their_ancestors(spec, position, dtype, device) -> None:
    if spec != SPECS["plain"] and dtype == torch.float16:
        pytest.skip("in the interpreter one shape shows what half does")
    case = attention_case(spec, [1, 0], [position, 5], 9, dtype, device)
    before, parents = case.copy(), random_parents(2, 9)
    expected, truth = run(TorchAttention, case, parents)
    found, scratch = run(TritonAttention, case, parents)
    assert distance(found, expected) < TOLERANCE[dtype]
    assert distance(scratch[0], truth[0]) < TOLERANCE[dtype] / 4
    assert torch.equal(scratch[1], truth[1])
    assert torch.equal(case.keys, before.keys) and torch.equal(case.values, before.values)


@pytest.mark.parametrize("num_rows", [1, 16, 22, 60])
def test_trees_of_any_size_are_attended(num_rows, dtype, device) -> None:
    if num_rows > 16 and dtype == torch.float16:
        pytest.skip("in the interpreter small trees show what half does")
    one_kv_head = replace(SPECS["plain"], num_heads=2, num_kv_heads=1)
    case = attention_case(one_kv_head, [0], [70], num_rows, dtype, device)
    parents = random_parents(1, num_rows)
    expected, _ = run(TorchAttention, case, parents)
    assert distance(run(TritonAttention, case, parents)[0], expected) < TOLERANCE[dtype]


def test_padding_gives_zeros(dtype, device) -> None:
    case = attention_case(SPECS["plain"], [0, 1], [70, 9], 5, dtype, device)
    case.rows.lanes[1] = NO_LANE
    out, _ = run(TritonAttention, case, random_parents(2, 5))
    assert (out[1] == 0).all() and (out[0] != 0).any()


@pytest.mark.parametrize("kib", [64, 99, 163, 227])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_tile_is_as_big_as_the_shared_memory_allows(kib, element_bytes, head_dim) -> None:
    chosen = tile(64, head_dim, element_bytes, kib * 1024)
    step_bytes = (chosen.block_m + (1 + 2 * chosen.num_stages) * 64) * head_dim * element_bytes
    assert step_bytes <= kib * 1024 or (chosen.block_m, chosen.num_stages) == (16, 1)
    assert tile(64, 128, 2, 227 * 1024).block_m == 64


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False], ids=["head 256, gated", "head 128"])
@pytest.mark.parametrize("num_rows", [16, 60])
def test_a_long_context_is_attended_as_torch_computes_it(
    gated, num_rows, device, monkeypatch
) -> None:
    monkeypatch.setattr(tree_attention, "NUM_SPLITS", 32)
    wide, narrow = (
        AttentionSpec(16, 4, 256, 64, 1e7, True),
        AttentionSpec(32, 8, 128, 128, 1e6, False),
    )
    case = attention_case(
        wide if gated else narrow, [1, 0], [32000, 700], num_rows, torch.bfloat16, device
    )
    parents = random_parents(2, num_rows)
    expected, _ = run(TorchAttention, case, parents)
    assert distance(run(TritonAttention, case, parents)[0], expected) < 1e-2
