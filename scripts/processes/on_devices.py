"""A process that takes hops and chunks to a device of its own, and gives hops back.

Owns the other end, which runs this file, and how this one sends to it from a device.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Channel, Outgoing, Received, Statement, be_greeted, greet
from luceasync.ipc.launcher import LocalLauncher, LocalStarted, Program
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import come_home, open_rings
from luceasync.pipeline.devices import pinned_by
from luceasync.pipeline.platform import Event, open_platform
from luceasync.pipeline.remote.tensors import lend, put, put_soon

ROOT = Path(__file__).parents[2]
HOP = ((4, 1, 5120), torch.bfloat16)
CHUNK = ((1, 2048, 5120), torch.bfloat16)
CHUNK_BYTES = 2048 * 5120 * 2
RING_BYTES = (64 << 20, 64 << 20)
DEADLINE_S = 120.0


class Hop(Message, frozen=True):
    """Take this activation to your device, and give it back."""


class Chunk(Message, frozen=True):
    """Take this to your device; say when it is there."""


class Done(Message, frozen=True):
    """The answer."""


def serve(device: str) -> None:
    """The other end of hops and chunks."""
    home = come_home((Hop, Chunk))
    be_greeted(home.channel, Statement(), DEADLINE_S)
    home.channel.register(pinned_by([device]))
    home.channel.keep_awake()
    place = open_platform(device).device
    with suppress(ChannelClosed):  # the measurement has ended
        answer_all(home.channel, place)
    home.close()


def answer_all(channel: LocalChannel[Hop | Chunk], place: torch.device) -> None:
    """Until the other end is gone. A chunk is answered when it is on the device; the next one is
    looked for meanwhile, as by a backend.
    """
    platform = open_platform(str(place) if place.index is not None else f"{place}:0")
    coming: deque[tuple[Event, Received[Any]]] = deque()

    def arrive() -> None:
        event, got = coming.popleft()
        event.synchronize()
        got.payload.free()
        channel.send(Done(), answers=got.number, deadline_s=DEADLINE_S)

    while True:
        while coming and not channel.poll(0.0):
            arrive()
        got = channel.receive(DEADLINE_S)
        assert got.payload is not None
        is_hop = isinstance(got.message, Hop)
        here = lend(got.payload, [HOP if is_hop else CHUNK])[0].to(place, non_blocking=True)
        if is_hop:
            room = channel.reserve(here.nbytes, DEADLINE_S)
            put(room, [here])
            got.payload.free()
            channel.send(Done(), room, answers=got.number, deadline_s=DEADLINE_S)
            continue
        with platform.on_device():
            coming.append((platform.record_event(), got))
        if len(coming) > 1:
            arrive()


def synchronize_on(place: torch.device) -> None:
    open_platform(str(place) if place.index is not None else f"{place}:0").synchronize()


@contextmanager
def echo_end(device: str) -> Iterator[LocalStarted]:
    """A process that has the device, at the other end of a channel."""
    rings = open_rings("shared", RING_BYTES)
    assert rings is not None
    program = Program(
        Path(sys.executable),
        "echo",
        RING_BYTES,
        rings=rings,
        environment={"PYTHONPATH": str(ROOT)},
    )
    launcher = LocalLauncher(program, lambda line: print(line, file=sys.stderr))
    try:
        started = launcher.launch([__file__, device], (Done,))
        greet(started.channel, Statement(), DEADLINE_S)
        yield started
    finally:
        launcher.close()
        rings.close()


def hop_of(started: LocalStarted, place: torch.device) -> Callable[[], float]:
    """Seconds of one hop there and back, from a device to a device."""
    channel = started.channel
    source = torch.randn(HOP[0]).to(place, HOP[1])

    def hop() -> float:
        begun = time.perf_counter()
        room = channel.reserve(source.nbytes, DEADLINE_S)
        put(room, [source])
        got = channel.call(Hop(), Done, room, deadline_s=DEADLINE_S)
        assert got.payload is not None
        back = lend(got.payload, [HOP])[0].to(place, non_blocking=True)
        synchronize_on(place)
        got.payload.free()
        seconds = time.perf_counter() - begun
        assert back.shape == source.shape
        return seconds

    return hop


def chunks_rate(started: LocalStarted, place: torch.device, count: int) -> float:
    """Bytes a second, from a device to a device, as chunks of a prompt go: one is written while
    one before it is sent and read.
    """
    channel = started.channel
    source = torch.randn(CHUNK[0], dtype=torch.float32).to(place, CHUNK[1])
    synchronize_on(place)
    numbers = []
    begun = time.perf_counter()
    unsent: list[tuple[Outgoing, Event | None]] = []
    for _ in range(count):
        room = channel.reserve(CHUNK_BYTES, DEADLINE_S)
        unsent.append((room, put_soon(room, source)))
        if len(unsent) > 1:
            numbers.append(send_chunk(channel, *unsent.pop(0)))
    numbers.append(send_chunk(channel, *unsent.pop(0)))
    for number in numbers:
        channel.answer(number, Done, DEADLINE_S)
    return count * CHUNK_BYTES / (time.perf_counter() - begun)


def send_chunk(channel: Channel[Any], room: Outgoing, is_there: Event | None) -> int:
    if is_there is not None:
        is_there.synchronize()
    return channel.send(Chunk(), room, deadline_s=DEADLINE_S)


def pinned_rate(place: torch.device, count: int) -> float:
    """Bytes a second of copies from the device to pinned memory: one half of a chunk's way."""
    source = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target.copy_(source)
    begun = time.perf_counter()
    for _ in range(count):
        target.copy_(source)
    return count * CHUNK_BYTES / (time.perf_counter() - begun)


if __name__ == "__main__":
    serve(sys.argv[1])
