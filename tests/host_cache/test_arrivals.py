"""A thread waits, and tells: well or not, in order, and with its last word at the end."""

from __future__ import annotations

import threading

from luceasync.host_cache.copy_stream import CopyWaiter

DEADLINE_S = 10.0


class Copies:
    """Over when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_over = threading.Event()
        self._error = error

    def sleep(self) -> None:
        assert self.is_over.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error


def test_each_is_told_after_it_is_over_also_where_it_has_failed():
    arrivals, told = CopyWaiter("test"), []
    copies = [Copies(), Copies(OSError("the device is gone")), Copies()]
    for i, one in enumerate(copies):
        arrivals.tell(one, lambda i=i: told.append(i))
    assert told == []
    for one in copies:
        one.is_over.set()
    arrivals.close()
    assert told == [0, 1, 2]


def test_another_thread_tells():
    arrivals, threads, copies = CopyWaiter("test"), [], Copies()
    arrivals.tell(copies, lambda: threads.append(threading.current_thread().name))
    copies.is_over.set()
    arrivals.close()
    arrivals.close()
    assert threads == ["test"]
