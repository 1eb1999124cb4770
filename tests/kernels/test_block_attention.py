"""Blocks merged by their log-sum-exp are one softmax, whatever their sizes."""

import pytest
import torch

from luceasync.kernels import block_attention
from luceasync.models.mixers.attention_torch import attend_past as torch_attend_past
from luceasync.models.mixers.attention_triton import attend_past
from tests.kernels.cases import TOLERANCE, distance, random
from tests.reference import attention as truth

SHAPES = {"groups": (6, 2, 32), "one head": (1, 1, 16), "odd heads": (5, 5, 20)}
BLOCKS = [(5,), (64, 64, 3), (1, 17), ()]


class Given:
    """Blocks of one layer; see Past. Notes who has looked at what."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, sizes: tuple[int, ...]) -> None:
        self._rows = [*zip(keys.split(sizes), values.split(sizes), strict=True)] if sizes else []
        self.seen: list[tuple[int, int]] = []

    def blocks(self):
        begin = 0
        for keys, values in self._rows:
            # The memory behind a block's rows is NaN.
            room = [torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in (keys, values)]
            yield begin, tuple(x[: len(keys)] for x in room)
            begin += len(keys)

    def probe(self, recent: torch.Tensor, rows: torch.Tensor, begin: int) -> None:
        self.seen.append((begin, begin + len(rows)))


@pytest.mark.covered(2)
@pytest.mark.parametrize("num_rows", [1, 37])
@pytest.mark.parametrize("sizes", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("body", [attend_past, torch_attend_past], ids=["triton", "torch"])
def test_a_chunk_sees_all_blocks_and_itself(body, shape, sizes, num_rows, dtype, device) -> None:
    if body is torch_attend_past and device.type == "cuda":
        pytest.skip("the torch body is the CPU's")
    num_heads, num_kv_heads, head_dim = shape
    span = sum(sizes) + num_rows
    q = random(num_rows, num_heads, head_dim, dtype=dtype, device=device)
    k, v = (random(span, num_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
    past = Given(k[: sum(sizes)], v[: sum(sizes)], sizes)
    out = body(q, past, (k[sum(sizes) :], v[sum(sizes) :]), None)
    expected = truth.attend(q.cpu(), k.cpu(), v.cpu())
    assert out.dtype == dtype
    assert distance(out.cpu(), expected) < TOLERANCE[dtype]
    assert past.seen == []


@pytest.mark.parametrize("body", [attend_past, torch_attend_past], ids=["triton", "torch"])
def test_the_newest_rows_look_at_every_key_once(body, device) -> None:
    if body is torch_attend_past and device.type == "cuda":
        pytest.skip("the torch body is the CPU's")
    q, k = (random(n, 2, 16, dtype=torch.float32, device=device) for n in (7, 90))
    past = Given(k[:83], k[:83], (64, 19))
    body(q, past, (k[83:], k[83:]), q)
    assert past.seen == [(0, 64), (64, 83), (83, 90)]


def test_a_part_that_weighs_nearly_nothing_changes_nearly_nothing(device) -> None:
    """Scores that are far apart do not overflow."""
    whole, part = (random(3, 2, 16, dtype=torch.float32, device=device) for _ in range(2))
    log_sum = torch.full((2, 3), 300.0, device=device)
    total, out = whole.clone(), torch.empty_like(whole)
    block_attention.merge((total, log_sum), (part, log_sum - 600), out)
    assert torch.equal(out, whole)
    assert (log_sum == 300).all()
