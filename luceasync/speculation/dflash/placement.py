"""Which drafter a config asks for, where it runs, and what memory it needs there.

Refuses draft options that cannot be honoured. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luceasync.config import Config
from luceasync.errors import ConfigError, PlacementError
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec, Shape
from luceasync.pipeline.capacity import DraftFootprint
from luceasync.pipeline.devices import default_device, find_devices, has_backend
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.discovery import (
    OWN_BIN,
    BackendProgram,
    describe_devices,
    executable,
)
from luceasync.pipeline.report import PlanReport, devices_of, plan_report
from luceasync.pipeline.shard_plan import check_devices
from luceasync.speculation.choice import RoundShape, shapes_for
from luceasync.speculation.dflash.draft_config import (
    adjusted,
    read_draft_spec,
    refuse_without_drafter,
)
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.draft_spec import DraftSpec, MatrixBytes
from luceasync.speculation.lookup import lookup_shapes
from luceasync.speculation.mtp import mtp_of

DDTREE_BUDGET = 22
DEVICE, BIN = "--draft-device", "--draft-ipc-bin"
DRAFTERS = -1  # the process of a drafter, beside those of the target


@dataclass(frozen=True, slots=True)
class DFlashPlacement:
    """A drafter to load: its spec, its device, the shapes of its rounds, largest first, and the
    program that runs it; None: this process.
    """

    draft_dir: Path
    spec: DraftSpec
    device: Offer
    shapes: tuple[RoundShape, ...]
    program: Path | None = None

    @property
    def verify_rows(self) -> tuple[int, ...]:
        """The numbers of rows of its proposals."""
        return tuple(shape.num_rows for shape in self.shapes)

    def footprint(self, target: ModelSpec, precision: Precision) -> DraftFootprint:
        """Its bytes beside the target, as network and ring allocate them."""
        encodings = DraftFiles(self.draft_dir).encodings(self.spec)

        def matrix_bytes(name: str, shape: Shape) -> int:
            return encodings[name].num_bytes(shape, precision)

        return footprint_of(self.spec, self.device, target, precision.weight_bytes, matrix_bytes)


def drafter_of(
    config: Config, target: ModelSpec, target_devices: Sequence[Offer]
) -> DFlashPlacement | None:
    """The drafter of the config; None: it names none. Raises ConfigError."""
    asked, draft_dir = config.draft, config.drafter_dir
    if draft_dir is None:
        return None
    spec = adjusted(
        read_draft_spec(draft_dir, target),
        block=asked.block,
        swa_window_tokens=asked.swa_window_tokens,
        ctx_max_tokens=asked.ctx_max_tokens,
    )
    program = None if asked.ipc_bin is None else executable(asked.ipc_bin, BIN)
    if program is None:
        device = _device_here(asked.device, target_devices)
    else:
        device = device_of(program, asked.device, target_devices)
    budget = (asked.ddtree_budget or DDTREE_BUDGET) if asked.ddtree else None
    return DFlashPlacement(draft_dir, spec, device, shapes_for(spec.block, budget), program)


def copied_shapes(
    config: Config, drafter: DFlashPlacement | None, target_devices: Sequence[Offer]
) -> tuple[RoundShape, ...]:
    """The rounds of proposals that are copied from the text: of as many rows as the chains of the
    drafter, whose passes are there already; none if the config wants none. Raises ConfigError for
    flags that contradict each other.
    """
    if not _drafts_copies(config, target_devices):
        return ()
    if drafter is None:
        return lookup_shapes()
    return lookup_shapes([shape.block for shape in drafter.shapes if shape.budget is None])


def _drafts_copies(config: Config, target_devices: Sequence[Offer]) -> bool:
    """Whether proposals are copied from the text itself. Left open, they are where all of a step is
    the host's work, beside which a search takes little.
    """
    draft = config.draft
    if (draft.draft_dir, draft.lookup) in (("none", "on"), ("lookup", "off")):
        raise ConfigError(
            f"--draft-lookup {draft.lookup}: not allowed with --draft {draft.draft_dir}; expected "
            "only one of them"
        )
    if draft.draft_dir == "none" or draft.lookup == "off":
        return False
    if draft.draft_dir == "lookup" or draft.lookup == "on":
        return True
    return not any(device.runs_async for device in target_devices)


def _device_here(asked: str | None, target_devices: Sequence[Offer]) -> Offer:
    """The named device of this process; by default that of the target's last layers here."""
    here = [device for device in target_devices if device.is_here]
    if asked is None and here:
        return here[-1]
    [name] = check_devices([asked or default_device()], DEVICE)
    if not has_backend(name):
        raise PlacementError(
            f"{DEVICE} {name}: this torch build and machine have no such devices; {BIN} names a "
            f"{OWN_BIN} that has"
        )
    [found] = find_devices([name], DEVICE)
    return next((device for device in here if device.name == found.name), found)


