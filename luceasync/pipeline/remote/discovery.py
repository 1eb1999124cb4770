"""Which devices run in other processes, what runs these, and what the devices offer.

The choice is pure; describing devices starts each backend once, which ends when it has answered.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from luceasync.config import PlacementConfig
from luceasync.errors import ChannelClosed, ConfigError, PlacementError
from luceasync.ipc.certificates import tls_context
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.ray_launcher import RAY_SCHEME, parse_ray_url
from luceasync.ipc.tcp import SCHEME, Address, parse_url
from luceasync.pipeline.devices import find_devices, has_backend, offers_of, share_host_memory
from luceasync.pipeline.offer import BACKENDS, HERE, Offer, backend_of, machine_of
from luceasync.pipeline.remote import answers, wire

BIN, TLS = "--target-shard-ipc-bin", "--target-shard-tls"
OWN_BIN = "luceasync-backend"
ASKING_S = 120.0  # a process imports torch, and finds its devices
RING_BYTES = (1 << 16, 1 << 16)
END_S = 10.0
REFUSED = f"{OWN_BIN}: "  # before the last line of one that ends with status 2
MACHINE = re.compile(r"[a-z0-9][a-z0-9-]*")


@dataclass(frozen=True, slots=True)
class BackendProgram:
    """What runs a process of other devices. `address`: of the machine that has them, whose process
    `executable` brings here; `said`: how the user named it.
    """

    executable: Path
    arguments: tuple[str, ...] = ()
    address: Address | None = None
    said: str = ""

    def __str__(self) -> str:
        return self.said or str(self.executable)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The process of each device, and what runs each process but this one."""

    of_devices: tuple[int, ...]
    programs: Mapping[int, BackendProgram]


def choose_processes(
    names: Sequence[str],
    placement: PlacementConfig,
    is_here: Callable[[str], bool],
    own: Path | None,
) -> ProcessPlan:
    """Assign the devices `names` to processes. Neighbours of one backend and machine share one.
    `is_here`: whether this process has devices of that kind; `own`: the program for those if none
    is named, and for those of other machines. Raises PlacementError.
    """
    bins = _named_bins(placement.ipc_bins)
    links = {kind: _link(kind, url, placement.ipc_tls, own) for kind, url in _urls(bins)}
    always = placement.ipc == "always"
    remote = [
        (always and i > 0 and not machine_of(n)) or (not is_here(n) and _bin(n, bins) is not None)
        for i, n in enumerate(names)
    ]
    kinds = [(_kind(n) if away else None) for n, away in zip(names, remote, strict=True)]
    processes: list[int] = []
    programs: dict[int, BackendProgram] = {}
    for kind, neighbours in groupby(kinds):
        number = HERE
        if kind is not None:
            number = len(programs) + 1
            programs[number] = links.get(kind) or BackendProgram(
                _program(kind, bins, own if is_here(kind) else None)
            )
        processes += [number] * len(list(neighbours))
    _refuse_unused(bins, kinds)
    return ProcessPlan(tuple(processes), programs)


def _named_bins(texts: Sequence[str]) -> dict[str | None, str]:
    """Programs by backend, and URLs of listeners by BACKEND@MACHINE; None: of all others here."""
    bins: dict[str | None, str] = {}
    for text in texts:
        head, equals, tail = text.partition("=")
        kind = head if equals and "/" not in head else None
        path = tail if kind is not None else text
        backend, at, machine = (kind or "").partition("@")
        if kind is not None and backend not in BACKENDS:
            raise PlacementError(
                f"{BIN} {text}: {backend!r} is not a backend; expected one of {', '.join(BACKENDS)}"
            )
        if at and not MACHINE.fullmatch(machine):
            raise PlacementError(
                f"{BIN} {text}: {machine!r} is not a machine's name; expected lower-case letters, "
                "digits and hyphens"
            )
        if bool(at) != path.startswith((f"{SCHEME}://", f"{RAY_SCHEME}://")):
            raise PlacementError(
                f"{BIN} {text}: expected BACKEND@MACHINE={SCHEME}://HOST:PORT for another machine, "
                f"{RAY_SCHEME}://HOST:PORT?GPU=1 for one of Ray's, [BACKEND=]PATH for this one"
            )
        if not path:
            raise PlacementError(f"{BIN} {text}: no path; expected [BACKEND=]PATH")
        if kind in bins:
            others = kind or "all other backends"
            raise PlacementError(f"{BIN} {text}: a second program for {others}; one is expected")
        bins[kind] = path if at else str(Path(path).expanduser().absolute())
    return bins


def _urls(bins: Mapping[str | None, str]) -> list[tuple[str, str]]:
    return [(kind, url) for kind, url in bins.items() if kind is not None and "@" in kind]


