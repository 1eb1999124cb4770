"""What a start finds, in one line where it is not enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from luceasync.errors import PlacementError

TOLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.63 GiB of "
    "which 1.21 GiB is free. Of the allocated memory 6.1 GiB is allocated by PyTorch. See the docs."
)


async def test_memory_that_is_gone_meanwhile_is_told_in_one_line(
    start_engine, tiny_dir: Path, monkeypatch
):
    def too_much(*args: object) -> None:
        raise torch.OutOfMemoryError(TOLD)

    monkeypatch.setattr("luceasync.engine.load.rehearse", too_much)
    with pytest.raises(
        PlacementError, match=r"1.21 GiB is free. Free some of it, or lower"
    ) as told:
        async with start_engine():
            pass
    assert "\n" not in str(told.value) and "PyTorch" not in str(told.value)
