"""Runs the warm command's job and prints its report.

Keeping is idempotent, so an interrupted run is simply repeated.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from rich.console import Console

from luceasync.cli.warm.client import Outcome, WarmClient, warm
from luceasync.cli.warm.entries import Entry, Verify
from luceasync.cli.warm.report import Report, WarmingBar, as_json, as_text

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
WRITE_TIMEOUT_S = 600.0  # until what is under way has reached the disk


@dataclass(frozen=True, slots=True)
class Job:
    """The entries, and the client that has them kept."""

    entries: list[Entry]
    server: AbstractAsyncContextManager[WarmClient]
    parallel: int
    verify: Verify
    min_tokens: int = 0


def run(job: Job, is_json: bool) -> int:
    """Keep all entries and print the report; returns the exit code. Raises ConfigError."""
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


async def _run(job: Job, console: Console, outcomes: list[Outcome]) -> Report:
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
        return Report(outcomes, after.since(before), await server.fault(), elapsed_s)
