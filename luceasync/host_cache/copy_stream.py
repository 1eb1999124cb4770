"""Copies between a GPU and host memory, one after the other, on a separate stream and thread.

Owns how far the stream runs ahead. A GPU's copy engine stays with a stream as long as the stream
has copies for it, which delays a token on its way to the host: so only little is queued at a time,
and the thread adds more as copies complete. Does not know lanes or nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from luceasync.host_cache.arena import PIECE_BYTES

COPY_TIMEOUT_S = 60.0  # more than all host memory takes
POLL_S = 2e-4  # how late a wait for a device may be noticed to be over

Pair = tuple[Tensor, Tensor]  # target and source: uint8 [bytes], one of them in host memory


class StreamDependency(Protocol):
    """Work that a stream can wait for."""

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Work queued on the stream from here on comes after it."""
        ...


class CopyJob:
    """A list of copies, which are queued a part at a time."""

    def __init__(
        self,
        number: int,
        after: Sequence[StreamDependency],
        pairs: Iterable[Pair],
        hurry: Callable[[int], None],
    ) -> None:
        """`number`: among the jobs of its stream; `hurry(number)` has the jobs up to it queued at
        once."""
        self._hurry = hurry
        self.number = number
        self.after = after
        self.pairs = pairs
        self.queued = threading.Event()
        self.end: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.is_started = self.is_cancelled = False

    def query(self) -> bool:
        """Whether the copies have arrived. Raises the error of a failed copy."""
        return self.queued.is_set() and self._end().query()

    def sleep(self) -> None:
        """Block the thread until the copies have arrived, without polling. Raises the error of a
        failed copy, and TimeoutError if the copies are not even queued in time."""
        self._wait_until_queued()
        sleep_until(self._end())

    def synchronize(self) -> None:
        """Wait until the copies have arrived. Raises the error of a failed copy, and
        TimeoutError."""
        self._wait_until_queued()
        wait_for(self._end().query, "copies between a device and host memory")

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Order the stream after the copies; waits until all are queued. Raises TimeoutError."""
        self._wait_until_queued()
        stream.wait_event(self._end())

    def hurry_before(self, stream: torch.cuda.Stream) -> None:
        """As `precede`, but the copies are queued as fast as possible."""
        self._hurry(self.number)
        self.precede(stream)

    def _wait_until_queued(self) -> None:
        if not self.queued.wait(COPY_TIMEOUT_S):
            raise TimeoutError(
                "copies between a device and host memory: not begun and queued within "
                f"{COPY_TIMEOUT_S:g} s"
            )

    def _end(self) -> torch.cuda.Event:
        if self.error is not None:
            raise self.error
        assert self.end is not None
        return self.end


class CopyStream:
    """One direction of copies. Up to `num_batches` are queued at a time: with one, the copy engine
    is free for other streams in between; with two it is never idle."""

    def __init__(self, device: torch.device, name: str, num_batches: int) -> None:
        self._num_batches = num_batches
        self._stream = torch.cuda.Stream(device)
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._num_jobs = 0
        self._num_hurried = 0  # jobs up to this number are queued as fast as possible
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, after: Sequence[StreamDependency], pairs: Iterable[Pair]) -> CopyJob:
        """Copy pair by pair, once `after` is over and all earlier jobs are queued. The iterable is
        consumed in the thread; the caller keeps the memory alive."""
        self._num_jobs += 1
        job = CopyJob(self._num_jobs, after, pairs, self._hurry)
        self._jobs.put(job)
        return job

    def cancel(self, job: CopyJob) -> bool:
        """Stop queueing the job; returns whether it had begun, in which case it ends soon."""
        with self._starting:
            job.is_cancelled = True
            return job.is_started

    def close(self) -> None:
        """Wait for all copies. Idempotent. Raises TimeoutError."""
        self._jobs.put(None)
        self._thread.join(COPY_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"thread {self._thread.name!r} has not queued its last copies within "
                f"{COPY_TIMEOUT_S:g} s"
            )
        wait_for(self._stream.query, f"the last copies of thread {self._thread.name!r}")

    def _hurry(self, number: int) -> None:
        """Queue all jobs up to this one as fast as possible."""
        self._num_hurried = max(self._num_hurried, number)

    @torch.inference_mode()
    def _run(self) -> None:
        ahead: deque[torch.cuda.Event] = deque()
        while (job := self._jobs.get()) is not None:
            with self._starting:
                job.is_started = not job.is_cancelled
            try:
                with torch.cuda.stream(self._stream):
                    if job.is_started:
                        self._queue(job, ahead)
                    job.end = torch.cuda.Event(blocking=True)
                    job.end.record(self._stream)
            except Exception as error:  # raised again by methods of the job
                job.error = error
            job.pairs, job.after = (), ()
            job.queued.set()

    def _queue(self, job: CopyJob, ahead: deque[torch.cuda.Event]) -> None:
        for before in job.after:
            before.precede(self._stream)
        for batch in batches(job.pairs):
            while len(ahead) >= self._num_batches:
                event = ahead.popleft()
                if job.number > self._num_hurried:
                    event.synchronize()  # waiters for the job have a deadline
            if job.is_cancelled:
                return
            _queue_all(batch)
            ahead.append(torch.cuda.Event(blocking=True))
            ahead[-1].record(self._stream)


def copy_beside(pairs: Iterable[Pair]) -> None:
    """Queue copies between a GPU and host memory on its current stream. Always use this function: a
    plain copy of memory that was pinned in two parts fails."""
    for batch in batches(pairs):
        _queue_all(batch)


def _queue_all(pairs: Iterable[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def sleep_until(event: torch.cuda.Event) -> None:
    """Block until a blocking event is over, in a thread that has no current device yet."""
    with torch.cuda.device(event.device):
        event.synchronize()


def wait_for(is_over: Callable[[], bool], what: str) -> None:
    """Wait until `is_over()`. Raises TimeoutError, whose message begins with `what`."""
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while not is_over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not over within {COPY_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The same bytes, in lists of at most PIECE_BYTES; no pair crosses a multiple of PIECE_BYTES in
    host memory.
    """
    batch: list[Pair] = []
    room = PIECE_BYTES
    for target, source in pairs:
        address = (source if target.is_cuda else target).data_ptr()
        for begin, end in pieces(address, source.numel()):
            if end - begin > room:
                yield batch
                batch, room = [], PIECE_BYTES
            batch.append((target[begin:end], source[begin:end]))
            room -= end - begin
    if batch:
        yield batch


