"""The other ends of `luceasync bench ipc`: processes that answer hops, chunks and bare packets.

They run this file.
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
from luceasync.ipc.launcher import LocalLauncher, LocalProcess, Program
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import connect_to_parent, open_rings

HOP_BYTES = 4 * 5120 * 2
CHUNK_BYTES = 20 << 20
BARE_BYTES = 64
RING_BYTES = (64 << 20, 64 << 20)
DEADLINE_S = 60.0
MODULE = "luceasync.bench.echo"


class Hop(Message, frozen=True):
    """An activation; the answer has one too."""


class Chunk(Message, frozen=True):
    """A payload; the answer has none."""


class Done(Message, frozen=True):
    """The answer."""


def serve() -> None:
    """Answer hops and chunks until the parent closes the channel."""
    home = connect_to_parent((Hop, Chunk))
    be_greeted(home.channel, Statement(), DEADLINE_S)
    with suppress(ChannelClosed):  # the measurement has ended
        answer_all(home.channel)
    home.close()


def answer_all(channel: LocalChannel[Any]) -> None:
    """Answer until the channel closes. Raises ChannelClosed."""
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
    """Send back each packet."""
    with socket.socket(fileno=fd) as sock:
        while packet := sock.recv(BARE_BYTES):
            sock.send(packet)


@contextmanager
def bare_end() -> Iterator[socket.socket]:
    """A socket whose other end sends back each packet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arguments = [sys.executable, "-m", MODULE, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        theirs.close()
        yield ours
        ours.close()
        process.wait(DEADLINE_S)


@contextmanager
def channel_end(transport: str) -> Iterator[LocalProcess]:
    """A channel whose other end answers hops and chunks."""
    rings = open_rings(transport, RING_BYTES)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = Program(
        Path(sys.executable), "echo", RING_BYTES, rings=rings, environment=environment
    )
    launcher = LocalLauncher(program, lambda line: print(line, file=sys.stderr))
    try:
        started = launcher.launch(["-m", MODULE, "channel"], (Done,))
        greet(started.channel, Statement(), DEADLINE_S)
        yield started
    finally:
        launcher.close()
        if rings is not None:
            rings.close()


def hop_of(started: LocalProcess) -> Callable[[], None]:
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
