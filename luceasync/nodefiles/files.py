"""The calls to the operating system by which node files are kept; all of them block.

Knows no event loop, no thread and no directory layout.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from io import FileIO
from pathlib import Path

from luceasync.errors import CorruptNode
from luceasync.nodefiles.codec import header_extent

HEAD_BYTES = 32 << 10  # holds the header of most nodes
HUGE_PAGE_BYTES = 2 << 20  # systems place a mapping of whole ones so that it can have them


class FileSystem:
    """What the disk tier asks of the operating system. Each call raises OSError."""

    def create(self, path: Path) -> FileIO:
        """A new file for its owner alone, locked while it is open."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        raw = FileIO(os.open(path, flags, 0o600), "wb")
        with contextlib.suppress(OSError):  # where there are no locks, the process id must do
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return raw

    def open(self, path: Path) -> FileIO:
        """A regular file, to be read; CorruptNode for anything else in its place."""
        self._expect_regular(path, os.lstat(path).st_mode)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # it became a link or a socket just now
                raise CorruptNode(f"{path.name}: expected a regular file") from None
            raise
        try:
            self._expect_regular(path, os.fstat(fd).st_mode)
            return FileIO(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def sync(self, raw: FileIO) -> None:
        """The file's content is on the disk when this returns."""
        os.fsync(raw.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Give the file its name, over whatever has it."""
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        """The names in the directory are on the disk when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> bool:
        """Remove the file or link; whether it was there."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def entries(self, path: Path) -> list[os.DirEntry[str]]:
        """What the directory holds, by name."""
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    def free_bytes(self, path: Path) -> int:
        """Bytes that we may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def is_locked(self, path: Path) -> bool:
        """Whether a writer, of this process or another, has the file open."""
        with self.open(path) as raw:
            try:
                fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @staticmethod
    def _expect_regular(path: Path, mode: int) -> None:
        if not stat.S_ISREG(mode):
            kind = stat.filemode(mode)[0]
            raise CorruptNode(f"{path.name}: a file of kind {kind!r}, expected a regular one")


def read_head(raw: FileIO) -> tuple[bytes, int]:
    """The first bytes of a node file, its whole header among them, and the size of the file.

    Raises OSError, and CorruptNode where the header could not be as long as it says.
    """
    file_bytes = os.fstat(raw.fileno()).st_size
    head = raw.read(min(file_bytes, HEAD_BYTES)) or b""
    while len(head) < header_extent(head, file_bytes):
        more = raw.read(header_extent(head, file_bytes) - len(head))
        if not more:
            break
        head += more
    return head, file_bytes


def allocate(num_bytes: int) -> memoryview:
    """Fresh page-aligned memory, in huge pages where there are any: faults cost more than reads.

    Raises MemoryError.
    """
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        area = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.resize(num_bytes)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from None
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