def pieces(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Parts `[begin, end)` of host memory at `address` that cross no multiple of PIECE_BYTES.

    address      multiple        multiple
       |--piece 0--|----piece 1----|--piece 2--|
    """
    begin = 0
    while begin < num_bytes:
        end = min(num_bytes, begin + PIECE_BYTES - (address + begin) % PIECE_BYTES)
        yield begin, end
        begin = end


# --- tickets: when copies have arrived ---------------------------------------------------------

Callback = Callable[[], None]


class Ticket(Protocol):
    """Copies under way. May be used from any thread."""

    @property
    def is_done(self) -> bool:
        """Whether they have arrived, or failed."""
        ...

    def wait(self) -> None:
        """Wait until they have arrived. Raises the error of a failed copy, and TimeoutError."""
        ...

    def when_done(self, call: Callback) -> None:
        """Call `call` once the copies have arrived or failed: now if they have, otherwise later
        from another thread. The callback must not block."""
        ...


class DoneTicket:
    """The ticket of copies that were made at once."""

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """No-op: they have arrived."""

    def when_done(self, call: Callback) -> None:
        call()


class _JoinedTicket:
    """Several tickets as one."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self._tickets)

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def when_done(self, call: Callback) -> None:
        lock, num_left = threading.Lock(), len(self._tickets)

        def one_is_done() -> None:
            nonlocal num_left
            with lock:
                num_left -= 1
                is_last = num_left == 0
            if is_last:
                call()

        for ticket in self._tickets:
            ticket.when_done(one_is_done)


def joined(tickets: Sequence[Ticket]) -> Ticket:
    """A ticket that is done when all of them are."""
    return tickets[0] if len(tickets) == 1 else _JoinedTicket(tickets) if tickets else DoneTicket()


log = logging.getLogger(__name__)


class Waitable(Protocol):
    """What CopyWaiter can wait for."""

    def sleep(self) -> None:
        """Block until it is over. Raises its error."""
        ...


class CopyWaiter:
    """A thread that waits for copies of a device, one after the other, so that no other thread has
    to poll."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Waitable, Callback] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, awaited: Waitable, call: Callback) -> None:
        """Call `call` when `awaited` is over, successfully or not. The first call starts the
        thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((awaited, call))

    def close(self) -> None:
        """End the thread once everything is over. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(COPY_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            awaited, call = item
            try:
                awaited.sleep()
            except Exception as error:  # raised again by the ticket's `wait`
                log.debug("copies of a device have failed: %s", error)
            call()
            del item, awaited, call  # release what they keep alive before the next one arrives


class StreamPoint:
    """All that a stream has queued so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def query(self) -> bool:
        """Whether it is over."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait until it is over. Raises TimeoutError."""
        wait_for(self._event.query, "copies between a device and host memory")

    def sleep(self) -> None:
        """Block the thread until it is over, without polling."""
        sleep_until(self._event)

    def precede(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)

    def hurry_before(self, stream: torch.cuda.Stream) -> None:
        """Same as `precede`: everything is queued already."""
        self.precede(stream)


class StreamTicket:
    """The SaveTicket of copies on a stream; `waiter` waits for them once there is a callback."""

    def __init__(self, copies: CopyJob | StreamPoint, waiter: CopyWaiter) -> None:
        self._copies = copies
        self._waiter = waiter

    @property
    def is_done(self) -> bool:
        try:
            return self._copies.query()
        except Exception:  # raised by the ticket's `wait`
            return True

    def wait(self) -> None:
        self._copies.synchronize()

    def when_done(self, call: Callback) -> None:
        if self.is_done:
            call()
        else:
            self._waiter.tell(self._copies, call)

    def precede(self, stream: torch.cuda.Stream) -> None:
        self._copies.precede(stream)
