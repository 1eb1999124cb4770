"""The processes of one plan: how each is started, rings between them, and memory for their nodes.

Owns what outlives a process that ends, and is lent to the next one in its place. Engine thread
only.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from luceasync.config import PlacementConfig
from luceasync.errors import ChannelClosed, PlacementError, StageFailed
from luceasync.host_cache.arena import Arena
from luceasync.host_cache.shard_nodes import NodeParts
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.supervised import Heartbeat, Life, Supervised
from luceasync.ipc.wiring import Rings, open_rings
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.devices import find_devices, has_backend, offers_of, pinned_by, shared
from luceasync.pipeline.offer import BACKENDS, HERE, Offer
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote import wire
from luceasync.pipeline.remote.agreement import dtype_words, states_of
from luceasync.pipeline.remote.link import Link
from luceasync.pipeline.remote.nodes import (
    RemoteContents,
    SharedBytes,
    StreamedBytes,
    lend_memory,
    whole_bytes,
)
from luceasync.pipeline.remote.stage import RemotePasses, RemoteStage, load
from luceasync.pipeline.remote.tensors import Sizes
from luceasync.status import NO_PROCESSES, BackendProcesses

HEARTBEAT = Heartbeat()
START_S = 120.0  # until a process has imported what it needs
ELSEWHERE = 1  # whose the other devices are, as each process is told

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Berth:
    """What one stage's process gets, whenever it is started."""

    sizes: Sizes
    parts: NodeParts
    process: Supervised
    node_bytes: int
    arena: Arena | None


