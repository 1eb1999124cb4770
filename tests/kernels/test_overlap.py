"""Whether kernels overlap is decided once per device, and measurements can turn it off."""

from types import SimpleNamespace

import pytest

from luceasync.kernels import overlap


@pytest.mark.parametrize("may", [True, False])
def test_kernels_begin_early_only_where_their_device_can(monkeypatch, may: bool) -> None:
    monkeypatch.setattr(overlap, "can_overlap", lambda index: may and index == 3)
    on_gpu = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=3))
    early = {"OVERLAP": True, "launch_pdl": True}
    assert overlap.overlap_options(on_gpu) == (early if may else {"OVERLAP": False})
