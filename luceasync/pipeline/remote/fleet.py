"""The stages of one plan that run in other processes: rings between them, and memory for nodes.

Owns what outlives a process that ends, and is lent to the next one in its place. Engine thread
only.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from luceasync.errors import StageFailed, Unavailable
from luceasync.host_cache.arena import Arena
from luceasync.host_cache.nodes import Nodes, NodeStore
from luceasync.host_cache.shard_nodes import NodeLayout
from luceasync.ipc.channel import Traffic
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.supervised import Backoff, Heartbeat
from luceasync.ipc.tcp import Address, is_reachable
from luceasync.models.files import ModelFiles
from luceasync.models.spec import ModelSpec
from luceasync.nodes import NodeKey
from luceasync.pipeline.offer import HERE
from luceasync.pipeline.passes import Passes
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.agreement import ContentDigests, dtype_words, states_of
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.discovery import BackendProgram
from luceasync.pipeline.remote.nodes import RemoteContents, SharedBytes, StreamedBytes
from luceasync.pipeline.remote.passes import RemotePasses
from luceasync.pipeline.remote.process import (
    Advance,
    BackendProcess,
    ProcessSpec,
    share_node_memory,
    share_rings,
    whole_bytes,
)
from luceasync.pipeline.remote.tensors import StageSizes
from luceasync.status import NO_PROCESSES, BackendProcesses

HEARTBEAT = Heartbeat()
CHUNKS_AHEAD = 2  # of a prompt, at another machine: one is computed there while one is on its way
# Of a stage on another machine: it is the link that fails again and again, and not the process.
LINK_BACKOFF = Backoff(longest_s=2.0)
COUNT_S = 1.0  # from asking for what became of experts to asking again
CONNECT_S = 20.0  # to another machine, which may still serve the connection before
PROBE_S, PROBE_PAUSE_S = 1.0, 0.3
ELSEWHERE = 1  # the process of all other devices, in the plan that a process is told

log = logging.getLogger(__name__)


class _Experts:
    """What became of a stage's experts in all lives of its process, asked now and then."""

    def __init__(self, are_in_slots: bool) -> None:
        """`are_in_slots`: they wait in host memory; otherwise there is nothing to ask."""
        self._is_asked = are_in_slots
        self._before = self._own = answers.ExpertCounts(0, 0, 0, 0).by_name
        self._due_s = 0.0

    @property
    def counts(self) -> Mapping[str, int]:
        """See Stage. Any thread."""
        before, own = self._before, self._own
        return {name: before[name] + own[name] for name in before} if self._is_asked else {}

    def ask(self, connection: BackendConnection) -> None:
        """Ask the process, if that is due."""
        if not self._is_asked or (now := time.monotonic()) < self._due_s:
            return
        self._own = connection.ask(wire.CountExperts(), answers.ExpertCounts).by_name
        self._due_s = now + COUNT_S

    def restarted(self) -> None:
        """Count on: the next process begins at 0."""
        if self._is_asked:
            self._before = dict(self.counts)
            self._own = dict.fromkeys(self._before, 0)


