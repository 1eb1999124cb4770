"""A started process for tests: does what its first argument says.

It is run as a script, by whatever Python its launcher names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from luceasync.ipc.channel import Statement, be_greeted
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import connect_to_parent

DEADLINE_S = 30.0


class Ask(Message, frozen=True):
    what: str = ""


class Tell(Message, frozen=True):
    words: str = ""


def main() -> None:
    mode = sys.argv[1]
    if mode == "import":  # it hangs before it has a channel
        print("importing", file=sys.stderr, flush=True)
        time.sleep(600)
    if mode == "loud":
        for number in range(200_000):
            print(f"line {number}", file=sys.stderr)
    if mode == "family":
        subprocess.Popen(["/bin/sleep", "600"])
    parent = connect_to_parent((Ask,))
    channel = parent.channel
    be_greeted(channel, Statement(version="0.0") if mode == "version" else Statement(), DEADLINE_S)
    while True:
        got = channel.receive(DEADLINE_S)
        answer(parent, got)


def answer(parent, got) -> None:
    channel, room = parent.channel, None
    words = got.message.what
    if words == "signals":
        group = os.getpgid(0)
        words = f"{group == os.getpid()} {os.getppid()} {signal.getsignal(signal.SIGINT)!r}"
    elif words == "descriptors":
        words = " ".join(sorted(os.listdir("/proc/self/fd"), key=int))
    elif words == "environment":
        words = " ".join(sorted(os.environ))
    elif words == "lent":
        parent.lent["nodes"].view[:5] = b"child"
    elif words.startswith("exit"):
        print("going now", file=sys.stderr)
        os._exit(int(words.split()[1]))
    if got.payload is not None:
        room = channel.reserve(got.payload.num_bytes, DEADLINE_S)
        got.payload.into(room.view)
    channel.send(Tell(words), room, answers=got.number, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    main()
