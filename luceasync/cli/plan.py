"""The plan command: the memory that a model needs on these devices, before anything is loaded.

Owns the table and the JSON. Plans are made in pipeline/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from luceasync.cli.output import count_text, plain_table, print_json, print_plain, size_text
from luceasync.config import CacheConfig, Config
from luceasync.engine.cache_directory import held_bytes_of, limits_of
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.files import ModelFiles
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.report import PlanReport, ShardReport
from luceasync.speculation.dflash.placement import DFlashPlacement, plan_with_drafter
from luceasync.speculation.mtp import NAME as MTP_NAME
from luceasync.speculation.mtp import MtpPlacement, mtp_of


@dataclass(frozen=True, slots=True)
class _PlannedDrafter:
    """What drafts, by its name in `--draft`."""

    placement: DFlashPlacement | MtpPlacement
    name: str
    ctx_max_tokens: int | None = None


def run_plan(config: Config, as_json: bool, model: ModelFiles | None = None) -> None:
    """Print the plan. Raises ConfigError, and PlacementError if it does not fit."""
    model = model or ModelFiles(config.model.model_dir)
    report, drafter = plan_with_drafter(config, model)
    mtp = mtp_of(config, model, report.plan.devices, report.plan.precision)
    planned = None
    if drafter is not None:
        planned = _PlannedDrafter(drafter, str(drafter.draft_dir), drafter.spec.ctx_max_tokens)
    elif mtp is not None:
        planned = _PlannedDrafter(mtp, MTP_NAME)
    cache = cache_summary(report, config.cache)
    if as_json:
        values = summary(report) | {"drafter": _drafter_summary(report, planned)}
        values["prefix_cache"] = cache
        print_json(values)
        return
    _print(report)
    if planned is not None:
        _print_drafter(report, planned)
    _print_cache(cache, config.cache)


def cache_summary(report: PlanReport, config: CacheConfig) -> dict[str, int | None]:
    """Sizes of the prefix cache; `disk_bytes` None: no directory. A node takes `bytes_per_token`
    for each of its tokens, and `state_bytes` if a state is kept at its end.
    """
    limits = limits_of(config, held_bytes_of(config.cache_dir))
    return {
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": limits.disk_bytes,
        "bytes_per_token": sum(shard.token_bytes for shard in report.plan.shards),
        "state_bytes": sum(shard.lane_state_bytes for shard in report.plan.shards),
    }


def summary(report: PlanReport) -> dict[str, object]:
    """The model's plan as JSON values; sizes in bytes or tokens."""
    plan, spec = report.plan, report.spec
    return {
        "family": spec.family,
        "num_parameters": spec.num_parameters,
        "num_layers": spec.num_layers,
        "dtype": plan.precision.compute,
        "parallel": plan.parallel,
        "max_ctx_tokens": plan.max_ctx_tokens,
        "prefill_chunk_tokens": plan.prefill_chunk_tokens,
        "kvflash": _pool_summary(plan),
        "shards": [_shard_summary(shard) for shard in report.shards],
        "reasons": list(plan.reasons),
    }


def _pool_summary(plan: Plan) -> dict[str, object] | None:
    """How much of a lane's context stays on the devices; None: all of it. `host_bytes` is the host
    memory that all lanes may take.
    """
    if plan.pool is None:
        return None
    return {
        "pool_tokens": plan.num_pages * CHUNK_TOKENS,
        "policy": plan.pool.policy,
        "tau_tokens": plan.pool.tau_tokens,
        "host_bytes": plan.host_bytes,
    }


def _shard_summary(report: ShardReport) -> dict[str, object]:
    shard = report.shard
    return {
        "device": shard.device,
        "begin": shard.begin,
        "end": shard.end,
        "weight_bytes": shard.weight_bytes,
        "weight_types": report.weight_types,
        "lane_bytes_per_token": shard.token_bytes,
        "state_bytes_per_lane": shard.lane_state_bytes,
        "verify_bytes_per_lane": shard.lane_scratch_bytes,
        "ring_bytes_per_lane": shard.lane_ring_bytes,
        "expert_slots": shard.expert_slots,
        "expert_host_bytes": shard.expert_bytes,
        "lane_bytes": report.lane_bytes,
        "workspace_bytes": shard.workspace_bytes,
        "device_bytes": report.device_bytes,
        "free_bytes": report.free_bytes,
    }


