"""A disk tier in a directory of its own."""

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from luceasync.disk_cache.disk import DiskTier
from tests.disk_cache.node_files import KEY, NAMESPACE
from tests.disk_cache.tiers import tier_of


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[DiskTier]:
    async with tier_of(tmp_path) as tier:
        yield tier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / NAMESPACE


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / f"{KEY}.safetensors"


@pytest.fixture
def until() -> Iterator[threading.Event]:
    """What hangs until it is set; a test that fails leaves nothing hanging."""
    until = threading.Event()
    yield until
    until.set()