class RemoteStage:
    """See Stage. All methods raise StageFailed once the process is gone."""

    def __init__(
        self,
        connection: BackendConnection,
        passes: RemotePasses,
        contents: RemoteContents,
        num_shards: int,
        restart: Callable[[str], BackendConnection],
        *,
        has_slots: bool = False,
    ) -> None:
        """`connection` is owned from now on. `restart`, given the reason, returns a connection to
        another process that has loaded the same layers. `has_slots`: its experts wait in host
        memory there.
        """
        self._connection = connection
        self._passes = passes
        self._contents = contents
        self._nodes = NodeStore(contents)
        self._num_shards = num_shards
        self._restart = restart
        self._experts = _Experts(has_slots)

    @property
    def num_shards(self) -> tuple[int, int]:
        return 0, self._num_shards

    @property
    def passes(self) -> Passes:
        return self._passes

    @property
    def traffic(self) -> Traffic:
        """What has crossed so far."""
        return self._connection.traffic

    def expert_counts(self) -> Mapping[str, int]:
        """See Stage: as the other process has said when it was last asked."""
        return self._experts.counts

    def synchronize(self) -> None:
        self._connection.ask(wire.Synchronize(), answers.Result)

    @property
    def nodes(self) -> Sequence[Nodes]:
        return [self._nodes]

    def raise_if_failed(self) -> None:
        self._connection.raise_if_failed()
        if not self._passes.are_under_way:  # a step of other lanes must not wait for a chunk
            self._experts.ask(self._connection)

    def check_alive(self) -> None:
        self._connection.check_alive()
        self._experts.ask(self._connection)

    def restart_failed(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        """See Stage. Nodes in shared memory stay where they are; the new process adopts them."""
        if self._connection.is_open:
            return False
        self._connection.continue_with(self._restart(self._connection.last_words()).life)
        self._passes.restarted()
        self._experts.restarted()
        lost(self._nodes.sift(self._contents.readopt))
        return True

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class _StageProcess:
    """A stage's process, and what stays the same when it is restarted."""

    process: BackendProcess
    sizes: StageSizes
    parts: NodeLayout
    node_bytes: int
    arena: Arena | None
    address: Address | None  # of the machine that runs it; None: this one


class Fleet:
    """Opens the remote stages of a plan, as often as it is asked to, and restarts their
    processes.
    """

    def __init__(
        self,
        model: ModelFiles,
        plan: Plan,
        programs: Mapping[int, BackendProgram],
        transport: str,
        node_bytes: int,
        stopping: threading.Event | None = None,
    ) -> None:
        """`programs`: what runs each process of the plan; `node_bytes`: of memory for nodes of the
        whole model; `stopping` is set once a restart is no longer wanted. Raises ConfigError.
        """
        self._stopping = stopping or threading.Event()
        self._model = model
        self._plan = plan
        self._opened: dict[int, RemotePasses] = {}
        self._stages: dict[int, _StageProcess] = {}
        self._closing = ExitStack()
        self._digests = ContentDigests()
        numbers = [n for n in range(len(plan.stages)) if self._process_of(n) != HERE]
        if not numbers:
            return  # any system will do
        try:
            self._allocate(model.spec, numbers, programs, transport, node_bytes)
        except BaseException:
            self.close()
            raise

    def open_stage(self, number: int, advance: Advance, taps: Sequence[int]) -> RemoteStage:
        """Start the process of a stage and have it load its layers. Raises ModelError, StageFailed,
        and what `advance` raises; the process has ended then.
        """
        stage = self._stages[number]
        load = wire.LoadStage(self._plan_for(number), number, tuple(taps), stage.node_bytes)
        connection = stage.process.open(load, advance=advance)
        self._stay_awake(connection)
        passes = RemotePasses(
            connection,
            stage.sizes,
            taps,
            before=self._opened.get(number - 1),
            hands_on=number + 1 in self._stages,
            runs_ahead=self._plan.runs_async,
            num_ahead=0 if stage.address is None else CHUNKS_AHEAD,
        )
        self._opened[number] = passes
        arena, parts = stage.arena, stage.parts
        shared = None if arena is None else SharedBytes(parts, arena)
        contents = RemoteContents(
            connection,
            parts,
            shared or StreamedBytes(connection),
            saves_ahead=stage.address is not None and self._is_on_host(number),
        )
        restart = partial(self._restart, number, load)
        shards = stage.sizes.shards
        has_slots = any(shard.expert_slots for shard in shards)
        return RemoteStage(connection, passes, contents, len(shards), restart, has_slots=has_slots)

    def _restart(self, number: int, load: wire.LoadStage, reason: str) -> BackendConnection:
        process = self._stages[number].process
        process.failed(reason)
        process.stop()  # nothing of it is left when the next one begins
        log.warning("%s", process.status.detail.partition(": ")[0])  # why was logged before
        process.wait()
        self._wait_for_machine(self._stages[number].address)
        connection = process.open(load)
        self._stay_awake(connection)
        log.warning("stage %d of the model is back", number)
        return connection

    def _wait_for_machine(self, address: Address | None) -> None:
        """Wait until another machine can be reached: an attempt before would count as a failure,
        and the next one would come late. Raises Unavailable if that is no longer wanted.
        """
        while address is not None and not is_reachable(address, PROBE_S):
            if self._stopping.wait(PROBE_PAUSE_S):
                raise Unavailable("The server is shutting down.")

    def _stay_awake(self, connection: BackendConnection) -> None:
        if self._plan.runs_async:
            connection.life.started.channel.keep_awake()

    @property
    def status(self) -> BackendProcesses:
        """The state of each process. Any thread may ask."""
        if not self._stages:  # asked at each request
            return NO_PROCESSES
        return BackendProcesses(tuple(stage.process.status for stage in self._stages.values()))

    def close(self) -> None:
        """End all processes, and free their memory. Idempotent."""
        self._opened.clear()
        self._closing.close()

    def _allocate(
        self,
        spec: ModelSpec,
        numbers: Sequence[int],
        programs: Mapping[int, BackendProgram],
        transport: str,
        node_bytes: int,
    ) -> None:
        """Rings, memory for nodes, and a process that has not been started, for each stage."""
        plan = self._plan
        sizes = {n: StageSizes(spec, plan, n) for n in numbers}
        ring_bytes = tuple(size for n in numbers for size in sizes[n].ring_bytes())
        are_here = any(programs[self._process_of(n)].address is None for n in numbers)
        rings = share_rings(transport, ring_bytes, plan, self._closing) if are_here else None
        for place, number in enumerate(numbers):
            parts = self._parts(spec, number)
            own_bytes = whole_bytes(node_bytes * _node_share(parts, plan))
            shards = sizes[number].shards
            lanes_bytes = plan.parallel * sum(plan.lane_bytes(shard) for shard in shards)
            runs = programs[self._process_of(number)]
            shared = rings if runs.address is None else None
            arena, lent = share_node_memory(shared, own_bytes, lanes_bytes, self._closing)
            program = Program(
                executable=runs.executable,
                name=",".join(shard.device for shard in shards),
                ring_bytes=ring_bytes,
                written=2 * place + 1,
                read=2 * place,
                rings=shared,
                arguments=runs.arguments if runs.address is None else _in_its_place(runs),
                lent=lent,
                heartbeat=HEARTBEAT,
            )
            launcher = LocalLauncher(program)
            self._closing.callback(launcher.close)
            process_spec = self._process_spec(number, sizes[number], runs.address)
            backoff = Backoff() if runs.address is None else LINK_BACKOFF
            process = BackendProcess(process_spec, launcher, arena, self._stopping, backoff)
            self._stages[number] = _StageProcess(
                process, sizes[number], parts, own_bytes, arena, runs.address
            )

    def _process_spec(self, number: int, sizes: StageSizes, address: Address | None) -> ProcessSpec:
        layers = f"{sizes.layers.start}:{sizes.layers.stop}"
        dtype = dtype_words(self._plan.precision)
        directory = str(self._model.path.absolute())
        return ProcessSpec(
            name=f"group {number} of the model",  # a label of metrics: dashboards know it
            devices=[shard.device for shard in sizes.shards],
            arguments=["--model-dir", directory, "--dtype", dtype, "--layers", layers],
            states=partial(self._states, dtype, layers, by_content=address is not None),
            answers=answers.ANSWERS,
            sizes=sizes,
            failure=partial(StageFailed, number),
        )

    def _states(self, dtype: str, layers: str, *, by_content: bool) -> dict[str, str]:
        """What a process must agree on. Files of two machines have only their content in common."""
        model = self._model
        weights = self._digests.of(model.path, model.weights.paths) if by_content else ""
        return states_of(model, dtype, layers, weights)

    def _parts(self, spec: ModelSpec, number: int) -> NodeLayout:
        shards = self._plan.shards
        own = {
            i: (shards[i].begin, spec.mixers[shards[i].begin : shards[i].end])
            for i in range(*self._plan.stages[number])
        }
        return NodeLayout(own, self._plan.precision.torch_dtype)

    def _process_of(self, number: int) -> int:
        return self._plan.devices[self._plan.stages[number][0]].process

    def _is_on_host(self, number: int) -> bool:
        """Whether a stage computes on CPUs alone: its nodes have whatever memory the system has."""
        devices = self._plan.devices[slice(*self._plan.stages[number])]
        return not any(device.runs_async for device in devices)

    def _plan_for(self, number: int) -> Plan:
        """The plan as a stage's process is told it: its own devices are those that are here."""
        begin, end = self._plan.stages[number]
        devices = tuple(
            replace(device, process=HERE if begin <= i < end else ELSEWHERE)
            for i, device in enumerate(self._plan.devices)
        )
        return replace(self._plan, devices=devices, reasons=())


def _in_its_place(program: BackendProgram) -> tuple[str, ...]:
    """The arguments of a stage on another machine. A new connection for the same place replaces the
    one before, of which that machine may not know yet that it was cut.
    """
    place = secrets.token_hex(8)
    return (*program.arguments, "--place", place, "--patience", f"{CONNECT_S:g}")


def _node_share(parts: NodeLayout, plan: Plan) -> float:
    """A stage's share of a node's bytes at most: of its rows, or of the state at its end."""
    rows = sum(shard.token_bytes for shard in plan.shards)
    state = sum(shard.lane_state_bytes for shard in plan.shards)
    shares = [parts.sizes.token_bytes / rows if rows else 0.0]
    shares.append(parts.sizes.state_bytes / state if state else 0.0)
    return max(shares)