def _drafter_summary(
    report: PlanReport, drafter: _PlannedDrafter | None
) -> dict[str, object] | None:
    if drafter is None or report.drafter is None:
        return None
    return {
        "draft_dir": drafter.name,
        "device": drafter.placement.device.name,
        "block": max(shape.block for shape in drafter.placement.shapes),
        "weight_bytes": report.drafter.weight_bytes,
        "lane_bytes_per_token": report.drafter.token_bytes,
        "state_bytes_per_lane": report.drafter.lane_bytes,
    }


def _print(report: PlanReport) -> None:
    plan, spec = report.plan, report.spec
    print_plain(
        f"{spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters "
        f"in {plan.precision.compute}; "
        f"{count_text(plan.parallel, 'lane')} of {plan.max_ctx_tokens} tokens"
    )
    columns = ("layers", "weights", "one lane", "lanes", "workspace", "total", "free")
    table = plain_table("device", *columns, names=("device",))
    for shard in report.shards:
        table.add_row(*_row(shard, plan.parallel))
    print_plain(table)
    print_plain(f"- weights: {_types_words(report.shards)}")
    if plan.pool is not None:
        print_plain(
            f"- {plan.num_pages * CHUNK_TOKENS} tokens of each lane stay on the devices (policy "
            f"{plan.pool.policy}); all lanes may take {size_text(plan.host_bytes)} of host memory",
        )
    for reason in plan.reasons:
        print_plain(f"- {reason}")


def _types_words(shards: Sequence[ShardReport]) -> str:
    """The bytes of each weight type, largest first."""
    found: Counter[str] = Counter()
    for shard in shards:
        found.update(shard.weight_types)
    return ", ".join(f"{size_text(size)} in {words}" for words, size in found.most_common())


def _print_drafter(report: PlanReport, drafter: _PlannedDrafter) -> None:
    assert report.drafter is not None
    num_tokens = min(report.plan.max_ctx_tokens, drafter.ctx_max_tokens or 2**63)
    lane_bytes = report.drafter.lane_bytes + num_tokens * report.drafter.token_bytes
    verify_bytes = sum(shard.lane_scratch_bytes for shard in report.plan.shards)
    placement, weight_bytes = drafter.placement, report.drafter.weight_bytes
    print_plain(
        f"drafter on {placement.device.name}: weights {size_text(weight_bytes)}, one "
        f"lane {size_text(lane_bytes)}; {max(placement.verify_rows)} rows per proposal, "
        f"{size_text(verify_bytes)} per lane to verify them",
    )


def _print_cache(cache: dict[str, int | None], config: CacheConfig) -> None:
    memory_bytes, per_token = cache["memory_bytes"] or 0, cache["bytes_per_token"] or 1
    words = (
        f"prefix cache: {size_text(memory_bytes)} of memory, at most {memory_bytes // per_token}"
    )
    state = f"; {size_text(cache['state_bytes'])} for each state" if cache["state_bytes"] else ""
    print_plain(f"{words} tokens of {size_text(per_token)}{state}")
    if cache["disk_bytes"] is not None:
        print_plain(f"- {size_text(cache['disk_bytes'])} in {config.cache_dir}")


def _row(report: ShardReport, num_lanes: int) -> tuple[str, ...]:
    shard = report.shard
    sizes_bytes = (
        shard.weight_bytes,
        report.lane_bytes,
        num_lanes * report.lane_bytes,
        shard.workspace_bytes,
        report.device_bytes + shard.workspace_bytes,
        report.free_bytes,
    )
    return (shard.device, f"[{shard.begin}, {shard.end})", *map(size_text, sizes_bytes))
