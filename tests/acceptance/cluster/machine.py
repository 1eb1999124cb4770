"""Another machine: a listener in a network namespace, or behind a wire, and the link to it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from luceasync.ipc.certificates import make_pair
from luceasync.ipc.tcp import Address
from tests.acceptance.cluster.packets import PacketLink, Weather
from tests.acceptance.hostile.server import ROOT
from tests.wire import Wire

HERE, THERE, PORT = "10.213.57.1", "10.213.57.2", 7000
# Where this process finds its packages, for processes that may inherit nothing else.
PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Machine:
    """ "box2": a listener in a process of its own, and the link to it."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        delay_s: float | None = 0.0,
        made: Path | None = None,
        *,
        is_lossy: bool = False,
    ) -> None:
        """`words`: the command that listens, before its address; `delay_s` None: there is no wire;
        `made`: where certificates are; `is_lossy`: the link is a PacketLink.
        """
        self.folder, self._words, self._delay_s = folder, list(words), delay_s
        self.box1, self.box2 = (made or folder) / "box1.pem", (made or folder) / "box2.pem"
        if made is None:
            make_pair(folder, ["box1", "box2"])
        self._log = folder / "listener.log"
        self._closing = ExitStack()
        self._packets: PacketLink | None = None
        self.namespace = self._namespace(is_lossy=is_lossy)
        self._wire: Wire | None = None
        try:
            self.listener = self.start()
        except BaseException:
            self._closing.close()
            raise

    def start(self) -> subprocess.Popen[bytes]:
        """Start the listener, and wait until it listens."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        host, port = (THERE, PORT) if self.namespace else ("127.0.0.1", _free_port())
        started = subprocess.Popen(
            [*inside, *self._words, f"{host}:{port}", "--tls", str(self.box2)],
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            stderr=self._log.open("ab"),
        )
        if not self.namespace and self._wire is None and self._delay_s is not None:
            self._wire = Wire(port, self._delay_s)
            self._closing.callback(self._wire.close)
        self.address = Address(host, port if self._wire is None else self._wire.port)
        until(
            lambda: started.poll() is not None or _connects(Address(host, port), inside),
            "the listener does not listen",
        )
        if started.poll() is not None:
            raise SystemExit(f"the listener has ended: {self._log.read_text()}")
        self.listener = started
        return started

    @property
    def url(self) -> str:
        return f"tls://{self.address}"

    def cut(self) -> None:
        """Let nothing pass, and tell no end."""
        if self.namespace:
            self._inside("link", "set", "box2", "down")
        elif self._wire is not None:
            self._wire.is_cut = True

    def mend(self) -> None:
        if self.namespace:
            self._inside("link", "set", "box2", "up")
        elif self._wire is not None:
            self._wire.mend()

    def set_weather(self, weather: Weather) -> None:
        """What becomes of packets on a lossy link."""
        assert self._packets is not None, "the link is not lossy"
        self._packets.set(weather)

    def signal_stage(self, number: int) -> None:
        """Send a signal to the process that runs layers, not to the one that waits."""
        told = re.findall(r"layers .* process (\d+)$", self._log.read_text(), re.MULTILINE)
        os.kill(int(told[-1]), number)

    def num_processes(self) -> int:
        """Of those that run layers or wait."""
        return len(psutil.Process(self.listener.pid).children(recursive=True))

    def close(self) -> None:
        self.mend()
        self.listener.terminate()
        self.listener.wait()
        self._closing.close()

    def kill(self) -> None:
        """End everything there at once, as a machine without power."""
        processes = psutil.Process(self.listener.pid).children(recursive=True)
        self.listener.kill()
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.listener.wait()

    def _namespace(self, *, is_lossy: bool) -> str:
        """A namespace with a link to it; empty: there can be none."""
        name = f"luceasync-{os.getpid()}"
        if os.geteuid() != 0 or self._delay_s or shutil.which("ip") is None:
            return ""
        made = subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL, check=False)
        if made.returncode:
            return ""
        self._closing.callback(subprocess.run, ["ip", "netns", "del", name])
        here = f"box1-{os.getpid()}"
        if is_lossy:
            self._packets = PacketLink(here, "box2", name)
            self._closing.callback(self._packets.close)
        else:
            _ip("link", "add", here, "type", "veth", "peer", "name", "box2", "netns", name)
        _ip("addr", "add", f"{HERE}/24", "dev", here)
        _ip("link", "set", here, "up")
        for words in (("addr", "add", f"{THERE}/24", "dev", "box2"), ("link", "set", "lo", "up")):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "box2", "up")
        return name

    def _inside(self, *words: str) -> None:
        _ip("-n", self.namespace, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _connects(address: Address, inside: Sequence[str]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, 1.0):
        return True
    return False


def until(is_so: Callable[[], bool], words: str, deadline_s: float = 120.0) -> float:
    """Wait until it is so; the seconds. Exits with a message if it does not come."""
    begun_s = time.monotonic()
    while not is_so():
        if time.monotonic() - begun_s > deadline_s:
            raise SystemExit(words)
        time.sleep(0.02)
    return time.monotonic() - begun_s


@contextmanager
def machine_of(
    words: Sequence[str],
    delay_s: float | None = 0.0,
    made: Path | None = None,
    *,
    is_lossy: bool = False,
) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        machine = Machine(Path(folder), words, delay_s, made, is_lossy=is_lossy)
        try:
            yield machine
        finally:
            machine.close()
