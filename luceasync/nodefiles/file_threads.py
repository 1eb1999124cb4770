"""Files that are written in pieces by threads, while the event loop goes on.

Owns the threads, open files, and what becomes of a call for which nobody waits any more. Knows no
node and no directory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from types import TracebackType
from typing import Any, Self, TypeVar

from aiofiles.threadpool import wrap

from luceasync.nodefiles.codec import Buffer

NUM_THREADS = 4
PIECE_BYTES = 4 << 20  # a hop to a thread and back costs as much as half a MiB
SMALL_BYTES = 1 << 20

T = TypeVar("T")


class FileThreads:
    """A few threads for calls that block, and the calls that were left to them."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self.executor = ThreadPoolExecutor(num_threads, thread_name_prefix="disk")
        self._left: set[asyncio.Task[None]] = set()

    def submit(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """The function's result, from a thread."""
        return asyncio.get_running_loop().run_in_executor(self.executor, function, *args)

    def finish_later(self, call: asyncio.Future[object], function: Callable[[], None]) -> None:
        """Run the function in a thread once `call`, for which nobody waits, has ended."""
        task = asyncio.create_task(self._finish(call, function))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for the calls that were left; after `timeout_s` they are left for good."""
        if self._left:
            await asyncio.wait(self._left, timeout=timeout_s)
        self.executor.shutdown(wait=False)

    async def _finish(self, call: asyncio.Future[object], function: Callable[[], None]) -> None:
        await asyncio.wait((call,))
        if not call.cancelled():
            call.exception()  # seen: it concerns nobody any more
        await self.submit(function)


class ThreadedFile:
    """One file whose calls run in threads, one after the other.

    A call that hangs can be left by cancellation; the file is closed when the call has ended,
    never under it, and then discarded.
    """

    def __init__(
        self,
        threads: FileThreads,
        opener: Callable[[], FileIO],
        discard: Callable[[], object] | None = None,
    ) -> None:
        self._threads = threads
        self._opener = opener
        self._discard = discard
        self._raw: FileIO | None = None
        self._call: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.call(self._open)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._call is not None
        if self._call.done():
            await self.call(self._release)
        else:
            self._threads.finish_later(self._call, self._release)

    @property
    def raw(self) -> FileIO:
        """The open file."""
        assert self._raw is not None
        return self._raw

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """The function's result; it runs in a thread."""
        return await self._step(self._threads.submit(function, *args))

    async def write(self, pieces: Iterator[Buffer]) -> None:
        """Write all the pieces. Raises OSError."""
        file: Any = wrap(self.raw, executor=self._threads.executor)
        for piece in pieces:
            view, written = memoryview(piece), 0
            while written < len(view):  # a call may take less than it was given
                written += await self._step(file.write(view[written:]))

    async def _step(self, call: Awaitable[T]) -> T:
        step = asyncio.ensure_future(call)
        self._call = step
        return await asyncio.shield(step)

    def _open(self) -> None:
        self._raw = self._opener()

    def _release(self) -> None:
        close = None if self._raw is None else self._raw.close
        for last in (close, self._discard):
            with contextlib.suppress(OSError):  # what had to be on the disk was synced before
                if last is not None:
                    last()


def pieces(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """The buffers' bytes in order: large ones in slices, not copied, runs of small ones joined."""
    small: list[memoryview] = []
    small_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes < SMALL_BYTES:
            small.append(view)
            small_bytes += view.nbytes
        if small and max(small_bytes, view.nbytes) >= SMALL_BYTES:
            yield b"".join(small)
            small, small_bytes = [], 0
        if view.nbytes >= SMALL_BYTES:
            view = view.cast("B")
            for begin in range(0, len(view), PIECE_BYTES):
                yield view[begin : begin + PIECE_BYTES]
    if small:
        yield b"".join(small)
