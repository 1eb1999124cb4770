"""A backend that runs a drafter.

Owns network, ring of features, and memory for nodes. Knows no target but the width of its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from luceasync.backend.dispatch import Dispatcher, handlers_of, handles
from luceasync.backend.draft_handlers import (
    DraftHandlers,
    LentRows,
    OwnRows,
    RowHandlers,
    RowMemory,
    SentEmbedding,
)
from luceasync.backend.stage import lent_memory
from luceasync.ipc.wiring import ParentConnection
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.devices import host_memory, page_lock_for
from luceasync.pipeline.platform import open_platform
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.draft import draft_ops_on, open_network
from luceasync.speculation.dflash.graph import NUM_WARM_UPS
from luceasync.speculation.dflash.load import ring_of, runner_on
from luceasync.speculation.dflash.passes import LocalDraft

log = logging.getLogger(__name__)


class DraftBackend:
    """The work of one process, from its greeting to its end."""

    def __init__(self, parent: ParentConnection, draft_dir: Path, names: Mapping[str, str]) -> None:
        """`names`: the devices that are offered under other names than their own."""
        self._parent = parent
        self._draft_dir = draft_dir
        self._names = names
        self._closing = ExitStack()
        self._dispatcher = Dispatcher(parent.channel)
        self._dispatcher.handlers |= handlers_of(self)

    @torch.inference_mode()
    def run(self) -> None:
        """Run commands. Raises ChannelClosed when the parent is gone."""
        self._dispatcher.serve()

    def close(self) -> None:
        """Free everything."""
        self._closing.close()
        self._parent.close()

    @handles(wire.LoadDraft)
    def load(self, command: wire.LoadDraft, tensors: list[Tensor]) -> None:
        del self._dispatcher.handlers[wire.LoadDraft]  # once
        [mask] = tensors
        self._dispatcher.load(lambda advance: self._load(command, mask, advance))

    def _load(self, command: wire.LoadDraft, mask: Tensor, advance: Callable[[int], None]) -> None:
        if command.has_one_thread:
            torch.set_num_threads(1)
        name = self._names.get(command.device, command.device)
        platform = open_platform(name)
        self._parent.channel.register(page_lock_for([name]))
        embedding = SentEmbedding(mask, command.num_lanes, platform.device)
        memory = self._row_memory(name, command)
        network = open_network(
            self._draft_dir,
            replace(command.spec, mask_token=embedding.mask_token),
            platform.ops,
            embedding.embed,
            num_lanes=command.num_lanes,
            max_ctx_tokens=command.max_ctx_tokens,
            dtype=torch_dtype(command.dtype),
            device=platform.device,
            advance=advance,
            choose=draft_ops_on(platform),
        )
        self._closing.callback(network.close)
        run = runner_on(platform)
        self._closing.callback(run.close)
        draft: LocalDraft[Tensor] = LocalDraft(
            network,
            ring_of(network, platform, command.num_lanes, command.max_ctx_tokens),
            lambda rows, anchors, budget: rows,  # the target's head is not here
            run=run,
            reach_for=network.reach_for,
            short_rows=command.short_rows,
        )
        platform.warm_up(lambda: draft.warm_up(command.shapes), NUM_WARM_UPS)
        self._dispatcher.sizes = command.sizes
        handlers = DraftHandlers(draft, embedding, command, memory)
        self._dispatcher.handlers |= handlers_of(handlers)
        log.info("a drafter of %d layers is loaded", command.spec.num_layers)

    def _row_memory(self, name: str, command: wire.LoadDraft) -> RowMemory:
        """Memory that was lent, or else our own, about which there are commands."""
        lent = lent_memory(self._parent, [name])
        if lent is not None:
            return LentRows(lent, command.sizes.row_bytes)
        memory = host_memory([name], command.node_bytes)
        self._closing.callback(memory.close)
        rows = OwnRows(memory)
        self._dispatcher.handlers |= handlers_of(RowHandlers(rows, command.sizes))
        return rows
