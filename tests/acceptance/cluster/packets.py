"""A link between two network namespaces that loses packets, delays and reorders them.

Two tun devices, and a process that carries packets from one to the other. Run as a program, it is
that process. Root, Linux.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 1 << 16
MAX_HELD = 10_000  # packets on their way; more are dropped, as by a router
LONGEST_WAIT_S = 0.1


@dataclass(frozen=True)
class Weather:
    """`loss`: the share of packets that is lost on the way to the other namespace, and of those on
    the way back; each of the others takes between a half and one and a half times `delay_s`.
    """

    loss: tuple[float, float] = (0.0, 0.0)
    delay_s: float = 0.0


class PacketLink:
    """Carries packets between the devices `here` and, in `namespace`, `there`."""

    def __init__(self, here: str, there: str, namespace: str) -> None:
        """Raises OSError where there is no tun device."""
        fds = [_tun(here), _tun(there)]
        try:
            subprocess.run(["ip", "link", "set", there, "netns", namespace], check=True)
            words = [sys.executable, "-m", __name__, *map(str, fds)]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    def set(self, weather: Weather) -> None:
        """From now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(weather) + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Remove both devices."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _tun(name: str) -> int:
    """A new device's descriptor."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def carry(here: int, there: int, orders: int) -> None:
    """Carry packets until the end of `orders`, lines that say what the weather is."""
    weather, draws, numbers = Weather(), random.Random(0), itertools.count()
    held: list[tuple[float, int, int, bytes]] = []  # when due, in order, where to, what
    while True:
        wait_s = min(LONGEST_WAIT_S, held[0][0] - time.monotonic()) if held else LONGEST_WAIT_S
        ready = select.select([here, there, orders], [], [], max(0.0, wait_s))[0]
        if orders in ready:
            if not (told := os.read(orders, MAX_PACKET_BYTES)):
                return
            weather = msgspec.json.decode(told.splitlines()[-1], type=Weather)
        for source, target, loss in zip((here, there), (there, here), weather.loss, strict=True):
            if source not in ready:
                continue
            with contextlib.suppress(BlockingIOError):
                packet = os.read(source, MAX_PACKET_BYTES)
                if draws.random() >= loss and len(held) < MAX_HELD:
                    due_s = time.monotonic() + weather.delay_s * draws.uniform(0.5, 1.5)
                    heapq.heappush(held, (due_s, next(numbers), target, packet))
        while held and held[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # the device is down: the packet is lost
                os.write(target, packet)


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]), 0)
