"""The commands of `luceasync cluster`: servers on a Ray cluster, as described by a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

if TYPE_CHECKING:
    from luceasync.cluster.manager import ManagerStatus

START_S = 1800.0  # until all servers have loaded their models
COLUMNS = ("server", "phase", "machine", "url", "running", "waiting", "starts", "detail")

cluster_app = typer.Typer(
    name="cluster",
    help="Servers on a Ray cluster: started, kept running, replaced one at a time.",
    no_args_is_help=True,
)
SettingsFile = Annotated[
    Path, typer.Argument(help="What runs: docs/cluster.md has its keys.", metavar="FILE")
]


@cluster_app.command()
def up(
    file: SettingsFile,
    wait: Annotated[bool, typer.Option(help="Wait until all servers are ready.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = START_S,
) -> None:
    """Start the servers of the file, or update running ones to match it, one at a time."""
    from luceasync.cluster.control import connected
    from luceasync.cluster.settings import read_cluster

    with connected(read_cluster(file)) as control:
        if not wait:
            control.start()
            return
        status = control.up(_show_counts, timeout)
    print(_table(status))


@cluster_app.command()
def status(
    file: SettingsFile,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each server of the file's cluster: its phase, machine and address."""
    from luceasync.cluster.control import connected
    from luceasync.cluster.settings import read_cluster

    with connected(read_cluster(file)) as control:
        found = control.status()
    print(msgspec.json.encode(found).decode() if as_json else _table(found))


@cluster_app.command()
def down(
    file: SettingsFile,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait.")] = START_S,
) -> None:
    """Let all servers finish their requests, and stop them."""
    from luceasync.cluster.control import connected
    from luceasync.cluster.settings import read_cluster

    with connected(read_cluster(file)) as control:
        control.down(_show_counts, timeout)


def _show_counts(status: ManagerStatus) -> None:
    """Print one line with the number of servers in each phase."""
    phases = [str(each["phase"]) for each in status.replicas]
    words = [f"{phases.count(phase)} {phase}" for phase in sorted({*phases})]
    typer.echo(f"{time.strftime('%H:%M:%S')} {', '.join(words) or 'no servers'}", err=True)


def _table(status: ManagerStatus) -> str:
    """All servers in columns, or the requested state if there are none."""
    rows = [COLUMNS, *(_row(each) for each in status.replicas)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)) for row in rows]
    lines += [f"manager: {status.fault}"] if status.fault else []
    return "\n".join(line.rstrip() for line in lines)


def _row(found: dict[str, object]) -> tuple[str, ...]:
    keys = ("name", "phase", "node", "url", "running", "waiting", "starts", "detail")
    return tuple(" ".join(str(found[key]).split()) for key in keys)
