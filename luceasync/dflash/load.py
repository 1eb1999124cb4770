"""From a planned drafter to a speculator: the network, its ring of features, and the target's ends.

Runs in the engine thread; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.dflash.decode import Speculator
from luceasync.dflash.draft import DraftNetwork, open_network
from luceasync.dflash.features import FeatureRing, FeatureSpec
from luceasync.dflash.graph import Graphs, Runner, run_eagerly
from luceasync.dflash.passes import DraftPasses
from luceasync.dflash.placement import Drafter, ring_capacity
from luceasync.target.backend import LayerSplitBackend
from luceasync.target.devices import torch_device
from luceasync.target.plan import Plan
from luceasync.target.shard import DTYPES, ops_for
from luceasync.target.transfer import choose_transfer


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """What was loaded; `close` lets the weights go."""

    speculator: Speculator
    ring: FeatureRing
    close: Callable[[], None]


@torch.inference_mode()
def load_draft(
    drafter: Drafter,
    plan: Plan,
    backend: LayerSplitBackend,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> LoadedDraft:
    """The drafter beside a loaded target, whose taps are the drafter's; `advance` hears the bytes
    of each tensor. Raises ModelError.
    """
    device = torch_device(drafter.device.name)
    devices = [device, *(torch_device(shard.device) for shard in plan.shards), device]
    transfer = choose_transfer(plan.peer_access, devices)

    def embed(tokens: Tensor) -> Tensor:
        return transfer(backend.embed(tokens), device)

    network: DraftNetwork = open_network(
        drafter.draft_dir,
        drafter.spec,
        ops_for(device)[0],
        embed,
        num_lanes=plan.parallel,
        max_ctx_tokens=plan.max_ctx_tokens,
        dtype=DTYPES[plan.dtype],
        device=device,
        advance=advance,
    )
    ring = FeatureRing(
        FeatureSpec(drafter.spec.taps, drafter.spec.hidden_size),
        num_lanes=plan.parallel,
        capacity_tokens=ring_capacity(drafter.spec, plan.max_ctx_tokens),
        dtype=DTYPES[plan.dtype],
        device=device,
        transfer=transfer,
    )
    with ExitStack() as closing:
        closing.callback(network.close)
        run: Runner = run_eagerly
        if device.type != "cpu" and set(devices) == {device}:  # a graph is of one device
            run = Graphs(device)
            closing.callback(run.close)
        passes = DraftPasses(network, ring, backend, transfer, run)
        speculator = Speculator(backend, passes, drafter.shapes, plan.parallel)
        return LoadedDraft(speculator, ring, closing.pop_all().close)
