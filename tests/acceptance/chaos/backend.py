"""A luceasync-backend that misbehaves once, at a moment that a file names.

    python -m tests.acceptance.chaos.backend FOLDER ARGUMENT...

The file is FOLDER/LAYERS, such as 4:8, and holds a `Wish`. Everything else is the real program.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.ipc import channel
from luceasync.ipc.packets import MAX_PACKET_BYTES
from luceasync.ipc.wiring import VARIABLE

SLOW_S = 1.5
IMPORTING_S = 0.2


@dataclass(frozen=True)
class Wish:
    """A misdeed, and its moment: at which command of this kind, counted from 1."""

    deed: str
    moment: str
    number: int = 1

    def write(self, path: Path) -> None:
        """Write the wish for the backend of these layers."""
        new = path.with_suffix(".new")
        new.write_text(f"{self.deed} {self.moment} {self.number}", encoding="ascii")
        new.rename(path)

    @classmethod
    def read(cls, path: Path) -> Wish | None:
        """Read the wish; None if there is none."""
        try:
            deed, moment, number = path.read_text(encoding="ascii").split()
        except FileNotFoundError:
            return None
        return cls(deed, moment, int(number))


class Doer:
    """Does the misdeed of a wish, once."""

    def __init__(self, path: Path, control: socket.socket) -> None:
        self._path = path
        self._control = control
        self._num_seen = 0

    def at(self, moment: str) -> None:
        """Called at each moment."""
        wish = Wish.read(self._path)
        if wish is None or wish.moment != moment:
            return
        self._num_seen += 1
        if self._num_seen >= wish.number:
            self._num_seen = 0
            self._path.unlink()  # done once
            self._do(wish.deed)

    def _do(self, deed: str) -> None:
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif deed == "half":
            self._control.send(b"\x95\x01")
        elif deed == "oversize":
            self._control.send(bytes(MAX_PACKET_BYTES + 1))
        elif deed == "slow":
            time.sleep(SLOW_S)
        elif deed == "version":
            channel.Statement = functools.partial(  # type: ignore[assignment, misc]
                channel.Statement, version="0.0"
            )
        elif deed == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the kernel ends this process too
        else:
            raise SystemExit(f"{deed}: no deed")


def watched(doer: Doer) -> None:
    """Pass every command to `Doer` before it runs."""
    from luceasync.backend.dispatch import Dispatcher
    from luceasync.pipeline.remote import wire

    real: Callable[[Dispatcher], Any] = Dispatcher.next
    moments = {
        wire.LoadStage: "load",
        wire.SaveNode: "save",
        wire.RestoreNodes: "adopt",
        wire.AdoptNode: "adopt",
    }

    def following(dispatcher: Dispatcher) -> Any:
        got = real(dispatcher)
        if got is not None and isinstance(got.message, wire.RunPass):
            doer.at("prefill" if got.message.kind == "prefill" else "decode")
        elif got is not None and type(got.message) in moments:
            doer.at(moments[type(got.message)])
        return got

    Dispatcher.next = following  # type: ignore[method-assign]


def main() -> None:
    """Run a backend."""
    folder, arguments = Path(sys.argv[1]), sys.argv[2:]
    if "--layers" in arguments:
        control = socket.socket(fileno=os.dup(json.loads(os.environ[VARIABLE])["control"]))
        doer = Doer(folder / arguments[arguments.index("--layers") + 1], control)
        doer.at("greeting")
        real = channel.be_greeted

        def greeted(*given: Any) -> None:
            real(*given)
            threading.Timer(IMPORTING_S, doer.at, ("import",)).start()
            watched(doer)  # imports torch, as the program does now

        channel.be_greeted = greeted
    from luceasync.backend.app import main as run

    run(arguments)


if __name__ == "__main__":
    main()
