"""Runs the warm command's job and prints its report.

Keeping is idempotent, so an interrupted run is simply repeated.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from luceasync.cli.output import count_text, size_text
from luceasync.cli.warm.client import Counters, Outcome, WarmClient, warm
from luceasync.cli.warm.entries import Verify, WarmEntry

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
WRITE_TIMEOUT_S = 600.0  # until nodes in progress have reached the disk


@dataclass(frozen=True, slots=True)
class Job:
    """The entries, and the client that has them kept."""

    entries: list[WarmEntry]
    server: AbstractAsyncContextManager[WarmClient]
    parallel: int
    verify: Verify
    min_tokens: int = 0


def run(job: Job, is_json: bool) -> int:
    """Keep all entries and print the report. Returns the exit code. Raises ConfigError."""
    console = Console(stderr=True, highlight=False)
    outcomes: list[Outcome] = []
    try:
        report = asyncio.run(_run(job, console, outcomes))
    except KeyboardInterrupt:
        console.print(
            f"Interrupted: {len(outcomes)} of {len(job.entries)} prefixes are done; "
            "repeat the command to continue."
        )
        return EXIT_INTERRUPTED
    print(as_json(report) if is_json else as_text(report))
    return 0 if report.is_good else EXIT_FAILED


async def _run(job: Job, console: Console, outcomes: list[Outcome]) -> WarmReport:
    async with job.server as server:
        before, started_s = await server.counters(), time.perf_counter()
        with WarmingBar(console, len(job.entries)) as bar:

            def tell(outcome: Outcome) -> None:
                outcomes.append(outcome)
                bar.advance(outcome)

            await warm(
                job.entries,
                server,
                tell,
                parallel=job.parallel,
                verify=job.verify,
                min_tokens=job.min_tokens,
            )
            after = await server.written(WRITE_TIMEOUT_S)
        elapsed_s = time.perf_counter() - started_s
        return WarmReport(outcomes, after.since(before), await server.fault(), elapsed_s)


@dataclass(frozen=True, slots=True)
class WarmReport:
    """All outcomes. `counters` are what the server added meanwhile, for other clients too;
    `degraded` is the fault that keeps it from writing, if any.
    """

    outcomes: Sequence[Outcome]
    counters: Counters
    degraded: str
    elapsed_s: float

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error]

    @property
    def is_good(self) -> bool:
        """Whether everything was kept."""
        return not (self.failed or self.degraded or self.counters.unwritten_nodes)

    def summary(self) -> dict[str, Any]:
        """The totals, as plain names and numbers."""
        num_prefilled = sum(outcome.num_prefilled for outcome in self.outcomes)
        return {
            "prefixes": len(self.outcomes),
            "kept": sum(not (o.error or o.was_there) for o in self.outcomes),
            "already_there": sum(o.was_there for o in self.outcomes),
            "failed": len(self.failed),
            "prefilled_tokens": num_prefilled,
            "cached_tokens": sum(outcome.num_cached for outcome in self.outcomes),
            "written_bytes": self.counters.written_bytes,
            "unwritten_nodes": self.counters.unwritten_nodes,
            "evicted_nodes": self.counters.evicted_nodes,
            "seconds": round(self.elapsed_s, 3),
            "tokens_per_s": round(num_prefilled / self.elapsed_s, 1) if self.elapsed_s else 0.0,
            "degraded": self.degraded,
        }


class WarmingBar:
    """A progress bar on a terminal, and a line on stderr for each finished entry."""

    def __init__(self, console: Console, num_entries: int) -> None:
        self._progress = Progress(
            TextColumn("Warming"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._num_tokens = 0
        self._task = self._progress.add_task("", total=num_entries, tokens=0)

    def __enter__(self) -> WarmingBar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, outcome: Outcome) -> None:
        """Count a finished entry."""
        self._num_tokens += outcome.num_tokens
        self._progress.update(self._task, advance=1, tokens=self._num_tokens)
        self._console.print(line_of(outcome), markup=False, soft_wrap=True)


def line_of(outcome: Outcome) -> str:
    """One line about an entry's outcome."""
    origin = outcome.entry.origin
    if outcome.error:
        return f"{origin}: FAILED: {outcome.error}"
    if outcome.was_there:
        words = f"{outcome.num_tokens} tokens, all there already"
    else:
        words = f"{outcome.num_tokens} tokens, {outcome.num_cached} were there already"
    found = "" if outcome.num_found is None else f"; the next request found {outcome.num_found}"
    return f"{origin}: {words}, {outcome.elapsed_s:.1f} s{found}"


def as_json(report: WarmReport) -> str:
    """The totals and every entry."""
    entries = [
        {
            "origin": outcome.entry.origin,
            "tokens": outcome.num_tokens,
            "cached_tokens": outcome.num_cached,
            "found_tokens": outcome.num_found,
            "seconds": round(outcome.elapsed_s, 3),
            "error": outcome.error or None,
        }
        for outcome in report.outcomes
    ]
    return json.dumps({**report.summary(), "entries": entries}, indent=2)


def as_text(report: WarmReport) -> str:
    """The totals, followed by all errors again: in a long run, they have scrolled out of view."""
    sums = report.summary()
    pace = f" ({sums['tokens_per_s']:.0f} tokens/s)" if sums["prefilled_tokens"] else ""
    lines = [
        f"{count_text(sums['prefixes'], 'prompt')}: {sums['kept']} kept, "
        f"{sums['already_there']} there already, {sums['failed']} failed",
        f"{count_text(sums['prefilled_tokens'], 'token')} prefilled, {sums['cached_tokens']} "
        f"cached, {size_text(sums['written_bytes'])} written in {sums['seconds']:.1f} s{pace}",
    ]
    if report.counters.evicted_nodes:
        lines.append(
            f"evicted from the disk meanwhile: {count_text(sums['evicted_nodes'], 'node')}; "
            "--kv-cache-budget may be too small"
        )
    if report.counters.unwritten_nodes:
        lines.append(f"still to be written: {count_text(sums['unwritten_nodes'], 'node')}")
    if report.degraded:
        lines.append(f"the cache directory has a fault: {report.degraded}")
    return "\n".join([*lines, *map(line_of, report.failed)])
