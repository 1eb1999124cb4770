"""A process at the other end of a channel dies, hangs or lies, in every way, many times.

    python -m tests.acceptance.chaos_ipc [--rounds 200] [--json PATH]

Each round starts a process, lets it answer with a payload, and then lets it misbehave. The channel
must close with a clear error, in time, and no process, descriptor or mapping may be left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from luceasync.bench.report import Report, ms, percentile
from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Statement, be_greeted, greet
from luceasync.ipc.launcher import LocalLauncher, LocalProcess, Program
from luceasync.ipc.packets import MAX_PACKET_BYTES, Message
from luceasync.ipc.wiring import VARIABLE, connect_to_parent, open_rings
from tests.acceptance import command
from tests.later import later

RING_BYTES = (1 << 20, 1 << 20)
PAYLOAD_BYTES = 40_960
DEADLINE_S = 60.0
HUNG_S = 0.2  # a deadline that is meant to pass
SETTLE_S = DEADLINE_S
KILL_AFTER_S = 0.02
CHILD = "--child"


class Ask(Message, frozen=True):
    """A request to send this payload back."""


class Tell(Message, frozen=True):
    """The answer."""


@dataclass(frozen=True)
class Mischief:
    """What the process is told to do, what is done to it, and the expected error of the channel."""

    mode: str
    act: Callable[[LocalProcess], None]
    words: tuple[str, ...]
    greets: bool = True
    after_s: float = 0.0  # it is done so long after the wait has begun


@dataclass
class Seen:
    """Rounds of one kind, and how long the channel took to close."""

    noticed_s: list[float] = field(default_factory=list)


def serve(mode: str) -> None:
    """Run the other end."""
    control = socket.socket(fileno=os.dup(json.loads(os.environ[VARIABLE])["control"]))
    home = connect_to_parent((Ask,))
    version = Statement(version="0.0") if mode == "version" else Statement()
    be_greeted(home.channel, version, DEADLINE_S)
    while True:
        got = home.channel.receive(DEADLINE_S)
        if got.payload is None:
            break
        room = home.channel.reserve(got.payload.num_bytes, DEADLINE_S)
        got.payload.into(room.view)
        home.channel.send(Tell(), room, answers=got.number, deadline_s=DEADLINE_S)
    if mode == "half":
        control.send(b"\x95\x01")
    elif mode == "oversize":
        control.send(bytes(MAX_PACKET_BYTES + 1))
    time.sleep(DEADLINE_S)


def echo(started: LocalProcess) -> None:
    """Answer rightly."""
    content = os.urandom(PAYLOAD_BYTES)
    room = started.channel.reserve(PAYLOAD_BYTES, DEADLINE_S)
    room.view[:] = content
    got = started.channel.call(Ask(), Tell, room, deadline_s=DEADLINE_S)
    assert got.payload is not None
    assert bytes(got.payload.view(PAYLOAD_BYTES)) == content
    got.payload.free()


def wait_for(started: LocalProcess) -> None:
    """Tell the process to begin, and wait for an answer that never comes."""
    started.channel.call(Ask(), Tell, deadline_s=DEADLINE_S)


def wait_for_one_that_is_killed(started: LocalProcess) -> None:
    with later(KILL_AFTER_S, os.kill, started.child.pid, signal.SIGKILL):
        wait_for(started)


def wait_for_one_that_is_stopped(started: LocalProcess) -> None:
    os.kill(started.child.pid, signal.SIGSTOP)
    started.channel.ping(HUNG_S)


def write_on(started: LocalProcess) -> None:
    """Write more than the ring and the sockets hold; the other end does not read."""
    started.channel.send(Ask(), deadline_s=DEADLINE_S)
    while True:
        room = started.channel.reserve(PAYLOAD_BYTES, HUNG_S)
        started.channel.send(Ask(), room, deadline_s=HUNG_S)


def greet_it(started: LocalProcess) -> None:
    greet(started.channel, Statement(), DEADLINE_S)


MISCHIEF = (
    Mischief(
        "kill -9",
        wait_for_one_that_is_killed,
        ("it is gone", "has ended", "reset by peer", "Broken pipe"),  # after the order or before it
        after_s=KILL_AFTER_S,
    ),
    Mischief("stop", wait_for_one_that_is_stopped, ("silent for",)),
    Mischief("half", wait_for, ("a malformed packet of 2 bytes",)),
    Mischief("oversize", wait_for, ("bytes; the limit is",)),
    Mischief("version", greet_it, ("luceasync 0.0 here",), greets=False),
    Mischief("slow", write_on, ("waited 0.2 s",)),
)


def one_round(launcher: LocalLauncher, mischief: Mischief) -> float:
    """Run a round; returns the seconds until the channel closed."""
    started = launcher.launch([__file__, CHILD, mischief.mode], (Tell,))
    if mischief.greets:
        greet_it(started)
        echo(started)
    begun = time.perf_counter()
    try:
        mischief.act(started)
    except ChannelClosed as error:
        noticed_s = time.perf_counter() - begun - mischief.after_s
        if not any(words in str(error) for words in mischief.words):
            raise SystemExit(f"{mischief.mode}: the channel said: {error}") from error
    else:
        raise SystemExit(f"{mischief.mode}: the channel did not close")
    started.end(0.0, DEADLINE_S)
    return noticed_s


def left() -> dict[str, object]:
    """Resources of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(children),
        "memfd mappings": maps.count("memfd:luceasync"),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def run(report: Report, num_rounds: int) -> None:
    """Run all rounds and check what is left. Exits with a message if something is."""
    before = left()
    seen: dict[tuple[str, str], Seen] = {}
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    for number in range(num_rounds):
        mischief = MISCHIEF[number // 2 % len(MISCHIEF)]
        transport = ("shared", "stream")[number % 2]
        rings = open_rings(transport, RING_BYTES)
        program = Program(
            Path(sys.executable), "the child", RING_BYTES, rings=rings, environment=environment
        )
        launcher = LocalLauncher(program, lambda line: None)
        try:
            noticed_s = one_round(launcher, mischief)
        finally:
            launcher.close()
            if rings is not None:
                rings.close()
        seen.setdefault((mischief.mode, transport), Seen()).noticed_s.append(noticed_s)
    table = report.table(("what", "payloads", "rounds", "closed after, p50", "p99"))
    for (mode, transport), found in seen.items():
        noticed = [percentile(found.noticed_s, percent) for percent in (50, 99)]
        table.add(mode, transport, len(found.noticed_s), *(ms(each) for each in noticed))
    until_s = time.monotonic() + SETTLE_S  # a thread that starts processes is told to end, and does
    while (after := left()) != before and time.monotonic() < until_s:
        time.sleep(0.01)
    report.say(f"\nbefore: {before}\nafter:  {after}")
    if after != before:
        raise SystemExit("something is left")


def main() -> None:
    """Run the rounds and print."""
    if sys.argv[1:2] == [CHILD]:
        return serve(sys.argv[2])
    parser = command.parser(__doc__, rounds=200)
    options = parser.parse_args()
    return run(Report({"cores": os.cpu_count()}, options.json), options.rounds)


if __name__ == "__main__":
    main()
