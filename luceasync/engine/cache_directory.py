"""The engine's cache directory: opened, scanned and served by one task, and the sizes of its cache.

Owns the disk tier while it is open and the worker that carries out its orders. Does not know
requests; luceasync.prefix_cache decides what is written and read.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from luceasync.config import CacheConfig
from luceasync.disk_cache.directory import make_usable
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.object_store import StoreSpec, check_url
from luceasync.disk_cache.upkeep import Upkeep
from luceasync.errors import ConfigError
from luceasync.host_cache.arena import node_bytes_of
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_worker import FIND_TIMEOUT_S, DiskWorker, nodes_to_measure
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.namespace import Facts, named
from luceasync.prefix_cache.tenants import Tenants
from luceasync.status import CacheStatus
from luceasync.text.prompt import RenderedPrompt

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30  # of the disk, left free
# The budget even on a full disk: writes begin once it has space again.
LEAST_SHARE_BYTES = 1 << 30
TRANSIT_BYTES = 1 << 30  # of memory, for nodes on their way to and from the disk
MIN_SECRET_BYTES = 16
SEAL_CONTEXT = "luceasync 2026-11-27 seals of objects in a store of nodes"
WARM_SHARE = 4  # one part in this many of the cache's memory gets its pages before it is needed


@dataclass(frozen=True, slots=True)
class CacheDirectorySpec:
    """How to open a cache directory, and the first layer of each shard, by which tensors are named
    in it. Opening raises ConfigError if the directory cannot be used.
    """

    open: Callable[[], AbstractAsyncContextManager[DiskTier]]
    split: tuple[int, ...]


def directory_spec_of(
    cache_dir: Path,
    split: tuple[int, ...],
    end_kinds: frozenset[str],
    find_facts: Callable[[], Facts],
    allocate: Callable[[int], memoryview],
    *,
    is_shared: bool = False,
    store: StoreSpec | None = None,
) -> CacheDirectorySpec:
    """The spec of `cache_dir`, which is created if missing. `find_facts` determines the namespace
    and may take long: it hashes weights. `allocate` provides the memory for nodes that are read.
    `end_kinds`: the kinds of tensors that belong to a node's end. `is_shared`: servers on other
    hosts use the directory too. `store`: what holds nodes behind it."""

    @asynccontextmanager
    async def open_disk() -> AsyncIterator[DiskTier]:
        await asyncio.to_thread(make_usable, cache_dir)
        await asyncio.to_thread(_warn_if_full, cache_dir)
        facts = await asyncio.to_thread(find_facts)
        async with DiskTier(
            cache_dir,
            named(facts),
            end_kinds,
            min_free_bytes=MIN_FREE_BYTES,
            allocate=allocate,
            is_shared=is_shared,
            store=None if store is None else replace(store, facts=facts),
        ) as disk:
            yield disk

    return CacheDirectorySpec(open_disk, split)


class CacheDirectory:
    """Used on the event loop, except for `orders`, which belongs to the engine's thread."""

    def __init__(
        self,
        directory_spec: CacheDirectorySpec,
        tenants: Tenants,
        tell: Callable[[Callable[[PrefixCache], None]], None],
    ) -> None:
        """`tenants` learn the sequences of the nodes found; `tell` hands results of orders to the
        engine's thread."""
        self._directory_spec = directory_spec
        self._tenants = tenants
        self.orders = DiskWorker(directory_spec.split, tell, tenants.note)
        self._disk: DiskTier | None = None

    async def serve(self, opened: Callable[[], None]) -> None:
        """Open it, call `opened` once it is scanned, then carry out orders until cancelled. Raises
        ConfigError.
        """
        async with self._directory_spec.open() as disk:
            nodes = await self.orders.scan(disk)
            measured = nodes_to_measure(nodes)
            del nodes  # the index has all that it needs of these nodes
            await asyncio.to_thread(self._tenants.get, "")  # makes the first prompt faster
            self._disk = disk
            opened()
            await self.orders.serve(disk, measured)

    async def learn(self, prompt: RenderedPrompt) -> bool:
        """If other servers share the directory, learn what they have answered in a prompt that has
        answers whose ids are not known. Returns whether the prompt has to be rendered again."""
        if self._disk is None or not prompt.has_unknown_answers:
            return False
        if self._disk.is_shared:
            await self.orders.catch_up(FIND_TIMEOUT_S)
        return await asyncio.to_thread(self._tenants.learn_more, prompt.tenant, prompt.ids)

    def begin_life(self) -> None:
        """Start over with a new index. Called in the engine's thread, before its first order."""
        self.orders.begin_epoch()

    def tell_again(self) -> None:
        """Report everything that the disk holds to the new index, once the disk is open."""
        self.orders.scan_again()

    async def drain(self, timeout_s: float) -> None:
        """Wait until every order is done, at most `timeout_s`."""
        await self.orders.drain(timeout_s)

    def described(self, status: CacheStatus) -> CacheStatus:
        """The status, with that of the disk added once it is open."""
        return status if self._disk is None else self.orders.described(status, self._disk)


