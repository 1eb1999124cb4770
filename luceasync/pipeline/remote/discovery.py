"""Which devices run in other processes, what runs these, and what the devices offer.

The choice is pure; describing devices starts each backend once, which ends when it has answered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from luceasync.config import PlacementConfig
from luceasync.errors import ChannelClosed, PlacementError
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.pipeline.devices import find_devices, has_backend, offers_of, share_host_memory
from luceasync.pipeline.offer import BACKENDS, HERE, Offer
from luceasync.pipeline.remote import wire

BIN = "--target-shard-ipc-bin"
OWN_BIN = "luceasync-backend"
ASKING_S = 120.0  # a process imports torch, and finds its devices
RING_BYTES = (1 << 16, 1 << 16)
END_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The process of each device, and what runs each process but this one."""

    of_devices: tuple[int, ...]
    programs: Mapping[int, Path]


def choose_processes(
    names: Sequence[str],
    placement: PlacementConfig,
    is_here: Callable[[str], bool],
    own: Path | None,
) -> ProcessPlan:
    """Assign the devices `names` to processes. Neighbours of one backend share one. `is_here`:
    whether this process has devices of that kind; `own`: the program for those if none is named.
    Raises PlacementError.
    """
    bins = _named_bins(placement.ipc_bins)
    always = placement.ipc == "always"
    remote = [
        (always and i > 0) or (not is_here(n) and _bin(n, bins) is not None)
        for i, n in enumerate(names)
    ]
    kinds = [(_kind(n) if away else None) for n, away in zip(names, remote, strict=True)]
    processes: list[int] = []
    programs: dict[int, Path] = {}
    for kind, neighbours in groupby(kinds):
        number = HERE
        if kind is not None:
            number = len(programs) + 1
            programs[number] = _program(kind, bins, own if is_here(kind) else None)
        processes += [number] * len(list(neighbours))
    _refuse_unused(bins, kinds)
    return ProcessPlan(tuple(processes), programs)


def _named_bins(texts: Sequence[str]) -> dict[str | None, Path]:
    """Programs by backend; None: of all others."""
    bins: dict[str | None, Path] = {}
    for text in texts:
        head, equals, tail = text.partition("=")
        kind = head if equals and "/" not in head else None
        path = tail if kind is not None else text
        if kind is not None and kind not in BACKENDS:
            raise PlacementError(
                f"{BIN} {text}: {kind!r} is not a backend; expected one of {', '.join(BACKENDS)}"
            )
        if not path:
            raise PlacementError(f"{BIN} {text}: no path; expected [BACKEND=]PATH")
        if kind in bins:
            others = kind or "all other backends"
            raise PlacementError(f"{BIN} {text}: a second program for {others}; one is expected")
        bins[kind] = Path(path).expanduser().absolute()
    return bins


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _bin(name: str, bins: Mapping[str | None, Path]) -> Path | None:
    return bins.get(_kind(name), bins.get(None))


def _program(kind: str, bins: Mapping[str | None, Path], own: Path | None) -> Path:
    path = _bin(kind, bins) or own
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


def _refuse_unused(bins: Mapping[str | None, Path], kinds: Sequence[str | None]) -> None:
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
    path: Path, names: Sequence[str], flag: str = BIN, of_names: str = "--target-devices"
) -> tuple[Offer, ...]:
    """Have the backend that `path` runs describe its devices. Raises PlacementError in its words;
    `flag` named the program, and `of_names` the devices.
    """
    program = Program(path, path.name, RING_BYTES)
    launcher = LocalLauncher(program, on_line=lambda line: None)
    try:
        started = launcher.launch((), wire.ANSWERS)
        try:
            greet(started.channel, Statement(), ASKING_S)
            command = wire.OfferDevices(tuple(names), of_names)
            number = started.channel.send(command, deadline_s=ASKING_S)
            got = started.channel.receive(ASKING_S)
        except ChannelClosed as error:
            words = " ".join(f"{error}; {started.last_words()}".split())
            raise PlacementError(f"{flag} {path}: no answer: {words}") from None
        finally:
            started.end(0.0, END_S)
    finally:
        launcher.close()
    match got.message:
        case wire.Offers(offers) if tuple(o.name for o in offers) == tuple(names):
            return offers
        case wire.CommandFailure(words) if got.answers == number:
            raise PlacementError(f"{words} ({path})")
        case other:
            raise PlacementError(f"{flag} {path}: it answered with {type(other).__name__}")
