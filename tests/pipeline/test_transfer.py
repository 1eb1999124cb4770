"""What crosses to the host is all there when it is read."""

from __future__ import annotations

import pytest
import torch

from luceasync.pipeline.transfer import fetch


def test_what_is_on_the_host_is_fetched_as_it_is() -> None:
    x = torch.arange(3.0)
    assert fetch(x) is x


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64])
def test_what_is_fetched_is_what_the_device_was_last_told_to_leave(num_rows: int) -> None:
    x = torch.randn(num_rows, 2000, dtype=torch.float64, device="cuda")
    large = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        large = large @ large
    x[:, 1:] = large[:num_rows, :1].isnan() | True  # after all of that
    found = fetch(x)
    assert found.device.type == "cpu" and bool((found[:, 1:] == 1.0).all())
    before = found.clone()
    x.zero_()
    assert bool((fetch(x) == 0.0).all()) and torch.equal(found, before)
