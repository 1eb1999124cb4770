"""Launches processes for other devices through Ray: an actor on one of its nodes runs a listener
there.

Ray carries no payload: the link is our own, with its own heartbeat, since Ray takes minutes to
notice a cut link. Owns the actor while it is needed. Imports ray when it is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from luceasync.errors import ConfigError
from luceasync.ipc.certificates import name_of_peer, tls_context
from luceasync.ipc.tcp import Address, is_reachable

RAY_SCHEME = "ray"
NAMESPACE = "luceasync"  # of Ray's names
LEASH = Path(__file__).with_name("leash.py")
PROBE_S = 3.0
PLACED_S = 60.0  # until Ray has found a place, and a worker has started there
LISTENS_S = 60.0
END_S = 10.0
LOG_S = 5.0  # for the last lines of a program that has ended
# Variables that Ray sets for its workers. OMP_NUM_THREADS stays: it is the actor's number of CPUs.
# Variables that Ray's clients need stay, too.
NOT_FOR_PROGRAMS, FOR_CLIENTS = ("RAY_", "LD_PRELOAD"), "RAY_AUTH"


@dataclass(frozen=True, slots=True)
class RayPlace:
    """Where Ray should run something: in a bundle of a placement group, or wherever `resources`
    are."""

    address: Address
    group: str = ""
    bundle: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)


def parse_ray_url(url: str) -> RayPlace:
    """The place in ray://HOST:PORT/GROUP/BUNDLE or ray://HOST:PORT?GPU=1. Raises ConfigError."""
    expected = f"{RAY_SCHEME}://HOST:PORT?GPU=1, or HOST:PORT/GROUP/BUNDLE, is expected"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        group, _, bundle = parts.path.strip("/").partition("/")
        asked = parse_qsl(parts.query, strict_parsing=bool(parts.query))
        resources = {name: float(amount) for name, amount in asked}
        number = int(bundle) if bundle else 0
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; {expected}") from None
    if parts.scheme != RAY_SCHEME or not host or not port or bool(group) == bool(resources):
        raise ConfigError(f"{url}: {expected}")
    return RayPlace(Address(host, port), group, number, resources)


def import_ray(what: str) -> Any:
    """Import Ray. Raises ConfigError if it is not installed; the error names `what` needs it."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"{what} needs the package ray: pip install 'luceasync[ray]'") from None
    return ray


def connect_ray(address: str, what: str) -> Any:
    """Connect to the cluster at HOST:PORT, or "auto". Raises ConfigError, which names `what`."""
    ray = import_ray(what)
    host, _, port = address.rpartition(":")
    if host and not is_reachable(Address(host.strip("[]"), int(port)), PROBE_S):
        raise ConfigError(f"{what}: no Ray cluster at {address}; `ray start --head` starts one")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of many kinds: a token, a version, no node of it on this machine
        words = " ".join(str(error).split())
        raise ConfigError(f"{what}: Ray at {address}: {words}") from None
    return ray


def resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for an actor with these resources."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": own,
    }


class LeashedProgram:
    """A program of this Python on this machine, which ends with the thread that runs it, and its
    last lines."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m WORDS`. Call it from a thread that lives as long as the program. Raises
        OSError."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FOR_CLIENTS) or not name.startswith(NOT_FOR_PROGRAMS)
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(LEASH),
                str(os.getpid()),
                sys.executable,
                "-m",
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**kept, **environment},
        )
        self.lines: deque[str] = deque(maxlen=20)
        self._reading = threading.Thread(target=self._read, name="log", daemon=True)
        self._reading.start()

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else ""

    def wait(self) -> int:
        """Wait until it has ended; its status."""
        status = self.process.wait()
        self._reading.join(LOG_S)
        return status

    def end(self, grace_s: float) -> None:
        """Terminate the program, and kill it with everything that it started if it does not end.
        Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.lines.append(text)
                print(text, file=sys.stderr, flush=True)  # Ray keeps it as the worker's log


class Listening(NamedTuple):
    """The address of a listener, and the machine that its certificate names."""

    host: str
    port: int
    machine: str


class ListenerActor:
    """Runs `luceasync-backend --listen` on a node of Ray, as an actor there."""

    def __init__(self, tls: str, host: str, arguments: Sequence[str]) -> None:
        """`tls`: this node's file of `luceasync pair`; `host`: its address."""
        self._machine = _machine_of(Path(tls))
        with socket.create_server((host, 0)) as found:
            self._port = int(found.getsockname()[1])
        self._host = host
        words = ["luceasync.backend", "--listen", str(Address(host, self._port)), "--tls", tls]
        self._program: LeashedProgram | None = None
        self._begun = threading.Event()
        self._running = threading.Thread(target=self._run, args=([*words, *arguments],))
        self._running.start()

    def where(self) -> Listening:
        """Wait until it listens. Raises RuntimeError with its last line if it does not."""
        until_s = time.monotonic() + LISTENS_S
        while time.monotonic() < until_s and self._running.is_alive():
            if is_reachable(Address(self._host, self._port), 1.0):
                return Listening(self._host, self._port, self._machine)
            time.sleep(0.05)
        said = "" if self._program is None else self._program.last_line
        raise RuntimeError(f"the listener on {self._host} does not listen: {said}")

    def end(self) -> None:
        """End it, with all processes that it runs."""
        self._begun.wait(END_S)
        if self._program is not None:
            self._program.end(END_S)
        self._running.join(END_S)

    def _run(self, words: Sequence[str]) -> None:
        self._program = LeashedProgram(words, {})
        self._begun.set()
        self._program.wait()


