"""The store behind the directory: node files as immutable objects of S3, GCS, Azure or a path.

What is fetched becomes a file of the directory, and is read and checked there like any other. Owns
the queue of uploads and how the store has answered. Knows no tree and no tensor.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from luceasync.disk_cache.codec import Half, file_name
from luceasync.disk_cache.directory import NodeDirectory
from luceasync.disk_cache.files import FileThreads
from luceasync.errors import ConfigError

log = logging.getLogger(__name__)

FLAG = "--kv-store"
SCHEMES = ("s3", "gs", "az", "file")
FACTS = "namespace.json"  # beside the nodes of a namespace
SEAL_BYTES = 32  # behind the file's bytes, where the store's writers have a key
RANGE_BYTES = 8 << 20  # asked for in one request
NUM_RANGES = 8  # at a time
NUM_FETCHES = 6  # at a time
NUM_FAILURES = 3  # in a row, after which the store is left alone for REST_S
REST_S = 30.0
OPEN_TIMEOUT_S = 10.0
HEAD_TIMEOUT_S = 1.0  # most names are not there: no prompt waits long to be told so
UPLOAD_TIMEOUT_S = 600.0
UPLOAD_SHARE = 0.5  # of the time, at most
MAX_QUEUED = 4096
MIN_UPLOAD_TOKENS = 4096  # shorter prefixes go up once they are used again
PART_OBJECTS = 1000  # listed at a time
RATE_WEIGHT = 0.3  # of the newest transfer

T = TypeVar("T")


class NodeName(NamedTuple):
    """Half a node, as a file of the directory and as an object."""

    key: str
    half: Half


class Health:
    """Whether the store answers: after a few failures in a row it rests."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._num_failures = 0
        self._until_s = 0.0
        self.fault = ""

    @property
    def rests(self) -> bool:
        """Whether it is left alone now."""
        return self._now_s() < self._until_s

    def tell(self, fault: str = "") -> None:
        """Record how a call ended; an empty fault: it was answered."""
        self.fault = fault
        self._num_failures = self._num_failures + 1 if fault else 0
        if self._num_failures >= NUM_FAILURES:
            self._until_s = self._now_s() + REST_S


