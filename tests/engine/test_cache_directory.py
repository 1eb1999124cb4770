"""A cache directory is open once it is known what it holds, and works until it is cancelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from luceasync.disk_cache.disk import DiskTier
from luceasync.engine.cache_directory import CacheDirectorySpec, CacheDirectory
from luceasync.errors import ConfigError
from luceasync.prefix_cache.tenants import Tenants
from luceasync.status import CacheStatus

DEADLINE_S = 10.0


class History:
    """Of a tenant who has said nothing."""

    num_tokens_held = 0


def make(opening) -> CacheDirectory:
    return CacheDirectory(CacheDirectorySpec(opening, (0,)), Tenants(History), lambda outcome: None)


async def test_it_tells_when_it_is_open_and_what_the_disk_says_from_then_on(tmp_path: Path):
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


async def test_one_that_cannot_be_opened_is_never_told_to_be_open():
    def opening():
        raise ConfigError("--kv-cache-dir: no")

    opened: list[bool] = []
    with pytest.raises(ConfigError, match="--kv-cache-dir"):
        await make(opening).serve(lambda: opened.append(True))
    assert opened == []