class Fleet:
    """Opens the remote stages of a plan, as often as it is asked to, and starts their processes
    again.
    """

    def __init__(
        self,
        model_dir: Path,
        spec: ModelSpec,
        plan: Plan,
        programs: Mapping[int, Path],
        transport: str,
        node_bytes: int,
        stopping: threading.Event | None = None,
    ) -> None:
        """`programs`: what runs each process of the plan; `node_bytes`: of memory for nodes of the
        whole model; `stopping` is set when nobody waits for a process any more. Raises ConfigError.
        """
        self._stopping = stopping or threading.Event()
        self._model_dir = model_dir
        self._plan = plan
        self._opened: dict[int, RemotePasses] = {}
        self._berths: dict[int, _Berth] = {}
        self._closing = ExitStack()
        numbers = [n for n in range(len(plan.stages)) if not self._is_here(n)]
        if not numbers:
            return  # any system will do
        try:
            self._set_out(spec, numbers, programs, transport, node_bytes)
        except BaseException:
            self.close()
            raise

    def open_group(
        self, number: int, advance: Callable[[int], None], taps: Sequence[int]
    ) -> RemoteStage:
        """Start the process of a stage and have it load its layers. Raises ModelError, StageFailed,
        and what `advance` raises; the process has ended then.
        """
        berth = self._berths[number]
        order = wire.Load(self._as_told(number), number, tuple(taps), berth.node_bytes)
        link = Link(self._start(number, order, advance), number)
        passes = RemotePasses(
            link,
            berth.sizes,
            taps,
            before=self._opened.get(number - 1),
            hands_on=number + 1 in self._berths,
            runs_ahead=self._plan.computes_beside,
        )
        self._opened[number] = passes
        return RemoteStage(
            link,
            passes,
            _contents(link, berth),
            len(berth.sizes.shards),
            lambda reason: self._start_again(number, order, reason),
        )

    @property
    def status(self) -> BackendProcesses:
        """Of each process. Any thread may ask."""
        if not self._berths:  # asked at each request
            return NO_PROCESSES
        found = (
            replace(
                berth.process.status,
                node_bytes=0 if berth.arena is None else berth.arena.used_bytes,
            )
            for berth in self._berths.values()
        )
        return BackendProcesses(tuple(found))

    def _start(self, number: int, order: wire.Load, advance: Callable[[int], None]) -> Life:
        """A process that has loaded its layers. Raises as open_group."""
        process, layers = self._berths[number].process, self._berths[number].sizes.layers
        told = f"{layers.start}:{layers.stop}"
        dtype = dtype_words(self._plan.precision)
        given = ["--model-dir", str(self._model_dir.absolute())]
        given += ["--dtype", dtype, "--layers", told]
        statement = Statement(states_of(self._model_dir, dtype, told))
        try:
            life = process.start(given, wire.ANSWERS, statement, START_S)
        except ChannelClosed as error:
            raise StageFailed(number, str(error)) from None
        try:
            load(Link(life, number), order, advance)
            if self._plan.computes_beside:
                life.started.channel.keep_awake()
        except Exception as error:
            process.failed(str(error))
            process.stop()
            raise
        process.arrived()
        return life

    def _start_again(self, number: int, order: wire.Load, reason: str) -> Life:
        process = self._berths[number].process
        process.failed(reason)
        process.stop()  # nothing of it is left when the next one begins
        log.warning("%s", process.status.detail)
        process.wait()
        life = self._start(number, order, lambda num_bytes: None)
        log.warning("stage %d of the model is there again", number)
        return life

    def close(self) -> None:
        """End what still runs, and give all memory back. Idempotent."""
        self._opened.clear()
        self._closing.close()

    def _set_out(
        self,
        spec: ModelSpec,
        numbers: Sequence[int],
        programs: Mapping[int, Path],
        transport: str,
        node_bytes: int,
    ) -> None:
        sizes = {n: Sizes(spec, self._plan, n) for n in numbers}
        parts = {n: self._parts(spec, n) for n in numbers}
        ring_bytes = [size for n in numbers for size in sizes[n].ring_bytes()]
        rings = open_rings(transport, ring_bytes)
        if rings is not None:
            self._closing.callback(rings.close)
            here = [device.name for device in self._plan.devices if device.is_here]
            rings.memory.register(pinned_by(here))
        for place, number in enumerate(numbers):
            share = _share(parts[number], spec, self._plan)
            own_bytes = whole_bytes(node_bytes * share)
            lane_bytes = sum(self._plan.lane_bytes(shard) for shard in sizes[number].shards)
            arena, lent = self._memory(rings, own_bytes, lane_bytes)
            program = Program(
                executable=programs[self._process(number)],
                name=",".join(shard.device for shard in sizes[number].shards),
                ring_bytes=tuple(ring_bytes),
                written=2 * place + 1,
                read=2 * place,
                rings=rings,
                lent=lent,
                heartbeat=HEARTBEAT,
            )
            launcher = LocalLauncher(program)
            self._closing.callback(launcher.close)
            devices = [shard.device for shard in sizes[number].shards]
            name = f"group {number} of the model"  # a label of metrics: dashboards know it
            process = Supervised(launcher, name, devices, self._stopping)
            self._berths[number] = _Berth(sizes[number], parts[number], process, own_bytes, arena)

    def _memory(
        self, rings: Rings | None, num_bytes: int, lane_bytes: int
    ) -> tuple[Arena | None, dict[str, SealedMemory]]:
        """For the nodes of a stage: shared where payloads are, else none of ours."""
        if rings is None:
            return None, {}
        arena, memory = lend_memory(num_bytes, 2 * self._plan.parallel * lane_bytes, self._closing)
        return arena, {wire.NODES: memory}

    def _parts(self, spec: ModelSpec, number: int) -> NodeParts:
        shards = self._plan.shards
        own = {
            i: (shards[i].begin, spec.mixers[shards[i].begin : shards[i].end])
            for i in range(*self._plan.stages[number])
        }
        return NodeParts(own, self._plan.precision.torch_dtype)

    def _process(self, number: int) -> int:
        return self._plan.devices[self._plan.stages[number][0]].process

    def _is_here(self, number: int) -> bool:
        return self._process(number) == HERE

    def _as_told(self, number: int) -> Plan:
        """The plan as the process of a stage is told of it: its own devices are those that are
        here.
        """
        begin, end = self._plan.stages[number]
        devices = tuple(
            replace(device, process=HERE if begin <= i < end else ELSEWHERE)
            for i, device in enumerate(self._plan.devices)
        )
        return replace(self._plan, devices=devices, reasons=())


def _contents(link: Link, berth: _Berth) -> RemoteContents:
    arena, parts = berth.arena, berth.parts
    content = StreamedBytes(link) if arena is None else SharedBytes(parts, arena)
    return RemoteContents(link, parts, content)


def _share(parts: NodeParts, spec: ModelSpec, plan: Plan) -> float:
    """Of a node's bytes, at most: of its rows, or of the state at its end."""
    rows = sum(shard.token_bytes for shard in plan.shards)
    state = sum(shard.lane_state_bytes for shard in plan.shards)
    shares = [parts.sizes.token_bytes / rows if rows else 0.0]
    shares.append(parts.sizes.state_bytes / state if state else 0.0)
    return max(shares)


