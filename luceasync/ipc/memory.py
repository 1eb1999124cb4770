"""Memory that several processes map: a memfd whose size is sealed.

Owns the descriptor, the mapping, and what devices have registered of it. Linux only. Without the
seal, a peer that shrinks the file would kill its readers (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from luceasync.errors import ChannelClosed, ConfigError

# Pins memory for a device; call the result to unpin it.
Register = Callable[[memoryview], Callable[[], None]]


def require_linux() -> None:
    """Raise ConfigError on systems without memfds, pidfds and SEQPACKET sockets."""
    if sys.platform != "linux":
        raise ConfigError(
            f"stages and drafters in other processes need Linux (memfd, pidfd), not {sys.platform}"
        )


def seals() -> int:
    """The seals that fix the size of a memory, and the seals themselves."""
    return fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SealedMemory:
    """A mapped memfd. `view`: all of it; `fd`: the descriptor that other processes inherit.

    May be used from any thread; close it when it is no longer in use.
    """

    def __init__(self, fd: int, num_bytes: int, *, populate: bool) -> None:
        """Map the descriptor, which this object owns from now on, even if this raises."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._undo: Callable[[], None] | None = None
        self._is_closed = False
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        try:
            self._map = mmap.mmap(fd, num_bytes, flags=flags)
        except BaseException:
            os.close(fd)
            raise
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, num_bytes: int, *, populate: bool = True) -> SealedMemory:
        """New memory of zeros. `populate`: allocate it now, since the first use of a page is slow.
        Raises OSError if the system has none.
        """
        require_linux()
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals())
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, num_bytes, populate=populate)

    @classmethod
    def inherit(cls, fd: int, num_bytes: int, *, populate: bool = True) -> SealedMemory:
        """Memory created by another process. Raises ChannelClosed if it is not sealed, or of
        another size; the descriptor is closed then."""
        require_linux()
        try:
            words = _unlike(fd, num_bytes)
        except OSError as error:
            words = f"descriptor {fd}: {error.strerror}"
        if words:
            _close_quietly(fd)
            raise ChannelClosed(f"the inherited memory cannot be shared: {words}")
        os.set_inheritable(fd, False)
        return cls(fd, num_bytes, populate=populate)

    @property
    def mapping(self) -> mmap.mmap:
        """All of it, for an allocator; valid until close()."""
        return self._map

    def register(self, register: Register) -> None:
        """Have a device register all of it, until close(). Pinning it once is enough for all."""
        if self._undo is None:
            self._undo = register(self.view)

    def close(self) -> None:
        """Free it; views that are still in use keep the mapping. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._undo is not None:
            self._undo()
        self.view.release()
        os.close(self.fd)
        with suppress(BufferError):  # a view is in use; the mapping is freed with the last one
            self._map.close()
        del self._map


def _unlike(fd: int, num_bytes: int) -> str:
    """What is wrong with the memory; empty: nothing."""
    found = os.fstat(fd).st_size
    if found != num_bytes:
        return f"it has {found} bytes, {num_bytes} were expected"
    has = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return "" if has & seals() == seals() else f"its seals are {has:#x}, not {seals():#x}"


def _close_quietly(fd: int) -> None:
    with suppress(OSError):  # not a descriptor at all, which is the error being raised
        os.close(fd)
