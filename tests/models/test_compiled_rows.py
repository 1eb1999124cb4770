"""Compiled norms and heads equal torch's; a row's bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_compiled import CompiledAttention, can_attend
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import TorchAttention
from luceasync.models.ops import rms_norm
from luceasync.models.packed_ops import PackedOps

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 70, 1024), (3, 5120), (2, 100)], ids=str)
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1])
    found = PackedOps().norm(x, weight, 1e-6)
    expected = rms_norm(x.float(), weight, 1e-6).double()
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()
    flat = x.view(-1, shape[-1])
    alone = torch.cat([PackedOps().norm(row[None], weight, 1e-6) for row in flat])
    assert torch.equal(alone, found.view(-1, shape[-1]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 64, 64, 1e4, gated=False),
        AttentionSpec(6, 3, 128, 32, 1e6, gated=True),
        AttentionSpec(4, 4, 96, 96, 1e4, gated=False, has_head_norms=False),
    ],
    ids=["all", "a quarter, gated", "no norms"],
)
def test_heads(dtype: torch.dtype, spec: AttentionSpec):
    if not can_attend(spec):
        pytest.skip("this machine has no kernel")
    width = spec.query_dim + 2 * spec.kv_dim + spec.gated * spec.query_dim
    projected = torch.randn(2, 40, width).to(dtype)
    weights = [torch.randn(spec.head_dim) if spec.has_head_norms else None for _ in range(2)]
    norms = HeadNorms(*weights, 1e-6)
    turn = TorchAttention(spec).prepare(torch.arange(80, dtype=torch.int32).view(2, 40) * 37)
    found = CompiledAttention(spec).heads(projected, norms, turn)
    expected = TorchAttention(spec).heads(projected, norms, turn)
    for own, truth in zip(found, expected, strict=True):
        if truth is None:
            assert own is None
            continue
        assert own is not None and own.shape == truth.shape
        assert (own.double() - truth.double()).norm() < TOLERANCE[dtype] * truth.double().norm()
