"""Loads a planned drafter, in this process or another one, and joins it with a target.

Runs in the engine thread; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from luceasync.host_cache.arena import HostMemory, PlainMemory
from luceasync.models.encodings import WeightPlacement
from luceasync.models.loader import TensorSource
from luceasync.models.precision import torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capture import Capture
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Platform, open_platform
from luceasync.pipeline.transfer import Transfer, choose_transfer, direct
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.attention_probe import DraftAttentionProbe
from luceasync.speculation.dflash.dflash2 import CandidateSelector, selecting_head
from luceasync.speculation.dflash.draft import DraftNetwork, draft_ops_on, open_network
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.feature_contents import FeatureContents, LocalFeatures
from luceasync.speculation.dflash.features import FeatureRing, FeatureSpec
from luceasync.speculation.dflash.graph import NUM_WARM_UPS, EagerRunner, GraphRunner, Runner
from luceasync.speculation.dflash.passes import LocalDraft
from luceasync.speculation.dflash.placement import DFlashPlacement, ring_capacity
from luceasync.speculation.dflash.process import DraftProcess, DraftProcessResources
from luceasync.speculation.dflash.remote import RemoteDraft
from luceasync.speculation.dflash.remote_features import remote_features
from luceasync.speculation.dflash.weights import read_selector
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.mtp import MtpPasses, MtpPlacement
from luceasync.speculation.mtp_network import DraftVocabulary, HeadReader, MtpNetwork, read_mtp
from luceasync.speculation.speculator import Speculator


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded drafter; `close` frees the weights."""

    speculator: Speculator
    features: FeatureContents[Any]
    attention_probe: DraftAttentionProbe | None  # None: the drafter is in another process
    close: Callable[[], None]


