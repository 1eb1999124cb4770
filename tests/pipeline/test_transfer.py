"""What is brought to the host is what was there when it was asked for, once it has come."""

from __future__ import annotations

import pytest
import torch

from luceasync.pipeline.transfer import bring


def test_what_a_cpu_has_is_there_at_once():
    numbers = torch.arange(6).view(2, 3)
    here, arrival = bring(numbers)
    assert arrival is None and here.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.gpu
def test_nobody_waits_for_what_a_gpu_brings():
    numbers = torch.arange(6, device="cuda:0").view(2, 3)
    torch.cuda._sleep(50_000_000)
    numbers += 1
    here, arrival = bring(numbers)
    numbers.zero_()  # comes after it
    assert arrival is not None and not arrival.query()
    assert here.device.type == "cpu" and here.is_pinned()
    arrival.synchronize()
    assert here.tolist() == [[1, 2, 3], [4, 5, 6]]
