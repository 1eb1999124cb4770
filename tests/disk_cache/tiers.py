"""Disk tiers for tests, and what can be seen of them from outside."""

from __future__ import annotations

from pathlib import Path

from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.outcomes import Miss
from luceasync.disk_cache.reader import NodeFile
from tests.disk_cache.node_files import END_KINDS, KEY, NAMESPACE


def tier_of(root: Path, files: FileSystem | None = None, **settings: object) -> DiskTier:
    return DiskTier(root, NAMESPACE, END_KINDS, files=files, **{"min_free_bytes": 0, **settings})


def quarantined(directory: Path) -> list[Path]:
    return sorted((directory / "quarantine").iterdir())


def temporaries(directory: Path) -> list[Path]:
    return sorted(directory.glob(".*.tmp"))


def as_bytes(found: NodeFile | Miss) -> dict[str, bytes]:
    assert isinstance(found, NodeFile), found
    return {name: bytes(view) for name, view in found.tensors.items()}


async def reason_of(tier: DiskTier, key: str = KEY) -> str:
    found = await tier.read(key)
    assert isinstance(found, Miss)
    return found.reason
