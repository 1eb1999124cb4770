"""A drafter's process over its lives: used while it is there, restarted in a thread if it is lost.

Owns what it is started with, and why there is none. Only the first start is waited for. Knows no
pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from luceasync.errors import DraftFailed, LuceasyncError
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.agreement import draft_states_of, dtype_words
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.process import (
    Advance,
    BackendProcess,
    ProcessSpec,
    share_node_memory,
    share_rings,
    whole_bytes,
)
from luceasync.pipeline.remote.tensors import PIECE_BYTES
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.features import FeatureSpec, LaneSpans
from luceasync.speculation.dflash.placement import DFlashPlacement, ring_capacity
from luceasync.status import ProcessStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "the drafter"
LEAST_S = 10.0  # of a call's deadline: kernels may have to be compiled first
JOIN_S = 30.0
CHUNK_BYTES = 16 << 20  # of the rows of a prompt that go in one message
CHUNK_ROWS = 64  # whose multiples they are


class DraftProcessResources:
    """What a drafter's process gets whenever it is started: its program, rings, and memory for
    nodes.
    """

    def __init__(
        self, drafter: DFlashPlacement, program: Path, plan: Plan, transport: str, node_bytes: int
    ) -> None:
        """`program`: what runs it; `node_bytes`: of memory for nodes of model and drafter. Raises
        ConfigError.
        """
        spec, precision = drafter.spec, plan.precision
        self.sizes = wire.DraftSizes(spec, precision.compute, plan.parallel, plan.max_ctx_tokens)
        self.spec = FeatureSpec(spec.taps, spec.hidden_size)
        self.capacity_tokens = ring_capacity(spec, plan.max_ctx_tokens)
        self._drafter = drafter
        self._plan = plan
        self._states = draft_states_of(drafter.draft_dir, dtype_words(precision))
        self._process: BackendProcess | None = None
        self._closing = ExitStack()
        try:
            self._allocate(program, transport, node_bytes)
        except BaseException:
            self.close()
            raise

    def _allocate(self, program: Path, transport: str, node_bytes: int) -> None:
        plan, row_bytes = self._plan, self.sizes.row_bytes
        token_bytes = sum(shard.token_bytes for shard in plan.shards)
        self._node_bytes = whole_bytes(node_bytes * row_bytes / (token_bytes + row_bytes))
        sizes = ring_bytes(self.sizes)
        rings = share_rings(transport, sizes, plan, self._closing)
        lanes_bytes = plan.parallel * self.capacity_tokens * row_bytes
        self.arena, lent = share_node_memory(rings, self._node_bytes, lanes_bytes, self._closing)
        name = f"drafter on {self._drafter.device.name}"
        self._launcher = LocalLauncher(Program(program, name, sizes, rings=rings, lent=lent))
        self._closing.callback(self._launcher.close)

    def process(self, stopping: threading.Event) -> BackendProcess:
        """A process that may be started and lost. `stopping`: see SupervisedProcess."""
        directory = str(self._drafter.draft_dir.absolute())
        spec = ProcessSpec(
            name=NAME,
            devices=[self._drafter.device.name],
            arguments=["--draft-dir", directory, "--dtype", self._states["dtype"]],
            states=lambda: self._states,
            answers=wire.ANSWERS,
            sizes=self.sizes,
            failure=DraftFailed,
            least_s=LEAST_S,
        )
        self._process = BackendProcess(spec, self._launcher, self.arena, stopping)
        return self._process

    @property
    def load_command(self) -> wire.LoadDraft:
        """What the process is told first."""
        drafter, plan = self._drafter, self._plan
        device = drafter.device
        weight_bytes = drafter.spec.weight_bytes(plan.precision.weight_bytes)
        return wire.LoadDraft(
            described=wire.describe(drafter.spec),
            device=device.name,
            dtype=plan.precision.compute,
            shapes=drafter.shapes,
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
            short_rows=device.short_rows,
            has_one_thread=weight_bytes < device.one_thread_bytes,
            node_bytes=self._node_bytes,
        )

    @property
    def status(self) -> ProcessStatus:
        """The state of the process. Any thread may ask."""
        process = self._process
        status = ProcessStatus(NAME, ()) if process is None else process.status
        return replace(status, is_waited_for=False)

    def close(self) -> None:
        """End the process, and free all memory. Idempotent."""
        self._closing.close()


@dataclass(slots=True)
class DraftLife:
    """A process that has loaded the drafter, and what is known of it. `num_unsettled`: see
    luceasync.speculation.dflash.graph.Runner.
    """

    connection: BackendConnection
    spans: LaneSpans
    num_unsettled: int = 0


class DraftProcess:
    """Engine thread only, but for `off_reason`."""

    def __init__(
        self,
        process: BackendProcess,
        start: Callable[[Advance], DraftLife],
        stopping: threading.Event,
    ) -> None:
        """`start` opens `process`, which waits for `stopping`; that is set here at the end."""
        self._process = process
        self._start = start
        self._stopping = stopping
        self._fresh: DraftLife | None = None  # started by the thread, and not taken up yet
        self._thread: threading.Thread | None = None
        self.life: DraftLife | None = None  # what is there now
        self.off_reason: str | None = None  # why there is none; any thread may ask

    @classmethod
    def of(cls, resources: DraftProcessResources, mask: Tensor) -> DraftProcess:
        """The process of a drafter. `mask`: the mask token's row of the target's embedding."""
        stopping = threading.Event()
        process = resources.process(stopping)

        def start(advance: Advance) -> DraftLife:
            connection = process.open(resources.load_command, [mask], advance)
            spans = LaneSpans(resources.sizes.num_lanes, resources.capacity_tokens)
            return DraftLife(connection, spans)

        return cls(process, start, stopping)

    def open(self, advance: Advance) -> None:
        """Start it for the first time. Raises ModelError, DraftFailed, and what `advance` does."""
        self.life = self._start(advance)

    def run(self, work: Callable[[DraftLife], T], otherwise: T) -> T:
        """The result of `work`, or `otherwise` if there is no process, or it fails meanwhile."""
        if self.life is None:
            return otherwise
        try:
            return work(self.life)
        except DraftFailed as error:
            self._lose(error)
            return otherwise

    def refresh(self) -> None:
        """Let go of a process that is known to be gone, and take up one that has been started."""
        self.run(lambda life: life.connection.raise_if_failed(), None)
        if self.life is None and self._fresh is not None:
            self.life, self._fresh = self._fresh, None
            self.off_reason = None
            log.warning("%s is back", NAME)

    def check_alive(self) -> None:
        """Ask for a sign of life."""
        self.refresh()
        self.run(lambda life: life.connection.check_alive(), None)

    def close(self) -> None:
        """End it. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.life = self._fresh = None
        self._process.stop()

    def _lose(self, error: DraftFailed) -> None:
        self.life = None
        self.off_reason = f"{NAME} is gone: {error.headline}"
        log.error("%s is gone, and lanes decode plainly: %s", NAME, error.headline)
        self._process.failed(str(error))
        name = f"starts {NAME}"
        self._thread = threading.Thread(target=self._restart, name=name, daemon=True)
        self._thread.start()

    def _restart(self) -> None:
        """Retry in the thread until it has started or is no longer wanted."""
        while not self._stopping.is_set():
            try:
                self._process.stop()
                self._process.wait()
                self._fresh = self._start(self._advance)
            except Exception as error:
                if not self._stopping.is_set():
                    reason = error.headline if isinstance(error, LuceasyncError) else error
                    log.error("%s could not be restarted: %s", NAME, reason)
            else:
                return

    def _advance(self, num_bytes: int) -> None:
        if self._stopping.is_set():
            raise DraftFailed("it is no longer wanted")


def ring_bytes(sizes: wire.DraftSizes) -> tuple[int, int]:
    """Bytes of the rings to the drafter and from it: two pieces of a prompt or of what several
    lanes have accepted, and two proposals.
    """
    least = max(CHUNK_ROWS, sizes.block) * sizes.row_bytes  # what always goes in one message
    anchors = sizes.num_lanes * sizes.hidden * sizes.dtype.itemsize
    to = max(CHUNK_BYTES, least, PIECE_BYTES, anchors)
    back = max(PIECE_BYTES, sizes.block * anchors)
    return 2 * to + (1 << 20), 2 * back + (1 << 20)
