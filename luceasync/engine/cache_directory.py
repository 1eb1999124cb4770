"""The cache directory as the engine has it: opened, looked through and worked on by one task.

Owns the disk tier while it is open and the worker that carries out orders for it. Knows no
requests; what is written and read is decided in luceasync.keeping.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from luceasync.engine_status import CacheStatus
from luceasync.keeping.disk_worker import DiskWorker
from luceasync.keeping.prefixes import Prefixes
from luceasync.keeping.tenants import Tenants
from luceasync.nodefiles.disk import DiskTier
from luceasync.nodefiles.usable import make_usable

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
        tell: Callable[[Callable[[Prefixes], None]], None],
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
            self._tenants.found(await self.orders.scan(disk))
            await asyncio.to_thread(self._tenants.get, "")  # so that its first prompt is fast
            self._disk = disk
            opened()
            await self.orders.serve(disk)

    def begin_life(self) -> None:
        """A new index takes the place of the old one; called in the engine's thread, before the
        first order of it.
        """
        self.orders.begin_life()

    def tell_again(self) -> None:
        """Tell the new index all that the disk holds, once the disk is open."""
        self.orders.tell_again()

    async def drain(self, timeout_s: float) -> None:
        """Wait until every order is done, but not longer than `timeout_s`."""
        await self.orders.drain(timeout_s)

    def described(self, status: CacheStatus) -> CacheStatus:
        """The status, with what the disk says of itself once it is open."""
        return status if self._disk is None else self.orders.described(status, self._disk)
