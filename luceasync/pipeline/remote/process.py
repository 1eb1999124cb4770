"""A backend process over all its lives, and the memory of this process that it maps.

What stages and drafters in other processes have in common: how they are started, loaded and
restarted. Owns nothing that ends with one life.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from luceasync.errors import ChannelClosed, ConfigError, LuceasyncError, ModelError
from luceasync.host_cache.arena import Arena, NoPageLock
from luceasync.ipc.channel import Launcher, Statement
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.packets import Message
from luceasync.ipc.supervised import LEAST_S, Backoff, SupervisedProcess
from luceasync.ipc.wiring import Rings, open_rings
from luceasync.pipeline.devices import page_lock_for
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.answers import CommandFailure, LoadProgress, Result
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.wire import NODES, Command
from luceasync.status import ProcessStatus

Advance = Callable[[int], None]

START_S = 120.0  # until a process has imported what it needs
SILENCE_S = 300.0  # of a process that reads weights
ALIGN_BYTES = 2 << 20  # of memory for nodes
SLAB_BYTES = 32 << 20  # of it, whose pages are allocated at a time
SPARE_BYTES = 256 << 20  # of it, with pages that are not in use yet


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process is called, is started with, and must agree on. `states` reads that anew for
    each start; `failure` makes the error of a process that is gone; `least_s`: see CallDeadlines.
    """

    name: str
    devices: Sequence[str]
    arguments: Sequence[str]
    states: Callable[[], Mapping[str, str]]
    answers: Sequence[type[Message]]
    sizes: Any
    failure: Callable[[str], LuceasyncError]
    least_s: float = LEAST_S


class BackendProcess(SupervisedProcess):
    """A process that loads layers or a drafter whenever it is started."""

    def __init__(
        self,
        spec: ProcessSpec,
        launcher: Launcher,
        arena: Arena | None,
        stopping: threading.Event,
        backoff: Backoff | None = None,
    ) -> None:
        """`arena` gives out memory that was lent for nodes; `stopping`, `backoff`: see
        SupervisedProcess.
        """
        super().__init__(launcher, spec.name, spec.devices, stopping, backoff, spec.least_s)
        self.spec = spec
        self._arena = arena

    def open(
        self, load: Command, tensors: Sequence[Tensor] = (), advance: Advance = lambda _: None
    ) -> BackendConnection:
        """Start it and have it load; `advance` hears the bytes that are read. Raises ModelError,
        the spec's failure, and what `advance` raises; the process has ended then.
        """
        spec = self.spec
        try:
            life = self.start(spec.arguments, spec.answers, Statement(spec.states()), START_S)
        except ChannelClosed as error:
            raise spec.failure(str(error)) from None
        connection = BackendConnection(life, spec.sizes, spec.failure)
        try:
            connection.send(load, tensors)
            _wait_for_load(connection, advance)
        except Exception as error:
            self.failed(str(error))
            self.stop()
            raise
        self.arrived()
        return connection

    @property
    def status(self) -> ProcessStatus:
        """See SupervisedProcess; with the bytes of its nodes. Any thread may ask."""
        used_bytes = 0 if self._arena is None else self._arena.used_bytes
        return replace(super().status, node_bytes=used_bytes)


def _wait_for_load(connection: BackendConnection, advance: Advance) -> None:
    """Raise ModelError in the words of the process."""
    while True:
        match connection.receive(SILENCE_S):
            case LoadProgress(num_bytes):
                advance(num_bytes)
            case CommandFailure(words):
                raise ModelError(words)
            case Result():
                return
            case other:
                connection.fail(f"it said {type(other).__name__} while it loaded")


def share_rings(
    transport: str, ring_bytes: Sequence[int], plan: Plan, closing: ExitStack
) -> Rings | None:
    """Rings for payloads, pinned for the plan's devices of this process; None if payloads go as
    bytes. `closing` closes them. Raises ConfigError.
    """
    rings = open_rings(transport, ring_bytes)
    if rings is not None:
        closing.callback(rings.close)
        here = [device.name for device in plan.devices if device.is_here]
        rings.memory.register(page_lock_for(here))
    return rings


def share_node_memory(
    rings: Rings | None, num_bytes: int, lanes_bytes: int, closing: ExitStack
) -> tuple[Arena | None, dict[str, SealedMemory]]:
    """Memory for nodes, and what to lend a process of it; none if payloads are not shared either.
    `lanes_bytes`: of all lanes, twice as much of which has pages before it is needed. `closing`
    closes it. Raises ConfigError if the system shares no memory.
    """
    if rings is None:
        return None, {}
    try:
        memory = SealedMemory.create("luceasync-nodes", num_bytes, populate=False)
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-memory: no {num_bytes} bytes can be shared with another process "
            f"({error.strerror}); --ipc-transport stream shares none"
        ) from None
    closing.callback(memory.close)
    never = threading.Event()  # pages are allocated when they are needed, not while nothing runs
    spare_bytes = max(SPARE_BYTES, 2 * lanes_bytes)
    arena = Arena(num_bytes, NoPageLock(), SLAB_BYTES, never, spare_bytes, mapping=memory.mapping)
    closing.callback(arena.close)
    return arena, {NODES: memory}


def whole_bytes(num_bytes: float) -> int:
    """Enough for so many bytes, in whole pages of any kind."""
    return -(-int(num_bytes) // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES
