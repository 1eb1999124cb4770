"""Which of the servers that share a cache directory keeps its budget: the one with the lease.

The others write, read, and remove nothing to make room: no two of them remove for the same lack of
it. Its calls block. Knows no node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from luceasync.disk_cache.files import FileSystem
from luceasync.errors import CorruptNode

LEASE = ".keeper"
RENEW_S = 10.0
LEASE_S = 60.0  # without being renewed; then another server may take it
MAX_OWNER_BYTES = 256


class KeeperLease:
    """A lease file in the directory `root`, held by one of the servers that renew it.

    The file names its owner, and its age tells whether that one lives. A lease that has run out is
    renamed before it is replaced: of two servers that find it, the rename succeeds for one.
    """

    def __init__(self, files: FileSystem, root: Path) -> None:
        self._files = files
        self._root = root
        self._path = root / LEASE
        self._owner = f"{files.host}.{os.getpid()}.{secrets.token_hex(8)}".encode()

    def renew(self) -> bool:
        """Take or renew the lease; whether this server has it now. Call it every RENEW_S: it holds
        for LEASE_S. Raises OSError.
        """
        if self._take():
            return True
        if self._read(self._path) == self._owner:
            os.utime(self._path)  # by the clock of the file system
            return self._read(self._path) == self._owner
        return self._has_run_out() and self._set_aside() and self._take()

    def release(self) -> None:
        """Give the lease up, if this server has it. Raises OSError."""
        if self._read(self._path) == self._owner:
            self._files.remove(self._path)

    def _take(self) -> bool:
        """Whether there was no lease, and now it is this server's."""
        try:
            with self._files.create(self._path) as raw:
                raw.write(self._owner)
        except FileExistsError:
            return False
        return True

    def _has_run_out(self) -> bool:
        try:
            renewed_s = self._path.lstat().st_mtime
        except FileNotFoundError:
            return True
        return self._files.now_s(self._root) - renewed_s > LEASE_S

    def _set_aside(self) -> bool:
        """Remove a lease that has run out; False if it was renewed or replaced meanwhile."""
        aside = self._path.with_name(f"{LEASE}.{secrets.token_hex(8)}")
        try:
            self._files.rename(self._path, aside)
        except FileNotFoundError:
            return True
        try:
            if self._files.now_s(self._root) - aside.lstat().st_mtime > LEASE_S:
                return True
            # Another server was faster. Its lease goes back, unless a third one has taken its
            # place: then the next renewal tells which of them holds.
            with contextlib.suppress(OSError):
                os.link(aside, self._path)
            return False
        finally:
            self._files.remove(aside)

    def _read(self, path: Path) -> bytes:
        """The owner that the file names; empty if there is none."""
        try:
            with self._files.open(path) as raw:
                return raw.read(MAX_OWNER_BYTES) or b""
        except (FileNotFoundError, CorruptNode):
            return b""
