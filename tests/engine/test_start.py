"""Sizes that follow from this machine."""

from __future__ import annotations

from pathlib import Path

from luceasync.config import CacheConfig
from luceasync.engine.start import limits_of
from tests.prefix.node_files import KEY, NAMESPACE, contents_of, file_of


def disk_bytes(directory: Path) -> int | None:
    return limits_of(CacheConfig(memory_bytes=0, cache_dir=directory)).disk_bytes


def test_the_disks_share_does_not_shrink_by_what_was_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("luceasync.engine.start._free_bytes", lambda directory: 10_000)
    assert disk_bytes(tmp_path / "new") == disk_bytes(tmp_path) == 5_000
    path = tmp_path / NAMESPACE / f"{KEY}.safetensors"
    path.parent.mkdir()
    path.write_bytes(file_of(contents_of()))
    assert disk_bytes(tmp_path) == 5_000 + path.stat().st_size // 2


def test_a_directory_that_is_none_has_no_share_of_its_own(tmp_path: Path):
    (tmp_path / "file").touch()
    assert disk_bytes(tmp_path / "file") > 0  # it is refused where it is opened
