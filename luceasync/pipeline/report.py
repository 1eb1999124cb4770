"""The plan of a configured model on this machine, with the numbers that are shown to users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from luceasync.config import Config
from luceasync.host_cache.arena import node_bytes_of
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capacity import DraftFootprint, Pool, PoolRequest
from luceasync.pipeline.devices import default_device
from luceasync.pipeline.expert_plan import ExpertRequest
from luceasync.pipeline.offer import Offer, default_dtype
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.remote.discovery import offers_in, processes_of
from luceasync.pipeline.shard_plan import ShardPlan, named_devices, weight_types


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard's plan and its device's free memory."""

    shard: ShardPlan
    weight_types: dict[str, int]  # bytes by the name of their number type
    lane_bytes: int
    device_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What would be built; nothing is loaded."""

    spec: ModelSpec
    plan: Plan
    shards: tuple[ShardReport, ...]
    drafter: DraftFootprint | None


def devices_of(config: Config) -> tuple[tuple[Offer, ...], Precision]:
    """The target's devices and number types. Raises PlacementError."""
    placement = config.placement
    names = named_devices(placement.device, placement.devices) or (default_device(),)
    devices = offers_in(names, processes_of(names, placement))
    dtype = default_dtype(devices) if config.model.dtype == "auto" else config.model.dtype
    return devices, Precision.of(dtype)


def pool_request(config: Config) -> PoolRequest | None:
    """How much of each lane's context stays on the devices; None: all of it."""
    asked = config.kvflash
    if asked.pool_tokens is None:
        return None
    num_tokens = None if asked.pool_tokens == "auto" else asked.pool_tokens
    host_bytes = node_bytes_of(config.cache.memory_bytes)
    return PoolRequest(num_tokens, Pool(asked.policy, asked.tau_tokens, asked.pins), host_bytes)


def expert_request(config: Config) -> ExpertRequest | None:
    """Which experts stay in host memory; None: none."""
    asked = config.placement.expert_bytes
    if asked is None:
        return None
    num_bytes = None if asked == "auto" else asked
    return ExpertRequest(num_bytes, psutil.virtual_memory().available)


def plan_report(
    config: Config,
    model: ModelFiles | None = None,
    *,
    verify_rows: Sequence[int] = (),
    drafter: DraftFootprint | None = None,
    found: tuple[tuple[Offer, ...], Precision] | None = None,
) -> PlanReport:
    """Plan the configured model; for `verify_rows` and `drafter` see `make_plan`. `found`: the
    result of `devices_of`, which is called if None. Raises ModelError, PlacementError."""
    model = model or ModelFiles(config.model.model_dir)
    spec = model.spec
    placement = config.placement
    devices, precision = found or devices_of(config)
    if model.has_weights:  # a plan does not need them
        model.weights.check(spec.shapes())
        model.weights.check_unused(spec.shapes() | dict.fromkeys(spec.unread, ()))
    encoding_of = model.weights.encoding
    plan = make_plan(
        spec,
        devices,
        precision=precision,
        weights=placement.layer_split,
        parallel=config.engine.parallel,
        max_ctx_tokens=config.engine.max_ctx_tokens,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
        peer_access=placement.peer_access,
        verify_rows=verify_rows,
        drafter=drafter,
        encoding_of=encoding_of,
        pool=pool_request(config),
        experts=expert_request(config),
    )
    shards = tuple(
        ShardReport(
            shard,
            weight_types(spec, shard.begin, shard.end, precision, encoding_of),
            plan.lane_bytes(shard),
            plan.device_bytes(shard),
            device.free_bytes,
        )
        for shard, device in zip(plan.shards, devices, strict=True)
    )
    return PlanReport(spec, plan, shards, drafter)