def limits_of(config: CacheConfig, held_bytes: int, least_bytes: int = 0) -> Limits:
    """The limits of the cache; limits that no flag sets follow from this machine. `held_bytes`: of
    nodes on the disk; `least_bytes`: of memory that lanes need, which is known to be available."""
    memory_bytes = max(node_bytes_of(config.memory_bytes), least_bytes)
    disk_bytes = config.budget_bytes
    if disk_bytes is None and config.cache_dir is not None:
        # Includes what is there already; otherwise each start would take less than the one before.
        share_bytes = (_free_bytes(config.cache_dir) + held_bytes) // 2
        disk_bytes = max(share_bytes, LEAST_SHARE_BYTES)
    return Limits(
        memory_bytes=memory_bytes,
        transit_bytes=0 if disk_bytes is None else TRANSIT_BYTES,
        disk_bytes=disk_bytes,
        min_disk_tokens=config.min_tokens,
        interval_tokens=config.interval_tokens,
        is_shared=config.is_shared,
        has_store=config.store_url is not None,
    )


def store_spec_of(config: CacheConfig) -> StoreSpec | None:
    """The store of the configuration; None if there is none. Raises ConfigError for an unknown kind
    of URL, and for a key file that cannot be read or whose key could be guessed."""
    if config.store_url is None:
        return None
    check_url(config.store_url)
    if config.store_key_file is None:
        return StoreSpec(config.store_url)
    flag = f"--kv-store-key-file {config.store_key_file}"
    try:
        secret = config.store_key_file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"{flag}: {len(secret)} bytes; expected at least {MIN_SECRET_BYTES}")
    return StoreSpec(config.store_url, blake3(secret, derive_key_context=SEAL_CONTEXT).digest())


def warm_bytes_of(limits: Limits, held_bytes: int) -> int:
    """How much memory to prepare for nodes that may be read from the disk soon."""
    return min(held_bytes, limits.memory_bytes // WARM_SHARE)


def held_bytes_of(directory: Path | None) -> int:
    """Bytes that the nodes of all models in the directory take on the disk; 0 if it cannot be read
    now."""
    if directory is None:
        return 0
    try:
        return sum(total.allocated_bytes for total in Upkeep(directory).totals())
    except (ConfigError, OSError):
        return 0


def _warn_if_full(directory: Path) -> None:
    """Log if nothing would be written. Serving goes on, and writes begin once there is space."""
    if (free_bytes := _free_bytes(directory)) < MIN_FREE_BYTES:
        logger.warning(
            "--kv-cache-dir %s: %d MiB are free on its disk, and %d MiB must stay free: nothing is "
            "written until there is more.",
            directory,
            free_bytes >> 20,
            MIN_FREE_BYTES >> 20,
        )


def _free_bytes(directory: Path) -> int:
    """Free bytes of the file system on which the directory is, or will be."""
    existing = next(path for path in (directory, *directory.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free
