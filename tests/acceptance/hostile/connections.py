"""Connections opened and ended at a steady rate by one thread, as a process of its own.

    python -m tests.acceptance.hostile.connections PORT PER_SECOND SECONDS

A quarter each is closed, reset, left after half a request, and asks for /health. Prints JSON.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
import time
from collections import Counter

ASK = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
KINDS = ("closed", "reset", "left after half a request", "asks")
ABORT = (
    b"\1\0\0\0\0\0\0\0"  # SO_LINGER of 0 s: an end without TIME_WAIT, which ports would run out of
)
PATIENCE_S = 10.0


class Opener:
    """Non-blocking sockets, each ended as soon as its kind's action is done."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, str, float]] = {}
        self.counts: Counter[str] = Counter()
        self.slowest_connect_s = self.slowest_answer_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: str) -> None:
        client = socket.socket()
        client.setblocking(False)
        result = client.connect_ex(self._address)
        if result not in (0, errno.EINPROGRESS):
            self.counts[f"refused: {errno.errorcode[result]}"] += 1
            client.close()
            return
        self._open[client.fileno()] = (client, kind, time.perf_counter())
        self._poll.register(client, select.EPOLLOUT)

    def turn(self, timeout_s: float) -> None:
        """Act on sockets that are ready, after waiting at most this long."""
        for number, ready in self._poll.poll(timeout_s):
            client, kind, begin = self._open[number]
            now = time.perf_counter()
            if ready & select.EPOLLIN or (ready & select.EPOLLHUP and kind == "asks"):
                self.slowest_answer_s = max(self.slowest_answer_s, now - begin)
                self._end(number, self._answer(client), abort=True)
            elif ready & select.EPOLLOUT:
                self.slowest_connect_s = max(self.slowest_connect_s, now - begin)
                self._connected(number, client, kind)
            else:
                self._end(number, "refused: no connection", abort=True)

    def _connected(self, number: int, client: socket.socket, kind: str) -> None:
        if failed := client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end(number, f"refused: {errno.errorcode[failed]}", abort=True)
            return
        try:
            if kind == "asks":
                client.send(ASK)
                self._poll.modify(client, select.EPOLLIN)
                return
            if kind == "left after half a request":
                client.send(ASK[:20])
        except OSError as error:
            kind = f"refused: {type(error).__name__}"
        self._end(number, kind, abort=kind != "closed")

    def _answer(self, client: socket.socket) -> str:
        try:
            said = client.recv(4096)
        except OSError as error:
            return f"refused: {type(error).__name__}"
        return "answered" if said.startswith(b"HTTP/1.1 200") else "refused: no answer"

    def _end(self, number: int, what: str, *, abort: bool) -> None:
        client, _, _ = self._open.pop(number)
        self._poll.unregister(client)
        if abort:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        client.close()
        self.counts[what] += 1

    def give_up(self) -> None:
        for number in list(self._open):
            self._end(number, f"refused: nothing in {PATIENCE_S:.0f} s", abort=True)


def main() -> None:
    port, per_s, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    opener = Opener(port)
    begin, num = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        while num < passed * per_s:
            opener.open(KINDS[num % len(KINDS)])
            num += 1
        opener.turn(0.001)
    rate = num / (time.perf_counter() - begin)
    while len(opener) and time.perf_counter() - begin < seconds + PATIENCE_S:
        opener.turn(0.1)
    opener.give_up()
    print(
        json.dumps(
            {
                "opened": num,
                "per_s": round(rate),
                "slowest_connect_s": round(opener.slowest_connect_s, 3),
                "slowest_answer_s": round(opener.slowest_answer_s, 3),
                "counts": opener.counts,
            }
        )
    )


if __name__ == "__main__":
    main()
