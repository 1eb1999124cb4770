"""Sleeping until descriptors of a channel can be used, or the process at its other end has ended.

Owns no descriptor. Knows no packet.
"""

from __future__ import annotations

import select

from luceasync.ipc.packets import WireError
from luceasync.ipc.waiting import Deadline

PAYLOAD_WAIT_S = 10.0  # without a byte of a payload that has been told of
ENDED = "its process has ended"


class Readiness:
    """Of one channel."""

    def __init__(self, packets_fd: int, died_fd: int) -> None:
        """`died_fd`: what becomes readable when the process ends; below 0: nothing tells."""
        self._packets_fd = packets_fd
        self._died_fd = died_fd
        self._reading = select.poll()
        self._reading.register(packets_fd, select.POLLIN)
        if died_fd >= 0:
            self._reading.register(died_fd, select.POLLIN)

    def sleep(self, deadline: Deadline) -> None:
        """Until a packet can be read; raises WireError where none ever will."""
        happened = self._reading.poll(deadline.left_ms())
        if len(happened) == 1 and happened[0][0] == self._died_fd:
            raise WireError(ENDED)

    def sleep_for_bytes(self, fd: int) -> None:
        """Until bytes of a payload can be read; raises WireError where none come."""
        wanted = {fd: select.POLLIN, self._died_fd: select.POLLIN}
        happened = _happened(wanted, int(PAYLOAD_WAIT_S * 1e3))
        if not happened:
            raise WireError(f"no byte of a payload for {PAYLOAD_WAIT_S:g} s")
        if fd not in happened:
            raise WireError(ENDED)

    def sleep_to_write(self, fd: int, bytes_fd: int, limit_ms: int) -> set[int]:
        """Until `fd` can be written; which of packets and `bytes_fd` can be read meanwhile. Raises
        WireError where nothing can be read any more.
        """
        wanted = dict.fromkeys((self._packets_fd, bytes_fd, self._died_fd), select.POLLIN)
        wanted[fd] = wanted.get(fd, 0) | select.POLLOUT
        happened = _happened(wanted, limit_ms)
        readable = {fd for fd, events in happened.items() if events & ~select.POLLOUT}
        if self._died_fd in readable and self._packets_fd not in readable:
            raise WireError(ENDED)
        return readable


def _happened(wanted: dict[int, int], limit_ms: int) -> dict[int, int]:
    """Which of these events came first, by descriptor; those below 0 are none."""
    waiting = select.poll()
    for fd, events in wanted.items():
        if fd >= 0:
            waiting.register(fd, events)
    return dict(waiting.poll(limit_ms))
