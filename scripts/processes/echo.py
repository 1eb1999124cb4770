"""A process that takes hops and chunks in host memory and answers them, and a bare ping-pong.

Owns the other ends, which run this file. Knows no clock.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Statement, be_greeted, greet
from luceasync.ipc.launcher import LocalLauncher, LocalStarted, Program
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import come_home, open_rings

HOP_BYTES = 4 * 5120 * 2
CHUNK_BYTES = 20 << 20
BARE_BYTES = 64
RING_BYTES = (64 << 20, 64 << 20)
DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


class Hop(Message, frozen=True):
    """Take this activation and send one back."""


class Chunk(Message, frozen=True):
    """Take this; an answer without a payload is enough."""


class Done(Message, frozen=True):
    """The answer."""


def serve() -> None:
    """The other end: copies what comes, and answers."""
    home = come_home((Hop, Chunk))
    be_greeted(home.channel, Statement(), DEADLINE_S)
    with suppress(ChannelClosed):  # the measurement has ended
        answer_all(home.channel)
    home.close()


def answer_all(channel: LocalChannel[Any]) -> None:
    """Hops and chunks, until the other end is gone."""
    chunk = memoryview(bytearray(CHUNK_BYTES))
    while True:
        got = channel.receive(DEADLINE_S)
        assert got.payload is not None
        room = None
        if isinstance(got.message, Hop):
            room = channel.reserve(HOP_BYTES, DEADLINE_S)
            room.view[:] = got.payload.view(HOP_BYTES)
            got.payload.free()
        else:
            got.payload.into(chunk)
        channel.send(Done(), room, answers=got.number, deadline_s=DEADLINE_S)


def serve_bare(fd: int) -> None:
    """The other end of a bare ping-pong."""
    with socket.socket(fileno=fd) as sock:
        while packet := sock.recv(BARE_BYTES):
            sock.send(packet)


@contextmanager
def bare_end() -> Iterator[socket.socket]:
    """A socket to a process that sends back what comes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arguments = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        theirs.close()
        yield ours
        ours.close()
        process.wait(DEADLINE_S)


@contextmanager
def channel_end(transport: str) -> Iterator[LocalStarted]:
    """A process at the other end of a channel."""
    rings = open_rings(transport, RING_BYTES)
    environment = {"PYTHONPATH": str(ROOT)}
    program = Program(
        Path(sys.executable), "echo", RING_BYTES, rings=rings, environment=environment
    )
    launcher = LocalLauncher(program, lambda line: print(line, file=sys.stderr))
    try:
        started = launcher.launch([__file__, "channel"], (Done,))
        greet(started.channel, Statement(), DEADLINE_S)
        yield started
    finally:
        launcher.close()
        if rings is not None:
            rings.close()


def hop_of(started: LocalStarted) -> Callable[[], None]:
    """One hop, there and back."""
    channel = started.channel
    source, target = bytearray(os.urandom(HOP_BYTES)), memoryview(bytearray(HOP_BYTES))

    def hop() -> None:
        room = channel.reserve(HOP_BYTES, DEADLINE_S)
        room.view[:] = source
        got = channel.call(Hop(), Done, room, deadline_s=DEADLINE_S)
        assert got.payload is not None
        got.payload.into(target)

    return hop


def ping_of(sock: socket.socket) -> Callable[[], None]:
    """One bare ping-pong."""
    packet = bytes(BARE_BYTES)

    def ping() -> None:
        sock.send(packet)
        sock.recv(BARE_BYTES)

    return ping


if __name__ == "__main__":
    serve() if sys.argv[1] == "channel" else serve_bare(int(sys.argv[1]))