def check_url(url: str) -> None:
    """Raise ConfigError for a store of another kind, or without the package that speaks to stores.
    Nothing is asked of it.
    """
    _opened(_package(), url)


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Where a store is. `seal_key`: 32 bytes that its writers share; each object then carries a
    keyed hash of its name and bytes, and one without it is a miss. `facts`: what the namespace
    depends on, which is kept beside its nodes: `doctor` compares it.
    """

    url: str
    seal_key: bytes | None = field(default=None, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)


class ObjectStore:
    """Node files of one namespace in a store. Event loop only."""

    def __init__(
        self,
        spec: StoreSpec,
        directory: NodeDirectory,
        namespace: str,
        health: Health | None = None,
    ) -> None:
        """Raises ConfigError for a URL of another kind, or without the package that speaks to
        stores.
        """
        self._url = spec.url
        self._directory = directory
        self._namespace = namespace
        self._seal_key, self._facts = spec.seal_key, spec.facts
        self._obstore = _package()
        self._store = _opened(self._obstore, spec.url)
        self._health = health or Health()
        self._threads = FileThreads(2)
        self._fetching = asyncio.Semaphore(NUM_FETCHES)
        self._queue: deque[NodeName] = deque()
        self._queued: set[NodeName] = set()
        self._is_queued = asyncio.Event()
        self._there: set[NodeName] = set()  # known to be in the store
        self._bytes_per_s: float | None = None
        self._observed_s = 0.0  # when; a rate that forbids to fetch is tried again after REST_S
        names = ("hits", "misses", "failures", "read_bytes", "written_bytes")
        self._counts = dict.fromkeys(names, 0)

    def __repr__(self) -> str:
        return f"ObjectStore({self._url}, {len(self._queue)} to upload)"

    @property
    def degraded(self) -> str:
        """What is wrong with which store; empty if its last call was answered."""
        return f"{FLAG} {self._url}: {self._health.fault}" if self._health.fault else ""

    @property
    def counts(self) -> dict[str, int]:
        """What was asked of the store since it was opened, by name."""
        return dict(self._counts)

    async def check(self) -> None:
        """Ask the store for an object. Raises ConfigError if it refuses, or has nodes of another
        schema under our names. One that does not answer now may answer later: the server works
        without it.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                with suppress(FileNotFoundError):
                    await self._obstore.head_async(self._store, self._path("0" * 8, Half.ROWS))
                await self._tell_facts()
        except TimeoutError:
            self._fail(f"no answer in {OPEN_TIMEOUT_S:g} s")
        except self._errors as error:
            errors = self._obstore.exceptions
            if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
                raise ConfigError(f"{FLAG} {self._url}: {_first_line(error)}") from None
            self._fail(_first_line(error))

    async def _tell_facts(self) -> None:
        """Say what the namespace depends on, unless that is known. Raises ConfigError if its nodes
        are said to be of another schema.
        """
        told = json.dumps(dict(self._facts), sort_keys=True).encode()
        path = f"{self._namespace}/{FACTS}"
        try:
            await self._obstore.put_async(self._store, path, told, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            found = await self._obstore.get_async(self._store, path)
            known = _facts_in(bytes(await found.bytes_async()))
            theirs, ours = known.get("schema"), self._facts.get("schema")
            if None not in (theirs, ours) and theirs != ours:
                words = f"{path} is of schema {theirs!r}; expected {ours!r}"
                raise ConfigError(f"{FLAG} {self._url}: {words}") from None

    async def close(self) -> None:
        """Wait for writes of fetched files."""
        await self._threads.close(OPEN_TIMEOUT_S)

    # --- from the store --------------------------------------------------------------------------

    async def fetch(self, name: NodeName, patience_s: float) -> bool:
        """Whether the object is a file of the directory now. It is given up after `patience_s`, and
        not begun where the rate of earlier ones says that it takes longer. Raises OSError for
        faults of the directory.
        """
        if self._health.rests:
            return False
        content = None
        try:
            async with asyncio.timeout(patience_s) as limit, self._fetching:
                content = await self._get(name, patience_s, limit)
        except FileNotFoundError:
            self._health.tell()
        except TimeoutError:
            self._fail(f"{name.key[:16]} did not come in time")
        except self._errors as error:
            self._fail(_first_line(error))
        else:
            self._health.tell()
        self._counts["misses" if content is None else "hits"] += 1
        if content is None:
            return False
        num_bytes = sum(map(len, content))
        await self._threads.submit(self._directory.place, *name, num_bytes, content)
        self._there.add(name)
        return True

    async def _get(
        self, name: NodeName, patience_s: float, limit: asyncio.Timeout
    ) -> list[memoryview] | None:
        """The file's bytes, in pieces; None if they would come too late, or their seal is wrong.
        `limit` ends the wait.
        """
        path = self._path(*name)
        async with asyncio.timeout(min(patience_s, HEAD_TIMEOUT_S)):
            size = (await self._obstore.head_async(self._store, path))["size"]
        began_s = time.monotonic()
        is_known = self._bytes_per_s is not None and began_s - self._observed_s < REST_S
        if is_known and size > patience_s * (self._bytes_per_s or 0.0):
            return None
        begins = range(0, size, RANGE_BYTES)
        pieces: list[memoryview] = []
        try:
            for at in range(0, len(begins), NUM_RANGES):
                some = begins[at : at + NUM_RANGES]
                ends = [min(size, begin + RANGE_BYTES) for begin in some]
                got = await self._obstore.get_ranges_async(
                    self._store, path, starts=list(some), ends=ends
                )
                pieces += map(memoryview, got)
        except asyncio.CancelledError:
            if limit.expired():  # how much had come is not told
                self._observe(size // 2, time.monotonic() - began_s)
            raise  # a client that leaves says nothing about the link
        self._observe(size, time.monotonic() - began_s)
        self._counts["read_bytes"] += size
        return await self._threads.submit(self._unsealed, name, pieces)

    def _observe(self, num_bytes: int, elapsed_s: float) -> None:
        self._observed_s = time.monotonic()
        rate = num_bytes / max(elapsed_s, 1e-6)
        before = self._bytes_per_s
        self._bytes_per_s = rate if before is None else before + RATE_WEIGHT * (rate - before)

    def _unsealed(self, name: NodeName, pieces: list[memoryview]) -> list[memoryview] | None:
        """The pieces without their seal; None if it is not that of a server with our key."""
        if self._seal_key is None:
            return pieces
        content = memoryview(b"".join(pieces))
        body, seal = content[:-SEAL_BYTES], bytes(content[-SEAL_BYTES:])
        if len(content) < SEAL_BYTES or self._seal(name, [body]) != seal:
            log.warning("%s: an object without the seal of %s", name.key[:16], f"{FLAG}-key-file")
            return None
        return [body]

    def _seal(self, name: NodeName, pieces: Sequence[memoryview]) -> bytes:
        assert self._seal_key is not None
        seal = blake3(self._path(*name).encode(), key=self._seal_key)
        for piece in pieces:
            seal.update(piece)
        return seal.digest()

    # --- to the store ----------------------------------------------------------------------------

    def offer(self, name: NodeName) -> None:
        """Upload a file of the directory by and by, unless the store has it. Files that were
        offered before many others may be left out.
        """
        if name in self._queued or name in self._there:
            return
        self._queue.append(name)
        self._queued.add(name)
        if len(self._queue) > MAX_QUEUED:
            self._queued.discard(self._queue.popleft())
        self._is_queued.set()

    async def upload(self) -> None:
        """Upload what is offered, until cancelled, in UPLOAD_SHARE of the time."""
        while True:
            await self._is_queued.wait()
            if not self._queue:
                self._is_queued.clear()
                continue
            if self._health.rests:
                await asyncio.sleep(1.0)
                continue
            began_s = time.monotonic()
            name = self._queue.popleft()
            self._queued.discard(name)
            try:
                await self._put(name)
            except Exception:  # an upload that fails must not end the server
                log.exception("%s was not uploaded", name.key[:16])
            await asyncio.sleep((time.monotonic() - began_s) * (1 / UPLOAD_SHARE - 1))

    async def _put(self, name: NodeName) -> None:
        """Upload the file, unless it is gone or the store has it: objects do not change."""
        path = self._directory.path(name.key, half=name.half)
        try:
            content = await self._threads.submit(self._sealed, name, path)
        except OSError as error:
            log.debug("%s is not uploaded: %s", path.name, error)
            return
        put = partial(self._obstore.put_async, self._store, self._path(*name), mode="create")
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                await put(content)
            self._counts["written_bytes"] += len(content)
        except self._obstore.exceptions.AlreadyExistsError:
            pass
        except TimeoutError:
            self._fail(f"no upload of {len(content)} bytes within {UPLOAD_TIMEOUT_S:g} s")
            return
        except self._errors as error:
            self._fail(_first_line(error))
            return
        self._health.tell()
        self._there.add(name)

    def _sealed(self, name: NodeName, path: Path) -> bytes:
        content = path.read_bytes()
        return (
            content if self._seal_key is None else content + self._seal(name, [memoryview(content)])
        )

    # ---------------------------------------------------------------------------------------------

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        """What calls of the package raise besides FileNotFoundError."""
        return (self._obstore.exceptions.BaseError, OSError, ValueError)

    def _fail(self, fault: str) -> None:
        self._counts["failures"] += 1
        is_news = not self._health.fault  # else each object of a prompt would have its line
        self._health.tell(fault)
        log.log(logging.WARNING if is_news else logging.DEBUG, "the store %s: %s", self._url, fault)

    def _path(self, key: str, half: Half) -> str:
        return f"{self._namespace}/{key[:2]}/{file_name(key, half)}"


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """What a store has of a namespace. Half a node is an object."""

    namespace: str
    num_nodes: int
    num_bytes: int
    newest_s: float


class StoreUpkeep:
    """Lists and removes what a store has, without a model. All methods raise ConfigError if the
    store does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._obstore = _package()
        self._store = _opened(self._obstore, url)

    def namespaces(self) -> list[str]:
        """Their names, without a list of their objects."""
        with self._errors():
            found = self._obstore.list_with_delimiter(self._store)
        return sorted(prefix.rstrip("/") for prefix in found["common_prefixes"])

    def facts(self, namespace: str) -> dict[str, Any] | None:
        """What the namespace depends on; None if no server has said it."""
        try:
            with self._errors():
                found = self._obstore.get(self._store, f"{namespace}/{FACTS}").bytes()
        except FileNotFoundError:
            return None
        return _facts_in(bytes(found)) or None

    def total(self, namespace: str) -> StoredNamespace:
        """Its size. Lists its objects, in parts."""
        num_nodes, num_bytes, newest_s = 0, 0, 0.0
        for entry in self._objects(namespace):
            num_nodes += entry["path"].endswith(file_name("", Half.ROWS))
            num_bytes += entry["size"]
            newest_s = max(newest_s, entry["last_modified"].timestamp())
        return StoredNamespace(namespace, num_nodes, num_bytes, newest_s)

    def prune(self, namespace: str, written_before_s: float) -> tuple[int, int]:
        """Remove objects that were written before; their number and bytes. A store does not know
        when an object was last used.
        """
        num_gone, num_bytes = 0, 0
        for part in self._parts(namespace):
            old = [e for e in part if e["last_modified"].timestamp() < written_before_s]
            if old:
                with self._errors():
                    self._obstore.delete(self._store, [entry["path"] for entry in old])
            num_gone += len(old)
            num_bytes += sum(entry["size"] for entry in old)
        return num_gone, num_bytes

    def _objects(self, namespace: str) -> Iterator[Any]:
        for part in self._parts(namespace):
            yield from part

    def _parts(self, namespace: str) -> Iterator[list[Any]]:
        """The objects of nodes, in parts of PART_OBJECTS."""
        with self._errors():
            for part in self._obstore.list(self._store, f"{namespace}/", chunk_size=PART_OBJECTS):
                yield [entry for entry in part if not entry["path"].endswith(FACTS)]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise ConfigError(f"{FLAG} {self._url}: {_first_line(error)}") from None


def _package() -> ModuleType:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(f"{FLAG} needs the package obstore: install luceasync[store]") from None


def _opened(obstore: ModuleType, url: str) -> Any:
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES or "://" not in url:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{FLAG} {url}: expected a URL with one of {known}")
    options: dict[str, Any] = {}
    if scheme == "file":
        # It is not created: what is not mounted, or misspelt, would fill this machine's own disk.
        _expect_directory(url)
    else:
        options["client_options"] = {
            "connect_timeout": "5s",
            "timeout": f"{UPLOAD_TIMEOUT_S:g}s",
            "allow_http": True,  # where the endpoint is one: a store in the same house
        }
        options["retry_config"] = {"max_retries": 1}
    try:
        return importlib.import_module("obstore.store").from_url(url, **options)
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        raise ConfigError(f"{FLAG} {url}: {_first_line(error)}") from None


def _expect_directory(url: str) -> None:
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/"):
        raise ConfigError(f"{FLAG} {url}: expected file:///PATH with an absolute path")
    if not Path(unquote(parts.path)).is_dir():
        raise ConfigError(
            f"{FLAG} {url}: there is no such directory; mount it, or create it once for all servers"
        )


def _facts_in(content: bytes) -> dict[str, Any]:
    """What a namespace depends on; empty if it is not said."""
    try:
        told = json.loads(content)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
