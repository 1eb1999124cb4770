"""Attention of a prompt's rows on Hopper is that of loops in float64, with and without a window, at
borders of tiles and blocks; a row's bits do not depend on its chunk. Emulated where there is no
such GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.kernels import prefill_attention
from luceasync.kernels.prefill_attention import attend_rows
from tests.kernels.cases import TOLERANCE, distance, random
from tests.kernels.gluon_emulated import emulate
from tests.reference import attention as truth
from tests.reference import windows

DTYPE = torch.float16
HEAD_DIM = 32  # emulated


@pytest.fixture(params=[64, 128, 256] if torch.cuda.is_available() else [HEAD_DIM])
def head_dim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if not torch.cuda.is_available():
        emulate(monkeypatch, prefill_attention, "_attend_prompt_kernel")
        monkeypatch.setitem(prefill_attention.BLOCK_KEYS, HEAD_DIM, 64)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's")
    return request.param


def rows_of(
    num_rows: int, span: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of two heads, and keys and values of one, with NaN behind them."""
    q = random(num_rows, 2, head_dim, dtype=DTYPE, device=device)
    k, v = (random(span + 70, 1, head_dim, dtype=DTYPE, device=device) for _ in range(2))
    k[span:] = v[span:] = torch.nan
    return q, k[:span], v[:span]


@pytest.mark.parametrize(
    "num_rows, span", [(1, 1), (2, 300), (64, 64), (70, 201), (129, 129), (130, 192)], ids=str
)
def test_rows_see_all_keys_before_them(num_rows: int, span: int, head_dim: int, device) -> None:
    q, k, v = rows_of(num_rows, span, head_dim, device)
    found = attend_rows(q, k, v)
    assert distance(found.cpu(), truth.attend(q.cpu(), k.cpu(), v.cpu())) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("begin", [0, 3, 90, 1000])
@pytest.mark.parametrize("window, num_rows", [(100, 150), (5, 70), (64, 1), (300, 20)], ids=str)
def test_rows_see_their_window(
    window: int, num_rows: int, begin: int, head_dim: int, device
) -> None:
    """`window` - 1 rows come before those of the queries, of which the first may stand for
    positions below 0.
    """
    before = window - 1
    q, k, v = rows_of(num_rows, before + num_rows, head_dim, device)
    at = torch.tensor([begin], dtype=torch.int32, device=device)
    found = attend_rows(q, k, v, window=window, begin=at)
    q, k, v, oldest = q.cpu(), k.cpu(), v.cpu(), max(before - begin, 0)
    seen = [range(max(t, oldest), before + t + 1) for t in range(num_rows)]
    expected = [windows.attend_to(row, k, v, keys) for row, keys in zip(q, seen, strict=True)]
    assert distance(found.cpu(), torch.stack(expected)) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("window", [None, 40])
def test_bits_of_a_row_do_not_depend_on_its_chunk(window: int | None, head_dim: int, device):
    q, k, v = rows_of(150, 150, head_dim, device)

    def chunk(begin: int, end: int) -> Tensor:
        first, at = 0, None
        if window is not None:
            first = max(begin + 1 - window, 0)
            at = torch.tensor([begin], dtype=torch.int32, device=device)
        return attend_rows(q[begin:end], k[first:end], v[first:end], window=window, begin=at)

    whole = chunk(0, 150)
    for size in (1, 64, 77):
        starts = range(0, 150, size) if size > 1 else (0, 63, 149)
        for begin in starts:
            end = min(begin + size, 150)
            assert torch.equal(chunk(begin, end), whole[begin:end]), (begin, end)


def test_lanes_need_not_be_contiguous(head_dim: int, device) -> None:
    """Heads are, and so are the rows of a lane as far as one copy reaches."""
    q, k, v = rows_of(40, 100, head_dim, device)
    wide = torch.cat([k, v], 2)
    both = wide[..., :head_dim], wide[..., head_dim:]
    assert torch.equal(attend_rows(q, *both), attend_rows(q, k, v))