# Which devices are in processes of their own, what runs these, and what the devices offer. The
# choice is pure; asking starts a process for each backend, which ends when it has answered.


BIN = "--target-shard-ipc-bin"
OWN_BIN = "luceasync-backend"
ASKING_S = 120.0  # a process imports torch, and finds its devices
RING_BYTES = (1 << 16, 1 << 16)
END_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """Of each device its process; and what runs each process but this one."""

    of_devices: tuple[int, ...]
    programs: Mapping[int, Path]


def choose_processes(
    names: Sequence[str],
    placement: PlacementConfig,
    is_here: Callable[[str], bool],
    own: Path | None,
) -> ProcessPlan:
    """Who runs the devices `names`. Neighbours of one backend share a process. `is_here`: whether
    devices of that kind are of this process; `own`: what runs devices of this environment, where
    nothing else is named. Raises PlacementError.
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
    """By backend; None: of all that are not named."""
    bins: dict[str | None, Path] = {}
    for text in texts:
        head, equals, tail = text.partition("=")
        kind = head if equals and "/" not in head else None
        path = tail if kind is not None else text
        if kind is not None and kind not in BACKENDS:
            raise PlacementError(
                f"{BIN} {text}: {kind!r} is no backend; expected one of {', '.join(BACKENDS)}"
            )
        if not path:
            raise PlacementError(f"{BIN} {text}: no path; expected [BACKEND=]PATH")
        if kind in bins:
            whose = kind or "the backends that are not named"
            raise PlacementError(f"{BIN} {text}: a second program for {whose}; one is expected")
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
    """The path, if it may be started. Raises PlacementError, which names `flag`."""
    path = path.expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise PlacementError(f"{flag} {path}: no executable file; expected a {OWN_BIN}")
    return path


def _refuse_unused(bins: Mapping[str | None, Path], kinds: Sequence[str | None]) -> None:
    """`kinds`: of the devices in processes of their own."""
    used = {kind if kind in bins else None for kind in kinds if kind is not None}
    for kind, path in bins.items():
        if kind not in used:
            named = f"{kind}={path}" if kind else f"{path}"
            raise PlacementError(
                f"{BIN} {named}: no device of it is in a process of its own; name one in "
                "--target-devices that this process lacks, or --target-shard-ipc always"
            )


def processes_of(names: Sequence[str], placement: PlacementConfig) -> ProcessPlan:
    """As choose_processes, on this machine. Raises PlacementError."""
    own = Path(sys.executable).with_name(OWN_BIN)
    return choose_processes(names, placement, has_backend, own if own.exists() else None)


def offers_in(names: Sequence[str], processes: ProcessPlan) -> tuple[Offer, ...]:
    """What the devices offer, wherever they are. Raises PlacementError."""
    if not processes.programs:
        return find_devices(names)
    found: list[Offer] = []
    pairs = groupby(zip(names, processes.of_devices, strict=True), key=lambda pair: pair[1])
    for number, named in pairs:
        stage = [name for name, _ in named]
        if number == HERE:
            found += offers_of(stage)
        else:
            asked = ask(processes.programs[number], stage)
            found += [replace(offer, process=number) for offer in asked]
    return shared(found)


def ask(
    path: Path, names: Sequence[str], flag: str = BIN, of_names: str = "--target-devices"
) -> tuple[Offer, ...]:
    """What devices of a backend's process offer, which `path` runs. Raises PlacementError in its
    words; `flag` has named it, and `of_names` the devices.
    """
    program = Program(path, path.name, RING_BYTES)
    launcher = LocalLauncher(program, on_line=lambda line: None)
    try:
        started = launcher.launch((), wire.ANSWERS)
        try:
            greet(started.channel, Statement(), ASKING_S)
            order = wire.Ask(tuple(names), of_names)
            number = started.channel.send(order, deadline_s=ASKING_S)
            got = started.channel.receive(ASKING_S)
        except ChannelClosed as error:
            words = " ".join(f"{error}; {started.last_words()}".split())
            raise PlacementError(f"{flag} {path}: it gives no answer: {words}") from None
        finally:
            started.end(0.0, END_S)
    finally:
        launcher.close()
    match got.message:
        case wire.Offered(offers) if tuple(o.name for o in offers) == tuple(names):
            return offers
        case wire.Failed(words) if got.answers == number:
            raise PlacementError(f"{words} ({path})")
        case other:
            raise PlacementError(f"{flag} {path}: it answered with {type(other).__name__}")