def _machine_of(tls: Path) -> str:
    """The machine that a file of `luceasync pair` names, by a handshake with itself."""
    contexts = [tls_context(tls, "tls", is_server=is_server) for is_server in (True, False)]
    contexts[1].check_hostname = False
    here, there = socket.socketpair()
    with here, there:
        answering = threading.Thread(target=_answer, args=(contexts[0], here), daemon=True)
        answering.start()
        there.settimeout(END_S)
        with contexts[1].wrap_socket(there) as client:
            name = name_of_peer(client)
        answering.join(END_S)
    return name


def _answer(context: ssl.SSLContext, sock: socket.socket) -> None:
    sock.settimeout(END_S)
    with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as server:
        server.recv(1)


class RayLauncher:
    """Starts listeners as actors of Ray, one at a time, each in the same place.

    It is a driver of Ray: Ray ends the actor when this process ends, for whatever reason. A server
    creates it in the process that brings the other machine's devices, so that the server does not
    end with Ray.
    """

    def __init__(self, place: RayPlace, tls: Path, arguments: Sequence[str] = ()) -> None:
        """Connect. `tls` is a path on the node too. Raises ConfigError."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._place, self._tls, self._arguments = place, tls, tuple(arguments)
        self._ray = connect_ray(str(place.address), "--target-shard-ipc-bin")
        self._actor: Any = None

    def launch(self) -> Listening:
        """Start a listener, and wait until it listens. Raises ConfigError if Ray has no place for
        it, or if it does not start."""
        ray, place = self._ray, self._place
        options = {**resource_options(place.resources or self._bundle()), **self._strategy()}
        self._actor = (
            ray.remote(_ListenerOnNode)
            .options(max_restarts=0, **options)
            .remote(str(self._tls), self._arguments)
        )
        try:
            return Listening(*ray.get(self._actor.where.remote(), timeout=PLACED_S + LISTENS_S))
        except ray.exceptions.GetTimeoutError:
            asked = place.group or " ".join(f"{n} {a:g}" for n, a in place.resources.items())
            words = f"Ray has found no place for {asked} within {PLACED_S + LISTENS_S:g} s"
        except ray.exceptions.RayError as error:
            words = str(error).strip().rpartition("\n")[2]
        self.close()
        raise ConfigError(f"{RAY_SCHEME}://{place.address}: {words}")

    def close(self) -> None:
        """End what runs, and disconnect. Idempotent."""
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None
        self._ray.shutdown()

    def _bundle(self) -> Mapping[str, float]:
        """The resources reserved for it. Raises ConfigError."""
        for group in self._ray.util.placement_group_table().values():
            if group["name"] == self._place.group and group["state"] != "REMOVED":
                return dict(group["bundles"][self._place.bundle])
        raise ConfigError(f"Ray has no placement group {self._place.group}")

    def _strategy(self) -> dict[str, Any]:
        if not self._place.group:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found = self._ray.util.get_placement_group(self._place.group)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(found, self._place.bundle)}


class _ListenerOnNode(ListenerActor):
    """An actor that determines its node's address."""

    def __init__(self, tls: str, arguments: Sequence[str]) -> None:
        import ray

        super().__init__(tls, ray.util.get_node_ip_address(), arguments)
