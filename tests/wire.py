"""A wire to a port of this machine, which can be cut, broken, mended and delayed.

python -m tests.wire PORT DELAY_S    prints its own port, and forwards until its stdin ends
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

READ_BYTES = 1 << 18
MAX_BYTES = 4 << 20  # of one direction that are on the wire
SPIN_S = 0.3e-3  # sleeping is not exact


@dataclass
class _Way:
    """One direction of a connection: what was read, and when it is due."""

    source: socket.socket
    target: socket.socket
    held: deque[tuple[float, memoryview]] = field(default_factory=deque)
    held_bytes: int = 0
    is_over: bool = False  # nothing more comes


class Wire:
    """Forwards connections, in a thread. While it is cut, nothing passes and no end is told."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.is_cut = False
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._ways: list[_Way] = []
        self._breaks = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def break_all(self) -> None:
        """Close all connections, as a router does that restarts."""
        self._breaks = True
        self._wake.send(b".")

    def mend(self) -> None:
        """Let everything pass again, also what was sent meanwhile."""
        self.is_cut = False
        self._wake.send(b".")

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._wake.send(b".")
            self._thread.join()
            for sock in (self._wake, self._woken, self._server):
                sock.close()

    def _run(self) -> None:
        while not self._is_closed:
            happened = self._wait()
            with suppress(BlockingIOError):
                self._woken.recv(64)
            if self._breaks:
                self._end([*self._ways])
                self._breaks = False
            if self._server in happened:
                self._accept()
            for way in self._ways:
                if way.source in happened:
                    self._read(way)
            if not self.is_cut:
                self._end([way for way in self._ways if not self._write(way)])
        self._end([*self._ways])

    def _wait(self) -> list[socket.socket]:
        """The sockets that can be read, at the latest when something is due."""
        now_s = time.perf_counter()
        due_s = [way.held[0][0] for way in self._ways if way.held and not self.is_cut]
        left_s = min(due_s, default=now_s + 0.05) - now_s
        reads = [way.source for way in self._ways if not way.is_over and way.held_bytes < MAX_BYTES]
        sleeps_s = max(0.0, left_s) if left_s > SPIN_S else 0.0
        return select.select([self._server, self._woken, *reads], [], [], sleeps_s)[0]

    def _accept(self) -> None:
        with suppress(OSError):
            here = self._server.accept()[0]
            there = socket.create_connection(("127.0.0.1", self._target))
            for sock in (here, there):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways += [_Way(here, there), _Way(there, here)]

    def _read(self, way: _Way) -> None:
        try:
            some = way.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        if some:
            way.held.append((time.perf_counter() + self.delay_s, memoryview(some)))
            way.held_bytes += len(some)
        else:
            way.is_over = True

    def _write(self, way: _Way) -> bool:
        """Pass on what is due; False: the connection is over."""
        while way.held and way.held[0][0] <= time.perf_counter():
            due_s, content = way.held[0]
            try:
                num_sent = way.target.send(content, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                return False
            way.held_bytes -= num_sent
            if num_sent == len(content):
                way.held.popleft()
            else:
                way.held[0] = (due_s, content[num_sent:])
        if way.is_over and not way.held:
            with suppress(OSError):
                way.target.shutdown(socket.SHUT_WR)
            other = [each for each in self._ways if each.source is way.target]
            return not all(each.is_over and not each.held for each in other)
        return True

    def _end(self, ways: list[_Way]) -> None:
        """Close these connections, both of their directions."""
        ended = {id(sock) for way in ways for sock in (way.source, way.target)}
        for way in self._ways:
            if id(way.source) in ended:
                way.source.close()
        self._ways = [way for way in self._ways if id(way.source) not in ended]


def main() -> None:
    """Forward until stdin ends."""
    wire = Wire(int(sys.argv[1]), float(sys.argv[2]))
    print(wire.port, flush=True)
    os.read(0, 1)
    wire.close()


if __name__ == "__main__":
    main()
