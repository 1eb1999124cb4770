"""From a planned drafter to a speculator: the network, its ring of features, and the target's ends.

Runs in the engine thread; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from luceasync.dflash.adapt import Shape
from luceasync.dflash.decode import Speculator
from luceasync.dflash.draft import DraftNetwork, open_network
from luceasync.dflash.features import FeatureRing, FeatureSpec
from luceasync.dflash.graph import Eagerly, Graphs, Runner
from luceasync.dflash.passes import DraftPasses
from luceasync.dflash.placement import Drafter, ring_capacity
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import torch_device
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.shard import ops_for
from luceasync.pipeline.shard_plan import SHORT_ROWS
from luceasync.pipeline.transfer import Transfer, choose_transfer


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
    transfer = _transfer_to(device, plan)

    def embed(tokens: Tensor) -> Tensor:
        return transfer(backend.embed(tokens), device)

    network = open_network(
        drafter.draft_dir,
        drafter.spec,
        ops_for(device),
        embed,
        num_lanes=plan.parallel,
        max_ctx_tokens=plan.max_ctx_tokens,
        dtype=torch_dtype(plan.precision.compute),
        device=device,
        advance=advance,
    )
    return join(network, drafter.shapes, plan, backend)


@torch.inference_mode()
def join(
    network: DraftNetwork, shapes: Sequence[Shape], plan: Plan, backend: LayerSplitBackend
) -> LoadedDraft:
    """A network, which is owned from now on, and a target with its taps, made to speculate."""
    spec, device = network.spec, network.device
    transfer = _transfer_to(device, plan)
    with ExitStack() as closing:
        closing.callback(network.close)
        ring = FeatureRing(
            FeatureSpec(spec.taps, spec.hidden_size),
            num_lanes=plan.parallel,
            capacity_tokens=ring_capacity(spec, plan.max_ctx_tokens),
            dtype=network.dtype,
            device=device,
        )
        run: Runner = Eagerly()
        on_one = all(torch_device(shard.device) == device for shard in plan.shards)
        if device.type != "cpu" and on_one:  # a graph is of one device
            run = Graphs(device)
            closing.callback(run.close)
        short_rows = () if device.type == "cpu" else SHORT_ROWS
        passes = DraftPasses(network, ring, backend, transfer, run, network.reach_for, short_rows)
        if device.type != "cpu":
            passes.warm_up(shapes)
        speculator = Speculator(backend, passes, shapes, plan.parallel)
        return LoadedDraft(speculator, ring, closing.pop_all().close)


def _transfer_to(device: torch.device, plan: Plan) -> Transfer:
    """How tensors come from the target's devices to the draft's, and back."""
    targets = [torch_device(shard.device) for shard in plan.shards]
    return choose_transfer(plan.peer_access, [device, *targets, device])
