"""The plan command: the bytes of a model on these devices, before anything is loaded.

Owns the table and the JSON. Knows nothing of how a plan is made.
"""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from luceasync.cli.words import size_text
from luceasync.config import Config
from luceasync.target.report import PlanReport, ShardReport, plan_report


def run_plan(config: Config, as_json: bool) -> None:
    """Print the plan. Raises ModelError, and PlacementError when it does not fit."""
    report = plan_report(config)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(summary(report))).decode())
    else:
        _print(report, Console(highlight=False))


def summary(report: PlanReport) -> dict[str, object]:
    """The report in plain words and numbers; all sizes in bytes or tokens."""
    plan, spec = report.plan, report.spec
    return {
        "family": spec.family,
        "num_parameters": spec.num_parameters,
        "num_layers": spec.num_layers,
        "dtype": plan.dtype,
        "parallel": plan.parallel,
        "max_ctx_tokens": plan.max_ctx_tokens,
        "prefill_chunk_tokens": plan.prefill_chunk_tokens,
        "shards": [_shard_summary(shard) for shard in report.shards],
        "reasons": list(plan.reasons),
    }


def _shard_summary(report: ShardReport) -> dict[str, object]:
    shard = report.shard
    return {
        "device": shard.device,
        "begin": shard.begin,
        "end": shard.end,
        "weight_bytes": shard.weight_bytes,
        "lane_bytes_per_token": shard.token_bytes,
        "state_bytes_per_lane": shard.lane_state_bytes,
        "lane_bytes": report.lane_bytes,
        "workspace_bytes": shard.workspace_bytes,
        "device_bytes": report.device_bytes,
        "free_bytes": report.free_bytes,
    }


def _print(report: PlanReport, console: Console) -> None:
    plan, spec = report.plan, report.spec
    console.print(
        f"{spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters in {plan.dtype}; "
        f"{plan.parallel} lanes of {plan.max_ctx_tokens} tokens"
    )
    table = Table()
    table.add_column("device")
    for column in ("layers", "weights", "one lane", "lanes", "workspace", "in all", "free"):
        table.add_column(column, justify="right")
    for shard in report.shards:
        table.add_row(*_row(shard, plan.parallel))
    console.print(table)
    for reason in plan.reasons:
        console.print(f"- {reason}", markup=False)


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
