"""Copies between a GPU and host memory, one after the other, on a stream and a thread of their own.

Owns how far the stream runs ahead. A GPU's copy engine stays with a stream as long as that has
copies for it, and a token on its way to the host waits meanwhile: so what is queued is little, and
the thread adds to it when it is over. Knows no lane and no node.
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
POLL_S = 2e-4  # how much later than a device somebody knows who waits for it

Pair = tuple[Tensor, Tensor]  # target and source: uint8 [bytes], one of them in host memory


class StreamDependency(Protocol):
    """Something that a stream can wait for."""

    def precede(self, stream: torch.cuda.Stream) -> None:
        """What is queued on the stream from here on comes after it."""
        ...


class CopyJob:
    """Copies that were asked for. They are queued a part at a time, then they arrive."""

    def __init__(
        self,
        number: int,
        after: Sequence[StreamDependency],
        pairs: Iterable[Pair],
        hurry: Callable[[int], None],
    ) -> None:
        """`hurry` its stream, up to a number of a delivery."""
        self._hurry = hurry
        self.number = number  # of its stream
        self.after = after
        self.pairs = pairs
        self.queued = threading.Event()
        self.end: torch.cuda.Event | None = None
        self.error: BaseException | None = None
        self.is_started = self.is_cancelled = False

    def query(self) -> bool:
        """Whether they have arrived. Raises what went wrong with them."""
        return self.queued.is_set() and self._end().query()

    def sleep(self) -> None:
        """Wait asleep until they have arrived: for a thread that has all the time. Raises what went
        wrong with them, and TimeoutError where they are not even queued.
        """
        self._wait_until_queued()
        sleep_until(self._end())

    def synchronize(self) -> None:
        """Wait until they have arrived. Raises what went wrong with them, and TimeoutError."""
        self._wait_until_queued()
        wait_for(self._end().query, "copies between a device and host memory")

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before. Waits until all of it is queued. Raises TimeoutError."""
        self._wait_until_queued()
        stream.wait_event(self._end())

    def hurry_before(self, stream: torch.cuda.Stream) -> None:
        """As `precede`, but all of it is queued as fast as can be."""
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
    """One direction of copies. Up to `num_batches` are queued at a time: with one, the engine is
    free for others in between; with two it is never idle.
    """

    def __init__(self, device: torch.device, name: str, num_batches: int) -> None:
        self._num_batches = num_batches
        self._stream = torch.cuda.Stream(device)
        self._deliveries: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._num_deliveries = 0
        self._num_hurried = 0  # deliveries up to this number are queued as fast as can be
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, after: Sequence[StreamDependency], pairs: Iterable[Pair]) -> CopyJob:
        """Copy pair by pair, once `after` is over and all that was put before is queued. The
        iterable is run through in the thread; the caller keeps alive what it names.
        """
        self._num_deliveries += 1
        delivery = CopyJob(self._num_deliveries, after, pairs, self._hurry)
        self._deliveries.put(delivery)
        return delivery

    def cancel(self, delivery: CopyJob) -> bool:
        """Copy no more of it than is queued; whether it had begun, so that it ends soon."""
        with self._starting:
            delivery.is_cancelled = True
            return delivery.is_started

    def close(self) -> None:
        """Wait for everything. May be called twice. Raises TimeoutError."""
        self._deliveries.put(None)
        self._thread.join(COPY_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"thread {self._thread.name!r} has not queued its last copies within "
                f"{COPY_TIMEOUT_S:g} s"
            )
        wait_for(self._stream.query, f"the last copies of thread {self._thread.name!r}")

    def _hurry(self, number: int) -> None:
        """Queue all deliveries up to this one as fast as can be."""
        self._num_hurried = max(self._num_hurried, number)

    @torch.inference_mode()
    def _run(self) -> None:
        ahead: deque[torch.cuda.Event] = deque()
        while (delivery := self._deliveries.get()) is not None:
            with self._starting:
                delivery.is_started = not delivery.is_cancelled
            try:
                with torch.cuda.stream(self._stream):
                    if delivery.is_started:
                        self._queue(delivery, ahead)
                    delivery.end = torch.cuda.Event(blocking=True)
                    delivery.end.record(self._stream)
            except Exception as error:  # raised again where somebody asks for the delivery
                delivery.error = error
            delivery.pairs, delivery.after = (), ()
            delivery.queued.set()

    def _queue(self, delivery: CopyJob, ahead: deque[torch.cuda.Event]) -> None:
        for before in delivery.after:
            before.precede(self._stream)
        for batch in batches(delivery.pairs):
            while len(ahead) >= self._num_batches:
                event = ahead.popleft()
                if delivery.number > self._num_hurried:
                    event.synchronize()  # who waits for the delivery has a deadline
            if delivery.is_cancelled:
                return
            _queue_all(batch)
            ahead.append(torch.cuda.Event(blocking=True))
            ahead[-1].record(self._stream)


