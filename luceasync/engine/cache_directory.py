"""The cache directory as the engine has it: opened, looked through and worked on by one task.

Owns the disk tier while it is open and the worker that carries out orders for it. Knows no
requests; what is written and read is decided in luceasync.prefix_cache.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from luceasync.config import CacheConfig
from luceasync.disk_cache.directory import make_usable
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.upkeep import Upkeep
from luceasync.errors import ConfigError
from luceasync.host_cache.arena import node_bytes_of
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_worker import DiskWorker
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.tenants import Tenants
from luceasync.status import CacheStatus

MIN_FREE_BYTES = 1 << 30  # of the disk, that stay free


@dataclass(frozen=True, slots=True)
class Cabinet:
    """A cache directory: how to open it, and the first layer of each shard, by which tensors are
    named in it. Opening raises ConfigError where the directory cannot be used.
    """

    open: Callable[[], AbstractAsyncContextManager[DiskTier]]
    split: tuple[int, ...]


def cabinet_of(
    cache_dir: Path,
    split: tuple[int, ...],
    end_kinds: frozenset[str],
    find_namespace: Callable[[], str],
    allocate: Callable[[int], memoryview],
) -> Cabinet:
    """The cabinet of `cache_dir`, which is made if need be. `find_namespace` may take long, for it
    hashes weights; `allocate` gives the memory for what is read. `end_kinds`: of the model's
    tensors those that belong to a node's end.
    """

    @asynccontextmanager
    async def open_disk() -> AsyncIterator[DiskTier]:
        await asyncio.to_thread(make_usable, cache_dir)
        namespace = await asyncio.to_thread(find_namespace)
        async with DiskTier(
            cache_dir, namespace, end_kinds, min_free_bytes=MIN_FREE_BYTES, allocate=allocate
        ) as disk:
            yield disk

    return Cabinet(open_disk, split)


class CacheDirectory:
    """Made on the event loop, and used there. `orders` alone is for the engine's thread."""

    def __init__(
        self,
        cabinet: Cabinet,
        tenants: Tenants,
        tell: Callable[[Callable[[PrefixCache], None]], None],
    ) -> None:
        """`tenants` learn what files hold; `tell` brings outcomes to the engine's thread."""
        self._cabinet = cabinet
        self._tenants = tenants
        self.orders = DiskWorker(cabinet.split, tell)
        self._disk: DiskTier | None = None

    async def serve(self, opened: Callable[[], None]) -> None:
        """Open it and call `opened` once it is known what it holds, then work until cancelled.
        Raises ConfigError.
        """
        async with self._cabinet.open() as disk:
            self._tenants.add_nodes(await self.orders.scan(disk))
            await asyncio.to_thread(self._tenants.get, "")  # so that its first prompt is fast
            self._disk = disk
            opened()
            await self.orders.serve(disk)

    def begin_life(self) -> None:
        """A new index takes the place of the old one; called in the engine's thread, before the
        first order of it.
        """
        self.orders.begin_epoch()

    def tell_again(self) -> None:
        """Tell the new index all that the disk holds, once the disk is open."""
        self.orders.scan_again()

    async def drain(self, timeout_s: float) -> None:
        """Wait until every order is done, but not longer than `timeout_s`."""
        await self.orders.drain(timeout_s)

    def described(self, status: CacheStatus) -> CacheStatus:
        """The status, with what the disk says of itself once it is open."""
        return status if self._disk is None else self.orders.described(status, self._disk)


# Sizes of the prefix cache that follow from this machine where its flags leave them open. Looks
# at memory and disk; changes nothing.


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