def device_of(program: Path, asked: str | None, target_devices: Sequence[Offer]) -> Offer:
    """The named device of a process that `program` runs; by default that of the target's last
    layers.
    """
    names = [target_devices[-1].name] if asked is None else check_devices([asked], DEVICE)
    [found] = describe_devices(BackendProgram(program), names, BIN, DEVICE)
    return replace(found, process=DRAFTERS)


def plan_with_drafter(
    config: Config, model: ModelFiles | None = None
) -> tuple[PlanReport, DFlashPlacement | None]:
    """The plan of model and drafter together; a head of the model's own is told by `mtp_of`. Raises
    ConfigError.
    """
    model = model or ModelFiles(config.model.model_dir)
    spec = model.spec
    devices, precision = devices_of(config)
    drafter = drafter_of(config, spec, devices)
    mtp = mtp_of(config, model, devices, precision)
    if drafter is None:
        refuse_without_drafter(config.draft, has_mtp=mtp is not None)
    copied_rows = [shape.num_rows for shape in copied_shapes(config, drafter, devices)]
    if config.kvflash.pool_tokens is not None:
        _check_policy(config, drafter)
    if drafter is not None:
        rows, footprint = drafter.verify_rows, drafter.footprint(spec, precision)
    elif mtp is not None:
        rows, footprint = mtp.verify_rows, mtp.footprint(precision)
    else:
        rows, footprint = (), None
    report = plan_report(
        config,
        model,
        verify_rows=(*rows, *copied_rows),
        drafter=footprint,
        found=(devices, precision),
    )
    return report, None if drafter is None else _beside(report.plan, drafter)


def _check_policy(config: Config, drafter: DFlashPlacement | None) -> None:
    """Refuse a drafter that cannot choose resident chunks, since it does not see all of them."""
    if config.kvflash.policy != "drafter":
        return
    if drafter is not None and drafter.program is not None:
        raise PlacementError(
            f"--kvflash-policy drafter: not with {BIN}, which runs the drafter in another process"
        )
    spec = None if drafter is None else drafter.spec
    layers = range(spec.num_layers) if spec else ()
    if spec is None or all(_limit(spec, layer, 1) is not None for layer in layers):
        found = "there is no drafter" if drafter is None else f"{drafter.draft_dir} has none"
        raise PlacementError(
            "--kvflash-policy drafter: a drafter with a layer that sees the whole context is "
            f"expected, {found}"
        )


def _beside(plan: Plan, drafter: DFlashPlacement) -> DFlashPlacement:
    """The drafter, limited to the resident part of a lane, unless it has another limit."""
    pool, spec = plan.pool, drafter.spec
    if pool is None or pool.policy == "drafter" or spec.ctx_max_tokens is not None:
        return drafter
    spec = adjusted(spec, ctx_max_tokens=plan.num_pages * CHUNK_TOKENS)
    return replace(drafter, spec=spec)


def footprint_of(
    spec: DraftSpec,
    device: Offer,
    target: ModelSpec,
    element_bytes: int,
    matrix_bytes: MatrixBytes | None = None,
) -> DraftFootprint:
    """Weights, and the context's keys and values and the ring of features, which grow with a lane's
    context if a layer sees all of it.
    """
    kv_bytes = 2 * spec.attention.kv_dim * element_bytes  # of one layer and token
    token_bytes = lane_bytes = 0
    limits = [_limit(spec, layer, target.max_positions) for layer in range(spec.num_layers)]
    for limit in limits:
        token_bytes += kv_bytes if limit is None else 0
        lane_bytes += kv_bytes * (limit or 0)
    # What chooses tokens of a drafter elsewhere is in the host's memory.
    chooses = spec.selector_bytes(element_bytes, matrix_bytes) if device.is_here else 0
    feature_bytes = spec.feature_size * element_bytes
    if None in limits:
        token_bytes += feature_bytes
    else:
        lane_bytes += feature_bytes * max(limit for limit in limits if limit is not None)
    return DraftFootprint(
        device=device,
        weight_bytes=spec.weight_bytes(element_bytes, matrix_bytes) + chooses,
        token_bytes=token_bytes,
        lane_bytes=lane_bytes,
    )


def ring_capacity(spec: DraftSpec, max_ctx_tokens: int) -> int:
    """Tokens of a lane whose features are kept: as many as any layer sees."""
    return max(spec.capacity(layer, max_ctx_tokens) for layer in range(spec.num_layers))


def _limit(spec: DraftSpec, layer: int, max_positions: int) -> int | None:
    """Tokens that a layer sees at most; None: the whole context."""
    bounded = spec.layers[layer].window is not None or spec.ctx_max_tokens is not None
    return spec.capacity(layer, max_positions) if bounded else None
