"""Sizes of the prefix cache that follow from this machine where its flags leave them open.

Looks at memory and disk; changes nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from luceasync.config import CacheConfig
from luceasync.errors import ConfigError
from luceasync.hoststore.memory import node_bytes_of
from luceasync.keeping.limits import Limits
from luceasync.nodefiles.upkeep import Upkeep

TRANSIT_BYTES = 1 << 30  # of memory, for nodes on their way to and from the disk
WARM_SHARE = 4  # of the prefix cache's memory one part has its pages before it is needed


def limits_of(config: CacheConfig, held_bytes: int, least_bytes: int = 0) -> Limits:
    """The limits, where nodes of `held_bytes` lie on the disk. `least_bytes`: what memory was found
    to have room for, and lanes need.
    """
    memory_bytes = max(node_bytes_of(config.memory_bytes), least_bytes)
    disk_bytes = config.budget_bytes
    if disk_bytes is None and config.cache_dir is not None:
        # With what is there already: else every start would want less than the one before it.
        disk_bytes = (_free_bytes(config.cache_dir) + held_bytes) // 2
    return Limits(
        memory_bytes=memory_bytes,
        transit_bytes=0 if disk_bytes is None else TRANSIT_BYTES,
        disk_bytes=disk_bytes,
        min_disk_tokens=config.min_tokens,
        interval_tokens=config.interval_tokens,
    )


def warm_bytes_of(limits: Limits, held_bytes: int) -> int:
    """How much memory is prepared for what lies on the disk and may be read soon."""
    return min(held_bytes, limits.memory_bytes // WARM_SHARE)


def held_bytes_of(directory: Path | None) -> int:
    """Of the nodes on the disk, whatever model they are of; none where it cannot be looked at
    now.
    """
    if directory is None:
        return 0
    try:
        return sum(total.num_bytes for total in Upkeep(directory).totals())
    except (ConfigError, OSError):
        return 0


def _free_bytes(directory: Path) -> int:
    """Of the file system that the directory is, or will be, on."""
    existing = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free
