"""Attention of one row per lane: equal to torch's at every page border, and independent of other
lanes.
"""

import pytest
import torch

from luceasync.kernels import attention, attention_cuda
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.mixers.attention_triton import TritonAttention
from luceasync.models.pass_rows import NO_LANE
from tests.kernels.cases import TOLERANCE, attention_case, distance

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
    monkeypatch.setattr(attention, "NUM_SPLITS", 4)


def test_a_page_holds_a_chunk() -> None:
    assert attention.PAGE_TOKENS == CHUNK_TOKENS


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton also where CUDA C++ runs."""
    monkeypatch.setattr(attention_cuda, "can_attend", lambda *given: False)


@pytest.mark.covered(2)
@pytest.mark.parametrize("position", [0, 63, 64, 300])
def test_one_row_attends_as_torch_computes_it(spec, position, dtype, device) -> None:
    case = attention_case(spec, [1, 0], [position, 5], 1, dtype, device)
    truth, found = case.copy(), case.copy()
    expected = truth.run(TorchAttention)
    assert distance(found.run(TritonAttention), expected) < TOLERANCE[dtype]
    assert distance(found.keys, truth.keys) < TOLERANCE[dtype] / 4
    assert torch.equal(found.values, truth.values)


def test_a_row_does_not_depend_on_other_lanes(dtype, device) -> None:
    case = attention_case(SPECS["plain"], [0, 1, 2], [70, 9, 130], 1, dtype, device)
    together = case.copy().run(TritonAttention)
    case.keys[0].zero_()
    case.values[2].fill_(3)
    assert torch.equal(case.run(TritonAttention)[1], together[1])


def test_padding_gives_zeros_and_writes_nothing(dtype, device) -> None:
    case = attention_case(SPECS["plain"], [0, 1], [70, 9], 1, dtype, device)
    case.rows.lanes[1] = NO_LANE
    before = case.keys.clone()
    out = case.run(TritonAttention)
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert torch.equal(case.keys[1], before[1]) and not torch.equal(case.keys[0], before[0])


def test_rows_of_prefill_attend_as_torch_computes_it(spec, dtype, device) -> None:
    case = attention_case(spec, [1], [50], 37, dtype, device)
    truth, found = case.copy(), case.copy()
    expected = truth.run(TorchAttention)
    assert distance(found.run(TritonAttention), expected) < TOLERANCE[dtype]
    assert distance(found.keys, truth.keys) < TOLERANCE[dtype] / 4
    assert torch.equal(found.values, truth.values)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False], ids=["head 256, gated", "head 128"])
def test_a_chunk_of_many_rows_attends_as_torch_computes_it(gated, device) -> None:
    """Enough rows for the kernel for Hopper."""
    wide, narrow = (
        AttentionSpec(16, 4, 256, 64, 1e7, True),
        AttentionSpec(32, 8, 128, 128, 1e6, False),
    )
    case = attention_case(wide if gated else narrow, [1], [1000], 600, torch.bfloat16, device)
    assert distance(case.copy().run(TritonAttention), case.copy().run(TorchAttention)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False], ids=["head 256, gated", "head 128"])
def test_a_long_context_is_attended_as_torch_computes_it(gated, device, monkeypatch) -> None:
    monkeypatch.setattr(attention, "NUM_SPLITS", 64)
    wide, narrow = (
        AttentionSpec(16, 4, 256, 64, 1e7, True),
        AttentionSpec(32, 8, 128, 128, 1e6, False),
    )
    spec = wide if gated else narrow
    case = attention_case(spec, [1, 0], [32000, 700], 1, torch.bfloat16, device)
    assert distance(case.copy().run(TritonAttention), case.copy().run(TorchAttention)) < 1e-2
