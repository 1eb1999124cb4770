"""What a drafter's process gets, whenever it is started: its program, rings, memory for nodes.

Owns what outlives a process that ends, and is lent to the next one in its place. Knows no pass.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from luceasync.errors import ChannelClosed, DraftFailed
from luceasync.host_cache.arena import Arena
from luceasync.ipc.channel import Statement
from luceasync.ipc.launcher import LocalLauncher, Program
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.supervised import Supervised
from luceasync.ipc.wiring import open_rings
from luceasync.pipeline.devices import pinned_by
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.agreement import draft_states_of, dtype_words
from luceasync.pipeline.remote.nodes import lend_memory, whole_bytes
from luceasync.pipeline.remote.stage import load
from luceasync.pipeline.remote.wire import NODES
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.feature_contents import FeatureContents
from luceasync.speculation.dflash.features import FeatureSpec, LaneSpans
from luceasync.speculation.dflash.placement import Drafter, ring_capacity
from luceasync.speculation.dflash.remote import (
    NAME,
    Advance,
    DraftLink,
    DraftProcess,
    Loaded,
    ring_bytes,
)
from luceasync.speculation.dflash.remote_features import Drafted, SharedFeatures, StreamedFeatures
from luceasync.status import ProcessStatus

START_S = 120.0  # until a process has imported what it needs
LEAST_S = 10.0  # of a call's deadline: kernels may have to be compiled first


class Berth:
    """Starts the process of a drafter that is to have one. One thread at a time."""

    def __init__(
        self, drafter: Drafter, program: Path, plan: Plan, transport: str, node_bytes: int
    ) -> None:
        """`program`: what runs it; `node_bytes`: of memory for nodes of model and drafter. Raises
        ConfigError.
        """
        spec, precision = drafter.spec, plan.precision
        self.sizes = wire.DraftSizes(spec, precision.compute)
        self.spec = FeatureSpec(spec.taps, spec.hidden_size)
        self._drafter = drafter
        self._plan = plan
        self._states = draft_states_of(drafter.draft_dir, dtype_words(precision))
        self._capacity = ring_capacity(spec, plan.max_ctx_tokens)
        self._supervised: Supervised | None = None
        self._closing = ExitStack()
        try:
            self._arena, self._launcher = self._set_out(program, transport, node_bytes)
        except BaseException:
            self.close()
            raise

    def _set_out(
        self, program: Path, transport: str, node_bytes: int
    ) -> tuple[Arena | None, LocalLauncher]:
        plan, row_bytes = self._plan, self.sizes.row_bytes
        token_bytes = sum(shard.token_bytes for shard in plan.shards)
        self._node_bytes = whole_bytes(node_bytes * row_bytes / (token_bytes + row_bytes))
        sizes = ring_bytes(self.sizes, plan.parallel, self._drafter.spec.block)
        rings = open_rings(transport, sizes)
        arena, lent = None, dict[str, SealedMemory]()
        if rings is not None:
            self._closing.callback(rings.close)
            here = [device.name for device in plan.devices if device.is_here]
            rings.memory.register(pinned_by(here))
            lanes_bytes = plan.parallel * self._capacity * row_bytes
            arena, lent[NODES] = lend_memory(self._node_bytes, 2 * lanes_bytes, self._closing)
        launcher = LocalLauncher(
            Program(
                executable=program,
                name=f"drafter on {self._drafter.device.name}",
                ring_bytes=sizes,
                rings=rings,
                lent=lent,
            )
        )
        self._closing.callback(launcher.close)
        return arena, launcher

    def process(self, stopping: threading.Event) -> Supervised:
        """A process that may be started and lost. `stopping`: see Supervised."""
        devices = [self._drafter.device.name]
        self._supervised = Supervised(self._launcher, NAME, devices, stopping, least_s=LEAST_S)
        return self._supervised

    @property
    def status(self) -> ProcessStatus:
        """Of the process. Any thread may ask."""
        used_bytes = 0 if self._arena is None else self._arena.used_bytes
        of_process = self._supervised
        status = ProcessStatus(NAME, ()) if of_process is None else of_process.status
        return replace(status, node_bytes=used_bytes, is_waited_for=False)

    def start(self, process: Supervised, mask: Tensor, advance: Advance) -> Loaded:
        """A life of the process, which has loaded the drafter. `mask`: the mask token's row of the
        target's embedding. Raises ModelError, DraftFailed, and what `advance` raises; the process
        has ended then.
        """
        given = ["--draft-dir", str(self._drafter.draft_dir.absolute())]
        given += ["--dtype", self._states["dtype"]]
        try:
            life = process.start(given, wire.SAYS, Statement(self._states), START_S)
        except ChannelClosed as error:
            raise DraftFailed(str(error)) from None
        link = DraftLink(life)
        try:
            load(link, self._order(), advance, [mask])
        except Exception as error:
            process.failed(str(error))
            process.stop()
            raise
        process.arrived()
        return Loaded(link, LaneSpans(self._plan.parallel, self._capacity))

    def features(self, process: DraftProcess) -> FeatureContents[Any]:
        """Of nodes, with the process that is started here."""
        drafted = Drafted(process, self.spec, self.sizes, self._capacity)
        if self._arena is None:
            return StreamedFeatures(drafted)
        return SharedFeatures(drafted, self._arena)

    def close(self) -> None:
        """End what still runs, and give all memory back. Idempotent."""
        self._closing.close()

    def _order(self) -> wire.LoadDraft:
        drafter, plan = self._drafter, self._plan
        device = drafter.device
        weight_bytes = drafter.spec.weight_bytes(plan.precision.weight_bytes)
        return wire.LoadDraft(
            spec=drafter.spec,
            device=device.name,
            dtype=plan.precision.compute,
            shapes=drafter.shapes,
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
            short_rows=device.short_rows,
            has_one_thread=weight_bytes < device.one_thread_bytes,
            node_bytes=self._node_bytes,
        )