@torch.inference_mode()
def start_draft(
    resources: DraftProcessResources,
    drafter: DFlashPlacement,
    plan: Plan,
    backend: LayerSplitBackend,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> LoadedDraft:
    """As `load_draft`, in a process of its own. Raises ModelError, DraftFailed."""
    mask = backend.embed(torch.tensor([drafter.spec.mask_token]))[0].cpu()
    process = DraftProcess.of(resources, mask)
    process.open(advance)
    features = remote_features(process, resources)
    capacity_tokens = resources.capacity_tokens
    # Its rows come to the host.
    host, dtype = open_platform("cpu"), torch_dtype(plan.precision.compute)
    selector = selector_on(host, drafter, dtype)
    head = _head_of(backend, selector, direct)
    passes = RemoteDraft(process, backend, resources.spec, resources.sizes, capacity_tokens, head)
    speculator = Speculator(backend, [BlockDrafter(passes, drafter.shapes)], plan.parallel)
    return LoadedDraft(speculator, features, None, process.close)


@torch.inference_mode()
def load_draft(
    drafter: DFlashPlacement,
    plan: Plan,
    backend: LayerSplitBackend,
    advance: Callable[[int], None] = lambda num_bytes: None,
    memory: HostMemory | None = None,
) -> LoadedDraft:
    """Load the drafter in this process, for a loaded target with its taps; `advance` hears the
    bytes of each tensor, `memory` is for features of nodes. Raises ModelError.
    """
    platform = open_platform(drafter.device.name)
    transfer = _transfer_to(platform, plan)

    def embed(tokens: Tensor) -> Tensor:
        return transfer(backend.embed(tokens), platform.device)

    network = open_network(
        drafter.draft_dir,
        drafter.spec,
        platform.ops,
        embed,
        num_lanes=plan.parallel,
        max_ctx_tokens=plan.max_ctx_tokens,
        dtype=torch_dtype(plan.precision.compute),
        device=platform.device,
        advance=advance,
        choose=draft_ops_on(platform),
        transfer=platform.row_transfer(),
    )
    selector = selector_on(platform, drafter, network.dtype)
    shapes = drafter.shapes
    return join(network, drafter.device, shapes, plan, backend, memory, selector=selector)


@torch.inference_mode()
def load_mtp(
    mtp: MtpPlacement,
    plan: Plan,
    backend: LayerSplitBackend,
    open_source: Callable[[], AbstractContextManager[TensorSource]],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Speculator, Callable[[], None]]:
    """Load the head that the model of `open_source` drafts with, for the loaded model with its tap.
    What is returned beside it frees the weights. Raises ModelError.
    """
    platform, spec = open_platform(mtp.device.name), mtp.spec
    transfer = _transfer_to(platform, plan)

    def embed(tokens: Tensor) -> Tensor:
        return transfer(backend.embed(tokens), platform.device)

    def choose(hidden: Tensor, lanes: Tensor) -> Tensor:
        proposal = backend.propose_from(hidden, lanes, None)
        return transfer(proposal.tokens[:, 1], platform.device)

    with ExitStack() as opened:
        source = opened.enter_context(open_source())
        rows = opened.enter_context(closing(platform.row_transfer()))
        dtype = torch_dtype(plan.precision.weights)
        place = WeightPlacement(platform.ops, platform.device, dtype, rows)
        weights, vocabulary = read_mtp(source, spec, place, advance), None
        place.findings.raise_fault()
        if mtp.head_rows:  # more of its rows are read as prompts come
            read_rows = HeadReader(source, spec, place)
            vocabulary = DraftVocabulary(read_rows, mtp.head_rows, num_lanes=plan.parallel)
        network = MtpNetwork(
            spec,
            weights,
            embed,
            vocabulary or choose,
            draft_ops_on(platform),
            num_lanes=plan.parallel,
            max_ctx_tokens=plan.max_ctx_tokens,
        )
        opened.callback(network.close)
        is_beside = plan.is_all_on(mtp.device)
        run = runner_on(platform) if is_beside else EagerRunner()
        opened.callback(run.close)
        passes = MtpPasses(
            network,
            plan.parallel,
            transfer,
            run,
            mtp.device.short_rows,
            platform,
            vocabulary,
            is_beside=is_beside,
        )
        platform.warm_up(lambda: passes.warm_up(mtp.shapes, plan.verify_rows), NUM_WARM_UPS)
        speculator = Speculator(backend, [BlockDrafter(passes, mtp.shapes)], plan.parallel)
        return speculator, opened.pop_all().close


@torch.inference_mode()
def join(
    network: DraftNetwork,
    device: Offer,
    shapes: Sequence[RoundShape],
    plan: Plan,
    backend: LayerSplitBackend,
    memory: HostMemory | None = None,
    *,
    selector: CandidateSelector | None = None,
) -> LoadedDraft:
    """Join a network on `device`, which is owned from now on, with a target that has its taps."""
    platform = open_platform(device.name)
    with ExitStack() as opened:
        opened.callback(network.close)
        is_beside = plan.is_all_on(device)  # a graph is of one device
        run = runner_on(platform) if is_beside else EagerRunner()
        opened.callback(run.close)
        passes = LocalDraft(
            network,
            ring_of(network, platform, plan.parallel, plan.max_ctx_tokens),
            _head_of(backend, selector, _transfer_to(platform, plan)),
            _transfer_to(platform, plan),
            run,
            network.reach_for,
            device.short_rows,
            is_beside=is_beside,
        )
        platform.warm_up(lambda: passes.warm_up(shapes), NUM_WARM_UPS)
        speculator = Speculator(backend, [BlockDrafter(passes, shapes)], plan.parallel)
        features = LocalFeatures(passes, memory or PlainMemory())
        probe = DraftAttentionProbe(network, passes.ring)
        return LoadedDraft(speculator, features, probe, opened.pop_all().close)


def selector_on(
    platform: Platform, drafter: DFlashPlacement, dtype: torch.dtype
) -> CandidateSelector | None:
    with closing(platform.row_transfer()) as rows:
        place = WeightPlacement(platform.ops, platform.device, dtype, rows)
        return read_selector(DraftFiles(drafter.draft_dir), drafter.spec, place)


def _head_of(
    backend: LayerSplitBackend, selector: CandidateSelector | None, transfer: Transfer
) -> Callable[[Tensor, Tensor, int | None], Proposal]:
    """What makes proposals of a drafter's rows: the target's head, or what chooses among its best
    tokens.
    """
    if selector is None:
        return backend.propose_from
    return selecting_head(selector, backend.candidates_from, transfer)


def ring_of(
    network: DraftNetwork, platform: Platform, num_lanes: int, max_ctx_tokens: int
) -> FeatureRing:
    """An empty ring for the network."""
    spec = network.spec
    return FeatureRing(
        FeatureSpec(spec.taps, spec.hidden_size),
        num_lanes=num_lanes,
        capacity_tokens=ring_capacity(spec, max_ctx_tokens),
        dtype=network.dtype,
        platform=platform,
    )


def runner_on(platform: Platform) -> Runner:
    """How to run passes of one device."""

    def eager() -> Runner:
        return EagerRunner()

    def captured(capture: Capture) -> Runner:
        return GraphRunner(capture)

    return platform.passes(eager=eager, captured=captured)


def _transfer_to(platform: Platform, plan: Plan) -> Transfer:
    """Copies between the target's devices of this process and the draft's."""
    names = [platform.name, *(shard.device for shard in plan.here), platform.name]
    devices = [open_platform(name).device for name in names]
    return choose_transfer(plan.peer_access, devices)
