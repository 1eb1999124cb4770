"""What a backend's process does that has a drafter; luceasync.backend.serving is of one that has a
stage.

Owns network, ring of features and memory for nodes. Knows no target but the width of its rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luceasync.backend.draft_orders import (
    AsRows,
    DraftOrders,
    LentRows,
    OwnRows,
    RowMemory,
    RowOrders,
    SentRows,
)
from luceasync.backend.serving import Order, Progress, Wire, lent_memory, obey, say_how_it_went
from luceasync.ipc.channel import Received
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import Home
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.devices import host_memory, pinned_by
from luceasync.pipeline.platform import Platform, open_platform
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.draft import DraftNetwork, draft_ops_on, open_network
from luceasync.speculation.dflash.graph import NUM_WARM_UPS
from luceasync.speculation.dflash.load import ring_of, runner_on
from luceasync.speculation.dflash.passes import LocalDraft

log = logging.getLogger(__name__)


class Drafting:
    """One process's work, from its greeting to its end."""

    def __init__(self, home: Home, draft_dir: Path, names: Mapping[str, str]) -> None:
        """`names`: the devices that are offered under other names than their own."""
        self._home = home
        self._wire = Wire(home)
        self._draft_dir = draft_dir
        self._names = names
        self._closing = ExitStack()
        self._orders: dict[type[Message], Order] = {wire.LoadDraft: self._load}

    @torch.inference_mode()
    def run(self) -> None:
        """Do as is said. Raises ChannelClosed when the other end is gone."""
        obey(self._wire, self._orders)

    def close(self) -> None:
        """Let everything go."""
        self._closing.close()
        self._home.close()

    def _load(self, order: wire.LoadDraft, got: Received[Any]) -> None:
        del self._orders[wire.LoadDraft]
        sizes = wire.DraftSizes(order.spec, order.dtype)
        [mask] = self._wire.given(got, [sizes.hidden_rows()])
        say_how_it_went(self._wire, lambda: self._open(order, mask))

    def _open(self, order: wire.LoadDraft, mask: Tensor) -> None:
        if order.has_one_thread:
            torch.set_num_threads(1)
        name = self._names.get(order.device, order.device)
        platform = open_platform(name)
        self._home.channel.register(pinned_by([name]))
        embedding = SentRows(mask, order.num_lanes, platform.device)
        memory = self._row_memory(name, order)
        network = self._network(order, embedding, platform)
        self._closing.callback(network.close)
        run = runner_on(platform)
        self._closing.callback(run.close)
        draft: LocalDraft[Tensor] = LocalDraft(
            network,
            ring_of(network, platform, order.num_lanes, order.max_ctx_tokens),
            AsRows(),
            run=run,
            reach_for=network.reach_for,
            short_rows=order.short_rows,
        )
        platform.warm_up(lambda: draft.warm_up(order.shapes), NUM_WARM_UPS)
        self._orders |= DraftOrders(self._wire, draft, embedding, order, memory).table
        log.info("a drafter of %d layers is loaded", order.spec.num_layers)

    def _network(
        self, order: wire.LoadDraft, embedding: SentRows, platform: Platform
    ) -> DraftNetwork:
        progress = Progress(self._wire)
        network = open_network(
            self._draft_dir,
            replace(order.spec, mask_token=embedding.mask_token),
            platform.ops,
            embedding.embed,
            num_lanes=order.num_lanes,
            max_ctx_tokens=order.max_ctx_tokens,
            dtype=torch_dtype(order.dtype),
            device=platform.device,
            advance=progress.advance,
            choose=draft_ops_on(platform),
        )
        progress.tell()
        return network

    def _row_memory(self, name: str, order: wire.LoadDraft) -> RowMemory:
        """What was lent, else our own, about which there are orders."""
        sizes = wire.DraftSizes(order.spec, order.dtype)
        lent = lent_memory(self._home, [name])
        if lent is not None:
            return LentRows(lent, sizes.row_bytes)
        memory = host_memory([name], order.node_bytes)
        self._closing.callback(memory.close)
        rows = OwnRows(memory)
        self._orders |= RowOrders(self._wire, rows, sizes).table
        return rows
