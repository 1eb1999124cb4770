"""A cache directory is served once it is scanned, until cancelled; its sizes fit the machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from luceasync.config import CacheConfig
from luceasync.disk_cache.disk import DiskTier
from luceasync.engine.cache_directory import (
    CacheDirectory,
    CacheDirectorySpec,
    directory_spec_of,
    held_bytes_of,
    limits_of,
    store_spec_of,
    warm_bytes_of,
)
from luceasync.errors import ConfigError
from luceasync.prefix_cache.tenants import Tenants
from luceasync.status import CacheStatus
from tests.disk_cache.node_files import KEY, NAMESPACE, contents_of, file_of

DEADLINE_S = 10.0


class History:
    """Of a tenant without answers."""

    num_tokens_held = 0


def make(opening) -> CacheDirectory:
    return CacheDirectory(CacheDirectorySpec(opening, (0,)), Tenants(History), lambda outcome: None)


async def test_it_reports_when_it_is_open_and_the_status_of_the_disk_then(tmp_path: Path):
    directory = make(lambda: DiskTier(tmp_path, "test", frozenset()))
    status = CacheStatus(written_bytes_total=-1)
    assert directory.described(status) is status
    is_open = asyncio.Event()
    task = asyncio.create_task(directory.serve(is_open.set))
    async with asyncio.timeout(DEADLINE_S):
        await is_open.wait()
        await directory.drain(DEADLINE_S)
    assert directory.described(status).written_bytes_total == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_directory_that_cannot_be_opened_is_never_reported_open():
    def opening():
        raise ConfigError("--kv-cache-dir: no")

    opened: list[bool] = []
    with pytest.raises(ConfigError, match="--kv-cache-dir"):
        await make(opening).serve(lambda: opened.append(True))
    assert opened == []


# --- sizes ----------------------------------------------------------------------------------------


def disk_bytes(directory: Path) -> int | None:
    config = CacheConfig(memory_bytes=0, cache_dir=directory)
    return limits_of(config, held_bytes_of(directory)).disk_bytes


def keep_a_node(directory: Path) -> int:
    """Its bytes."""
    path = directory / NAMESPACE / f"{KEY}.safetensors"
    path.parent.mkdir()
    path.write_bytes(file_of(contents_of()))
    return path.stat().st_size


def test_the_share_of_the_disk_does_not_shrink_by_what_is_stored(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("luceasync.engine.cache_directory._free_bytes", lambda directory: 10 << 30)
    assert disk_bytes(tmp_path / "new") == disk_bytes(tmp_path) == 5 << 30
    num_bytes = keep_a_node(tmp_path)
    assert disk_bytes(tmp_path) == (5 << 30) + num_bytes // 2


def test_a_disk_that_is_full_at_the_start_is_written_once_it_has_space(tmp_path: Path, monkeypatch):
    """A share of nothing would hold no node, and nobody would be told of the full disk."""
    monkeypatch.setattr("luceasync.engine.cache_directory._free_bytes", lambda directory: 4096)
    assert disk_bytes(tmp_path) == 1 << 30


def test_a_file_in_place_of_the_directory_is_refused_later(tmp_path: Path):
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


@pytest.mark.parametrize(
    ("secret", "url", "words"),
    [
        (None, "ftp://x/y", "--kv-store ftp://x/y: expected a URL"),
        (None, "file:///missing", "--kv-store file:///missing: there is no such directory"),
        (None, "file://relative", "--kv-store file://relative: expected file:///PATH"),
        ("short", "file:///tmp", "--kv-store-key-file .*: 5 bytes; expected at least 16"),
        ("missing", "file:///tmp", "--kv-store-key-file .*: No such file"),
    ],
)
def test_a_store_that_cannot_be_meant_is_refused_before_it_is_asked(
    tmp_path: Path, secret: str | None, url: str, words: str
) -> None:
    key_file = None if secret is None else tmp_path / "secret"
    if key_file is not None and secret != "missing":
        key_file.write_text(secret)
    config = CacheConfig(cache_dir=tmp_path, store_url=url, store_key_file=key_file)
    with pytest.raises(ConfigError, match=f"^{words}"):
        store_spec_of(config)


def test_the_seal_of_a_store_follows_from_the_secret_alone(tmp_path: Path) -> None:
    keys = set()
    for number, secret in enumerate(
        ("a secret of sixteen", "a secret of sixteen\n", "another of sixteen")
    ):
        (tmp_path / f"{number}").write_text(secret)
        config = CacheConfig(
            cache_dir=tmp_path, store_url="file:///tmp", store_key_file=tmp_path / f"{number}"
        )
        found = store_spec_of(config)
        assert found is not None and secret.strip() not in repr(found)
        keys.add(found.seal_key)
    assert len(keys) == 2


@pytest.mark.parametrize(("free_mib", "is_told"), [(1023, True), (1024, False)])
async def test_a_disk_without_the_space_that_must_stay_free_is_told_at_the_start(
    free_mib: int, is_told: bool, tmp_path: Path, monkeypatch, caplog
):
    usage = SimpleNamespace(free=free_mib << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    spec = directory_spec_of(
        tmp_path, (0,), frozenset(), lambda: {}, lambda num_bytes: memoryview(bytearray(num_bytes))
    )
    async with asyncio.timeout(DEADLINE_S), spec.open():
        pass
    told = [each for each in caplog.messages if "1024 MiB must stay free" in each]
    assert bool(told) == is_told and all(str(tmp_path) in each for each in told)
