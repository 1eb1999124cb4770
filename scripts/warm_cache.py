"""Have prompts computed and kept ahead of time: by a running server, or into its cache directory.

Owns the flags, both ways and the exit codes. Keeping is idempotent, so an interrupted run is simply
repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from warm.client import Counters, Outcome, Verify, WarmClient, open_directory, open_server, warm
from warm.entries import Entry, Form, Role, parse_kwargs, read_entries, read_tools, with_common

from luceasync.cli.flags import with_config
from luceasync.cli.output import size_text
from luceasync.config import Config
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.options import CONFIG_VARIABLE, load_config

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DEFAULT_PARALLEL = 2  # for a server: one prompt is computed while another is restored
WRITE_TIMEOUT_S = 600.0  # until what is under way has reached the disk

Files = Annotated[
    list[str],
    typer.Option(
        help="What to keep; may be repeated; - is stdin. A text is one prompt; JSON is a list of "
        "messages, or an object with messages, tools and chat_template_kwargs; JSONL has one of "
        "these a line.",
        show_default=False,
    ),
]
FormOption = Annotated[
    Form, typer.Option("--format", help="Of the files; auto: .json, .jsonl, else text.")
]
RoleOption = Annotated[Role, typer.Option(help="Whose message a text is.")]
Tools = Annotated[
    Path | None, typer.Option(help="JSON list of tools, for entries that bring none.")
]
Kwargs = Annotated[
    str | None, typer.Option(metavar="JSON", help="Variables for the chat template.")
]
Url = Annotated[str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000.")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="LUCEASYNC_API_KEY",
        show_envvar=False,
        help="Key of the later requests: each key has prefixes of its own.",
    ),
]
Salt = Annotated[str | None, typer.Option(help="The cache_salt of the later requests.")]
Parallel = Annotated[int | None, typer.Option(min=1, max=1024, help="Prompts at a time.")]
VerifyOption = Annotated[
    Verify, typer.Option(help="Send a request that continues the prompt and check what it finds.")
]
Patience = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a busy server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

HELP = """Have prompts computed ahead of time, so that no client waits for their prefill.

Either by a running server (--url), or in this process, into a directory that servers use \
(--kv-cache-dir, with the server's own flags of model and placement). Run it again to \
continue: what is cached already is not computed again.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Job:
    """The entries, and the client that has them kept."""

    entries: list[Entry]
    server: AbstractAsyncContextManager[WarmClient]
    parallel: int
    verify: Verify
    min_tokens: int = 0


@app.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@with_config("model", "placement", "max-ctx", "prefill-chunk", "cache", "draft")
def warm_cache(
    config: Config,
    file: Files,
    form: FormOption = "auto",
    role: RoleOption = "system",
    tools: Tools = None,
    template_kwargs: Kwargs = None,
    url: Url = None,
    api_key: Key = None,
    cache_salt: Salt = None,
    parallel: Parallel = None,
    verify: VerifyOption = "first",
    patience: Patience = 600.0,
    as_json_: Json = False,
) -> None:
    if api_key is not None and "," in api_key:
        raise ConfigError("--api-key: several keys; expected one: each has prefixes of its own")
    entries = with_common(
        [entry for source in file for entry in read_entries(source, form, role)],
        [] if tools is None else read_tools(tools),
        {} if template_kwargs is None else parse_kwargs(template_kwargs),
    )
    if url is None:
        config = _for_directory(config, parallel)
        server = open_directory(config, api_key, cache_salt)
        num_lanes, min_tokens = config.engine.parallel or 1, config.cache.min_tokens
        job = Job(entries, server, num_lanes, verify, min_tokens)
    else:
        _refuse_flags(config)
        server = open_server(url, api_key, cache_salt, patience)
        job = Job(entries, server, parallel or DEFAULT_PARALLEL, verify)
    raise typer.Exit(run(job, as_json_))


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
        with Bar(console, len(job.entries)) as bar:

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


def _for_directory(config: Config, parallel: int | None) -> Config:
    """The configuration of an engine that serves no clients. Raises ConfigError."""
    if config.cache.cache_dir is None:
        raise ConfigError("expected --url of a running server, or --kv-cache-dir to write into")
    num_lanes = parallel or config.engine.parallel or 1
    return replace(config, engine=replace(config.engine, parallel=num_lanes))


def _refuse_flags(config: Config) -> None:
    """Raise ConfigError if flags are set that only an engine in this process would honour."""
    path = os.environ.get(CONFIG_VARIABLE)
    if config != load_config({}, os.environ, Path(path) if path else None):
        raise ConfigError(
            "--url: not allowed with flags of model, placement, cache or draft: a server has its "
            "own; leave out one or the other"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """All outcomes. `counters`: what the server added meanwhile, for other clients too; `degraded`:
    the fault that keeps it from writing, if any.
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
        """Whether everything is kept."""
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


class Bar:
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

    def __enter__(self) -> Bar:
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


def as_json(report: Report) -> str:
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


def as_text(report: Report) -> str:
    """The totals, and all errors again, since a long run has scrolled them away."""
    sums = report.summary()
    lines = [
        f"{sums['prefixes']} prefixes: {sums['kept']} kept, {sums['already_there']} were there "
        f"already, {sums['failed']} failed",
        f"{sums['prefilled_tokens']} tokens prefilled, {sums['cached_tokens']} were cached, "
        f"{size_text(sums['written_bytes'])} written in {sums['seconds']:.1f} s "
        f"({sums['tokens_per_s']:.0f} tokens/s)",
    ]
    if report.counters.evicted_nodes:
        lines.append(
            f"{sums['evicted_nodes']} nodes were evicted from the disk meanwhile: "
            "--kv-cache-budget may be too small"
        )
    if report.counters.unwritten_nodes:
        lines.append(f"{sums['unwritten_nodes']} nodes are still on their way to the disk")
    if report.degraded:
        lines.append(f"the cache directory has a fault: {report.degraded}")
    return "\n".join([*lines, *map(line_of, report.failed)])


def main() -> None:
    """The entry point. A configuration error is one line on stderr and exit code 2."""
    try:
        app()
    except LuceasyncError as error:
        print(f"warm_cache: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
