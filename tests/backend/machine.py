"""Another machine, played by this one: its listener in a thread, and the wire to it, which can be
cut, delayed and mended.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from luceasync.backend.listen import BackendListener
from luceasync.config import PlacementConfig
from luceasync.ipc.certificates import make_pair, tls_context
from luceasync.pipeline.remote.discovery import BackendProgram, choose_processes
from tests.wire import Wire


class Machine:
    """ "box2", whose devices `offers` names, and what "box1" needs to reach it."""

    def __init__(
        self,
        folder: Path,
        program: Path,
        offers: Sequence[str] = (),
        model_dir: Path | None = None,
        *,
        keeps_one: bool = False,
    ) -> None:
        self.program = program
        self.box1, self.box2 = make_pair(folder / "machines", ["box1", "box2"])
        [self.stranger] = make_pair(folder / "strangers", ["box1"])
        sock = socket.create_server(("127.0.0.1", 0))
        self.wire = Wire(sock.getsockname()[1])
        command = [str(program), *[word for offer in offers for word in ("--offer", offer)]]
        context = tls_context(self.box2, "--tls", is_server=True)
        self.listener = BackendListener(sock, context, command, model_dir, keeps_one=keeps_one)
        threading.Thread(target=self.listener.serve, daemon=True).start()

    def placement(
        self, devices: str, tls: Path | None = None, name: str = "box2"
    ) -> PlacementConfig:
        """Where the layers of a server go whose CPU is here."""
        return PlacementConfig(
            tuple(devices.split(",")),
            ipc_bins=(f"hip@{name}=tls://127.0.0.1:{self.wire.port}",),
            ipc_tls=tls or self.box1,
        )

    def program_for(self, tls: Path | None = None, name: str = "box2") -> BackendProgram:
        """What brings its devices here."""
        device = f"{name}/hip:0"
        placement = self.placement(device, tls, name)
        return choose_processes([device], placement, lambda _: False, self.program).programs[1]

    def sessions(self) -> int:
        """The number of processes that it runs."""
        return len(self.listener._sessions)

    def close(self) -> None:
        self.wire.close()
        self.listener.close()


def is_closed_within(sock: socket.socket, seconds: float) -> bool:
    """Whether the other end closes the connection by then."""
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        if waiting.poll(left_s * 1e3):
            try:
                if not sock.recv(1 << 16):  # what comes before is an alert of TLS
                    return True
            except ConnectionResetError:
                return True
    return False