def _link(kind: str, url: str, tls: Path | None, own: Path | None) -> BackendProgram:
    """The program that brings devices of another machine. Raises PlacementError."""
    said, machine = f"{kind}={url}", kind.partition("@")[2]
    is_ray = url.startswith(f"{RAY_SCHEME}://")
    try:
        address = parse_ray_url(url).address if is_ray else parse_url(url)
    except ConfigError as error:
        raise PlacementError(f"{BIN} {error}") from None
    if tls is None:
        raise PlacementError(
            f"{BIN} {said}: {TLS} FILE is needed too, this machine's file of `luceasync pair`"
        )
    tls_context(tls, TLS, is_server=False)  # refused here, not by a process
    if own is None:
        raise PlacementError(f"{BIN} {said}: there is no {OWN_BIN} beside {sys.executable}")
    there = ("--connect-ray", url) if is_ray else ("--connect", str(address))
    arguments = (*there, "--name", machine, "--tls", str(tls.absolute()))
    return BackendProgram(own, arguments, address, said)


def _kind(name: str) -> str:
    machine, backend = machine_of(name), backend_of(name)
    return f"{backend}@{machine}" if machine else backend


def _bin(name: str, bins: Mapping[str | None, str]) -> str | None:
    kind = _kind(name)
    return bins.get(kind, None if "@" in kind else bins.get(None))


def _program(kind: str, bins: Mapping[str | None, str], own: Path | None) -> Path:
    named = _bin(kind, bins)
    path = own if named is None else Path(named)
    if path is None:
        raise PlacementError(
            f"--target-shard-ipc always: nothing runs {kind} devices in another process; "
            f"name a {OWN_BIN} with {BIN}"
        )
    return executable(path, BIN)


def executable(path: Path, flag: str) -> Path:
    """The absolute path, if it can be run. Raises PlacementError, which names `flag`."""
    path = path.expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise PlacementError(f"{flag} {path}: not an executable file; expected a {OWN_BIN}")
    return path


def _refuse_unused(bins: Mapping[str | None, str], kinds: Sequence[str | None]) -> None:
    """`kinds`: of the devices in other processes; None: in this one."""
    used = {kind if kind in bins else None for kind in kinds if kind is not None}
    for kind, path in bins.items():
        if kind not in used:
            named = f"{kind}={path}" if kind else f"{path}"
            raise PlacementError(
                f"{BIN} {named}: it would run no device; name one in --target-devices that this "
                "process lacks, or set --target-shard-ipc always"
            )


def processes_of(names: Sequence[str], placement: PlacementConfig) -> ProcessPlan:
    """As choose_processes, on this machine. Raises PlacementError."""
    own = Path(sys.executable).with_name(OWN_BIN)
    return choose_processes(names, placement, has_backend, own if own.exists() else None)


def offers_in(names: Sequence[str], processes: ProcessPlan) -> tuple[Offer, ...]:
    """Describe the devices, wherever they are. Raises PlacementError."""
    if not processes.programs:
        return find_devices(names)
    found: list[Offer] = []
    pairs = groupby(zip(names, processes.of_devices, strict=True), key=lambda pair: pair[1])
    for number, named in pairs:
        stage = [name for name, _ in named]
        if number == HERE:
            found += offers_of(stage)
        else:
            asked = describe_devices(processes.programs[number], stage)
            found += [replace(offer, process=number) for offer in asked]
    return share_host_memory(found)


def describe_devices(
    path: BackendProgram, names: Sequence[str], flag: str = BIN, of_names: str = "--target-devices"
) -> tuple[Offer, ...]:
    """Have the backend that `path` runs describe its devices. Raises PlacementError in its words;
    `flag` named the program, and `of_names` the devices.
    """
    program = Program(path.executable, str(path), RING_BYTES, arguments=path.arguments)
    launcher = LocalLauncher(program, on_line=lambda line: None)
    try:
        started = launcher.launch((), answers.ANSWERS)
        try:
            greet(started.channel, Statement(), ASKING_S)
            command = wire.OfferDevices(tuple(names), of_names)
            number = started.channel.send(command, deadline_s=ASKING_S)
            got = started.channel.receive(ASKING_S)
        except ChannelClosed as error:
            said = started.last_words()
            words = " ".join(f"no answer: {error}; {said}".split())
            if (
                path.address is not None and REFUSED in said
            ):  # what the other machine says is enough
                words = " ".join(said.rpartition(REFUSED)[2].split())
            raise PlacementError(f"{flag} {path}: {words}") from None
        finally:
            started.end(0.0, END_S)
    finally:
        launcher.close()
    match got.message:
        case answers.Offers(offers) if tuple(o.name for o in offers) == tuple(names):
            return offers
        case answers.CommandFailure(words) if got.answers == number:
            raise PlacementError(f"{words} ({path})")
        case other:
            raise PlacementError(f"{flag} {path}: it answered with {type(other).__name__}")