def copy_beside(pairs: Iterable[Pair]) -> None:
    """Queue copies between a GPU and host memory on its current stream. Only so: a copy of memory
    that was pinned in two parts fails.
    """
    for batch in batches(pairs):
        _queue_all(batch)


def _queue_all(pairs: Iterable[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def sleep_until(event: torch.cuda.Event) -> None:
    """Wait asleep for an event that blocks, in a thread that has no device of its own yet."""
    with torch.cuda.device(event.device):
        event.synchronize()


def wait_for(is_over: Callable[[], bool], what: str) -> None:
    """Wait until a device says that it is over. Raises TimeoutError, which begins with `what`."""
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while not is_over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not over within {COPY_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The same bytes, in lists of PIECE_BYTES at most; no part crosses a multiple of PIECE_BYTES
    in host memory.
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
    """Parts `[begin, end)` of host memory at `address` that cross no multiple of PIECE_BYTES."""
    begin = 0
    while begin < num_bytes:
        end = min(num_bytes, begin + PIECE_BYTES - (address + begin) % PIECE_BYTES)
        yield begin, end
        begin = end


# When copies that were asked for have arrived: nobody has to ask again and again. Knows no
# device, no node and no thread; who makes copies says when they are over.


Callback = Callable[[], None]


class Ticket(Protocol):
    """Copies on their way. Any thread may ask."""

    @property
    def is_done(self) -> bool:
        """Whether they have arrived, or failed."""
        ...

    def wait(self) -> None:
        """Wait until they have arrived. Raises what went wrong with them, and TimeoutError."""
        ...

    def when_done(self, call: Callback) -> None:
        """Call once they have arrived or failed: now, where that is so already, else later from
        another thread. What is called must not wait.
        """
        ...


class DoneTicket:
    """Of copies that were made at once."""

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        return True

    def wait(self) -> None:
        """They are there."""

    def when_done(self, call: Callback) -> None:
        """See Ticket."""
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


# A thread that waits for copies of a device, so that nobody else has to ask for them. Sleeps
# while they are under way. Knows no lane, no node and nobody who listens.


log = logging.getLogger(__name__)


class Waitable(Protocol):
    """What the thread can wait for."""

    def sleep(self) -> None:
        """Return when it is over. Raises what went wrong."""
        ...


class CopyWaiter:
    """Waits for one after the other, in the order in which they were named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Waitable, Callback] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, awaited: Waitable, call: Callback) -> None:
        """Call when it is over, well or not. The thread starts when it is needed first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((awaited, call))

    def close(self) -> None:
        """End the thread once all is over that was named. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(COPY_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            awaited, call = item
            try:
                awaited.sleep()
            except Exception as error:  # raised again where somebody waits for the ticket
                log.debug("copies of a device have failed: %s", error)
            call()
            del item, awaited, call  # what they hold alive is not needed until the next comes


# Tickets of what a GPU's streams have queued. Knows no lane and no node.


class StreamPoint:
    """What a stream has queued so far."""

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
        """Wait asleep until it is over: for a thread that has all the time."""
        sleep_until(self._event)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before."""
        stream.wait_event(self._event)

    def hurry_before(self, stream: torch.cuda.Stream) -> None:
        """As `precede`: all of it is queued."""
        self.precede(stream)


class StreamTicket:
    """An Arrival of copies on a stream; `arrivals` waits for them where somebody wants to hear."""

    def __init__(self, copies: CopyJob | StreamPoint, arrivals: CopyWaiter) -> None:
        self._copies = copies
        self._arrivals = arrivals

    @property
    def is_done(self) -> bool:
        """See Ticket."""
        try:
            return self._copies.query()
        except Exception:  # who waits for them is told what it was
            return True

    def wait(self) -> None:
        """See Ticket."""
        self._copies.synchronize()

    def when_done(self, call: Callback) -> None:
        """See Ticket."""
        if self.is_done:
            call()
        else:
            self._arrivals.tell(self._copies, call)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """See Before."""
        self._copies.precede(stream)
