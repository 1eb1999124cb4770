"""Compiled attention equals torch's; a row's bits are the same alone, in a prompt, in any pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from luceasync.cyext.attention import HAS_KERNEL
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_compiled import CompiledAttention, can_attend
from luceasync.models.mixers.attention_torch import attention
from luceasync.models.mixers.sliding_compiled import CompiledSliding
from luceasync.models.mixers.sliding_torch import TorchSliding
from luceasync.models.pass_rows import Entry

pytestmark = pytest.mark.skipif(not HAS_KERNEL, reason="this machine has no kernel")

SPEC = AttentionSpec(4, 2, 64, 64, 1e4, gated=False)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # rounding shares and result is 2.2e-3


def attend(q: Tensor, keys: Tensor, values: Tensor, read: slice | Tensor, begin: int) -> Tensor:
    entry = Entry(0, begin, begin + len(q), slice(0, 0), read)
    return CompiledAttention(SPEC).attend_entry(q, keys, values, entry)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "begin", "heads", "kv_heads", "head_dim"),
    [
        (1, 0, 4, 2, 32),
        (1, 130, 16, 8, 128),
        (5, 60, 4, 1, 64),
        (70, 130, 6, 2, 96),
        (3, 62, 4, 4, 256),
        (40, 0, 8, 2, 64),
    ],
)
def test_it_is_attention_of_float64(
    dtype: torch.dtype, num_rows: int, begin: int, heads: int, kv_heads: int, head_dim: int
):
    end = begin + num_rows
    q = torch.randn(num_rows, heads, head_dim).to(dtype)
    keys, values = (torch.randn(end + 40, kv_heads, head_dim).to(dtype) for _ in range(2))
    exact = attention(q.double(), keys[:end].double(), values[:end].double())
    keys[end:], values[end:] = torch.nan, torch.nan  # not read
    found = attend(q, keys, values, slice(0, end + 40), begin)
    assert (found.double() - exact).norm() < TOLERANCE[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_bits_that_it_has_alone_and_elsewhere(dtype: torch.dtype):
    q = torch.randn(150, 4, 64).to(dtype)
    keys, values = (torch.randn(230, 2, 64).to(dtype) for _ in range(2))
    together = attend(q, keys, values, slice(0, 230), 80)
    for row in (0, 1, 63, 64, 149):
        alone = attend(q[row : row + 1], keys, values, slice(0, 230), 80 + row)
        assert torch.equal(alone, together[row : row + 1])
    places = torch.randperm(230)
    there = torch.empty(2, 240, 2, 64).to(dtype)
    there[0, places], there[1, places] = keys, values
    assert torch.equal(attend(q, there[0], there[1], places, 80), together)
    moved = torch.cat([torch.zeros_like(keys[:9]), keys]), torch.cat([values[:9], values])
    assert torch.equal(attend(q, *moved, slice(9, 239), 80), together)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_bits_do_not_depend_on_the_threads(dtype: torch.dtype):
    q = torch.randn(1, 4, 64).to(dtype)
    keys, values = (torch.randn(300, 2, 64).to(dtype) for _ in range(2))
    num_threads, found = torch.get_num_threads(), []
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(attend(q, keys, values, slice(0, 300), 299))
    torch.set_num_threads(num_threads)
    assert torch.equal(found[0], found[1])


def test_large_scores_and_equal_ones():
    q = torch.full((2, 4, 64), 30.0)
    keys, values = torch.zeros(200, 2, 64), torch.randn(200, 2, 64)
    mean = values[:200].mean(0).repeat_interleave(2, 0)
    torch.testing.assert_close(attend(q, keys, values, slice(0, 200), 198)[1], mean)
    keys[150] = 30.0
    sharp = values[150].repeat_interleave(2, 0)
    torch.testing.assert_close(attend(q, keys, values, slice(0, 200), 198)[0], sharp)


def test_heads_that_it_does_not_take_are_torchs():
    assert can_attend(SPEC)
    assert not can_attend(replace(SPEC, head_dim=48))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "window"), [(1, 1), (1, 200), (70, 1), (200, 24), (200, 64), (200, 65), (130, 500)]
)
def test_windows_are_those_of_float64(dtype: torch.dtype, num_rows: int, window: int):
    """The rows' keys come last, whatever stands before their windows."""
    num_keys = num_rows + min(window - 1, 150)
    q = torch.randn(num_rows, 4, 64).to(dtype)
    keys, values = (torch.randn(num_keys, 2, 64).to(dtype) for _ in range(2))
    body = CompiledSliding(replace(SPEC, window=window))
    found = body.attend_rows(q, keys, values)
    exact = TorchSliding(body._spec).attend_rows(q.double(), keys.double(), values.double())
    assert (found.double() - exact).norm() < TOLERANCE[dtype] * exact.norm()
    row = num_rows // 2  # the same bits as alone, if blocks of keys begin at the same place
    end = num_keys - num_rows + row + 1
    alone = body.attend_rows(q[row : row + 1], keys[:end], values[:end])
    assert torch.equal(alone, found[row : row + 1])
