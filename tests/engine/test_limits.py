"""Sizes that follow from this machine."""

from __future__ import annotations

from pathlib import Path

from luceasync.config import CacheConfig
from luceasync.engine.cache_directory import held_bytes_of, limits_of, warm_bytes_of
from tests.disk_cache.node_files import KEY, NAMESPACE, contents_of, file_of


def disk_bytes(directory: Path) -> int | None:
    config = CacheConfig(memory_bytes=0, cache_dir=directory)
    return limits_of(config, held_bytes_of(directory)).disk_bytes


def keep_a_node(directory: Path) -> int:
    """Its bytes."""
    path = directory / NAMESPACE / f"{KEY}.safetensors"
    path.parent.mkdir()
    path.write_bytes(file_of(contents_of()))
    return path.stat().st_size


def test_the_disks_share_does_not_shrink_by_what_was_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("luceasync.engine.cache_directory._free_bytes", lambda directory: 10_000)
    assert disk_bytes(tmp_path / "new") == disk_bytes(tmp_path) == 5_000
    num_bytes = keep_a_node(tmp_path)
    assert disk_bytes(tmp_path) == 5_000 + num_bytes // 2


def test_a_directory_that_is_none_has_no_share_of_its_own(tmp_path: Path):
    (tmp_path / "file").touch()
    assert disk_bytes(tmp_path / "file") > 0  # it is refused where it is opened


def test_memory_is_prepared_for_what_the_disk_holds_and_within_a_share_of_the_budget(
    tmp_path: Path,
):
    def warm_bytes(memory_bytes: int, directory: Path | None) -> int:
        held_bytes = held_bytes_of(directory)
        config = CacheConfig(memory_bytes=memory_bytes, cache_dir=directory)
        return warm_bytes_of(limits_of(config, held_bytes), held_bytes)

    assert warm_bytes(1 << 30, tmp_path) == warm_bytes(1 << 30, None) == 0
    num_bytes = keep_a_node(tmp_path)
    assert warm_bytes(1 << 30, tmp_path) == num_bytes
    assert warm_bytes(4000, tmp_path) == 1000
    assert warm_bytes(0, tmp_path) == 0
