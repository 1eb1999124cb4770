"""The directory of node files. Its calls block.

Owns what is created, moved and removed: in `<root>/<namespace>` the files of nodes, the temporary
files beside them and the quarantine. Knows no deadline and no tensor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

from luceasync.disk_cache.codec import (
    NAMESPACE,
    PAGE_BYTES,
    TEMPORARY,
    Buffer,
    EndKinds,
    Half,
    file_name,
)
from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.listing import (
    EMPTY_LISTING,
    Listing,
    NodeMeta,
    list_nodes,
    look_up,
    namespaces,
)
from luceasync.disk_cache.metadata import KEY
from luceasync.disk_cache.outcomes import is_gone
from luceasync.errors import ConfigError, CorruptNode

FLAG = "--kv-cache-dir"
QUARANTINE = "quarantine"
NUM_QUARANTINED = 16  # files of all namespaces for inspection, which must not fill the disk
PROBE_KEY = "0" * 8
PROBE_BYTES = 1 << 20  # read in one call
ORPHAN_AGE_S = 3600
TOUCH_S = 600  # last uses are told apart no finer, so that hits cost a shared directory little
LONE_END_AGE_S = 60  # its rows may have been renamed while the directory was listed


class BelowFloor(OSError):
    """A write would leave less free space than must stay."""


def make_private(directory: Path) -> None:
    """Make the directory and its missing parents, for their owner alone. Raises OSError."""
    for part in (*reversed(directory.parents), directory):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


class NodeDirectory:
    """The files of one namespace, among those of others under the same root."""

    def __init__(
        self,
        files: FileSystem,
        root: Path,
        namespace: str,
        min_free_bytes: int,
        end_kinds: EndKinds,
    ) -> None:
        """`end_kinds`: see luceasync.disk_cache.codec."""
        assert NAMESPACE.fullmatch(namespace), namespace
        self._files = files
        self._root = root
        self._namespace = namespace
        self._min_free_bytes = min_free_bytes
        self._end_kinds = end_kinds

    def path(self, key: str, namespace: str | None = None, half: Half = Half.ROWS) -> Path:
        """The path of half a node, of another namespace if one is named."""
        assert KEY.fullmatch(key), key
        return self._root / (namespace or self._namespace) / file_name(key, half)

    def temporary(self, key: str) -> Path:
        """A unique name, under which a file is written before it is renamed to the node's."""
        writer = f"{self._files.host}.{os.getpid()}.{secrets.token_hex(8)}"
        return self.path(key).with_name(f".{key}.{writer}.tmp")

    def make(self) -> None:
        """Make missing directories, for their owner alone. Raises OSError."""
        make_private(self._root / self._namespace / QUARANTINE)

    def create(self, temporary: Path, num_bytes: int) -> FileIO:
        """A new file for `num_bytes` bytes. Raises OSError, and BelowFloor for lack of space."""
        self.make()
        free_bytes = self._files.free_bytes(temporary.parent)
        if free_bytes - num_bytes < self._min_free_bytes:
            raise BelowFloor(
                f"{num_bytes} bytes to write, {free_bytes} free: {self._min_free_bytes} must stay"
            )
        return self._files.create(temporary)

    def try_write(self, num_bytes: int) -> None:
        """Write and remove a small file where one of `num_bytes` would have room. Raises OSError,
        BelowFloor among them.
        """
        temporary = self.temporary(PROBE_KEY)
        try:
            with self.create(temporary, num_bytes) as raw:
                raw.write(bytes(PAGE_BYTES))
                self._files.sync(raw)
        finally:
            self._files.remove(temporary)
        self._files.sync_directory(temporary.parent)

    def try_read(self, key: str) -> None:
        """Read the node's files, if they are there, and return nothing of them. Raises OSError."""
        piece = memoryview(bytearray(PROBE_BYTES))
        for half in Half:
            path = self.path(key, half=half)
            with contextlib.suppress(FileNotFoundError, CorruptNode), self._files.open(path) as raw:
                while raw.readinto(piece):
                    pass

    def scan(
        self, now_s: float, known: Mapping[str, Listing], part: int | None = None
    ) -> tuple[dict[str, Listing], int]:
        """What lies in the directories, by namespace, and how many files were quarantined. `part`:
        see luceasync.disk_cache.listing.list_nodes.

        Only this namespace's files are opened, and none that is `known`. Abandoned temporary files
        are removed, and ends without rows; damaged files are quarantined, unknown names left alone.
        Raises OSError if not even the namespaces can be listed.
        """
        listings = {}
        for directory in namespaces(self._files, self._root):
            name = directory.name
            opening = self._end_kinds if name == self._namespace else None
            before = known.get(name, EMPTY_LISTING)
            seen = list_nodes(self._files, directory, before, opening=opening, part=part)
            faults = [fault for path in seen.temporaries for fault in self._collect(path, now_s)]
            lone = [end for key, end in seen.ends.items() if key not in seen.nodes]
            faults += [fault for end in lone for fault in self._collect_end(end.meta, now_s)]
            listings[name] = replace(seen, faults=(*seen.faults, *faults))
        own = listings.get(self._namespace, EMPTY_LISTING)
        return listings, sum(map(self.set_aside, own.damaged))

    def touch(self, keys: Iterable[str]) -> int:
        """Mark nodes as used now, unless they were within TOUCH_S, for every process that looks at
        the directory; how many of them exist. Raises OSError.
        """
        now_s, num_there = time.time(), 0
        for path in map(self.path, keys):
            with contextlib.suppress(FileNotFoundError):
                if abs(now_s - path.lstat().st_mtime) > TOUCH_S:
                    os.utime(path, follow_symlinks=False)
                num_there += 1
        return num_there

    def place(self, key: str, half: Half, num_bytes: int, pieces: Iterable[Buffer]) -> None:
        """Make `pieces`, the bytes of a node's file, that file, in place of an older one. It is
        not synced: after a power cut its checksums tell, and its source still has it. Raises
        OSError, BelowFloor among them.
        """
        temporary = self.temporary(key)
        try:
            with self.create(temporary, num_bytes) as raw:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[raw.write(view) :]
                self._files.rename(temporary, self.path(key, half=half))
        finally:
            self._files.remove(temporary)

    def find(self, keys: Iterable[str]) -> list[NodeMeta]:
        """Those of these nodes that are there. Raises OSError."""
        directory = self._root / self._namespace
        found = (look_up(self._files, directory, key, self._end_kinds) for key in keys)
        return [meta for meta in found if meta is not None]

    def remove(self, key: str, namespace: str | None = None) -> int:
        """Remove a node; the bytes that it took, 0 if there is none. Raises OSError."""
        # In this order: a process that is killed in between leaves a node without its end, which
        # is valid.
        return self.remove_end(key, namespace) + self._remove(self.path(key, namespace))

    def remove_end(self, key: str, namespace: str | None = None) -> int:
        """Remove the file of a node's end, and leave its rows; the bytes that it took. Raises
        OSError.
        """
        return self._remove(self.path(key, namespace, Half.END))

    def set_aside(self, path: Path) -> int:
        """Move a file to its namespace's quarantine, and drop the oldest files of all quarantines;
        how many were moved.
        """
        quarantine = path.parent / QUARANTINE
        try:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            self._files.rename(path, quarantine / f"{path.stem}.{secrets.token_hex(4)}")
        except OSError:  # another process was faster, or the disk cannot be written to
            return 0
        for entry in self._oldest_quarantined()[:-NUM_QUARANTINED]:
            with contextlib.suppress(OSError):  # one too many does no harm
                self._files.remove(entry)
        return 1

    def _remove(self, path: Path) -> int:
        try:
            num_bytes = path.lstat().st_size
        except FileNotFoundError:
            return 0
        return num_bytes if self._files.remove(path) else 0

    def _oldest_quarantined(self) -> list[Path]:
        """Quarantined files of all namespaces, oldest first; directories cannot be removed and are
        left out.
        """
        found = []
        with contextlib.suppress(OSError):
            for namespace in namespaces(self._files, self._root):
                found += self._quarantined_at(namespace / QUARANTINE)
        return [Path(path) for _, path in sorted(found)]

    def _quarantined_at(self, quarantine: Path) -> list[tuple[int, str]]:
        """Since when each file has been there, and its path."""
        found = []
        with contextlib.suppress(OSError):
            for entry in self._files.entries(quarantine):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        found.append((status.st_ctime_ns, entry.path))
        return found

    def _collect_end(self, end: NodeMeta, now_s: float) -> list[str]:
        """Remove an end without rows; what went wrong."""
        try:
            rows = self.path(end.key, end.namespace)
            if now_s - end.last_used_s > LONE_END_AGE_S and not os.path.lexists(rows):
                self.remove_end(end.key, end.namespace)
        except OSError as error:
            return [str(error)]
        return []

    def _collect(self, path: Path, now_s: float) -> list[str]:
        """Remove a temporary file whose writer is gone; what went wrong.

        The process id in the name may be another container's: the lock tells. A file that was just
        created may not be locked yet: the id tells. Of another host's file only the age tells, by
        the clock of the file system: neither ids nor, on some, locks reach further than a host.
        """
        match = TEMPORARY.fullmatch(path.name)
        assert match is not None, path
        is_ours = match["host"] in (None, self._files.host)
        try:
            now_s = now_s if is_ours else self._files.now_s(path.parent)
            is_old = now_s - path.lstat().st_mtime > ORPHAN_AGE_S
            is_written = not is_ours or _is_alive(int(match["process"]))
            if is_old or not (is_written or self._files.is_locked(path)):
                self._files.remove(path)
        except CorruptNode:  # not a writer's file
            return []
        except OSError as error:
            return [] if is_gone(error) else [str(error)]
        return []


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_usable(root: Path) -> Path:
    """`root`, or its nearest parent that exists; nothing is made. Raises ConfigError unless it is
    writable.
    """
    nearest = next(path for path in (root, *root.resolve().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{FLAG} {root}: {nearest} is not a writable directory{owner_of(nearest)}"
        )
    return nearest


def make_usable(root: Path) -> None:
    """Make `root`, for its owner alone. Raises ConfigError unless it is writable."""
    try:
        make_private(root)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{FLAG} {root}: {error.strerror}{owner_of(root)}; expected a directory to write to"
        ) from None


def owner_of(root: Path) -> str:
    """Whose `root` is, where another user of this machine or container has made it; else ""."""
    try:
        owner_id = root.stat().st_uid
    except OSError:
        return ""
    own_id = os.geteuid()
    return "" if owner_id == own_id else f" (user {owner_id} owns it, this is user {own_id})"
