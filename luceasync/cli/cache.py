"""The cache commands: what is kept on disk, looked at and removed without a model.

Owns their flags and exit codes; imports what they need when they run. Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from luceasync import parsers
from luceasync.cli.flags import with_config
from luceasync.config import Config
from luceasync.errors import ConfigError, SnapshotMismatch

if TYPE_CHECKING:
    from luceasync.nodefiles.upkeep import Upkeep

cache_app = typer.Typer(
    name="cache", help="Look after the prefixes that are kept on disk.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only this namespace; its first letters are enough."),
]


@cache_app.command(name="ls")
@with_config("kv-cache-dir")
def show_list(
    config: Config,
    namespace: Annotated[
        str | None, typer.Argument(help="List the nodes of this one.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the namespaces, one for each model that was served, or the nodes of one."""
    from luceasync.cli.cache_tables import print_namespaces, print_nodes

    with _opened(config) as upkeep:
        if namespace is None:
            print_namespaces(upkeep.totals(), as_json)
        else:
            name = _one_namespace(upkeep, namespace)
            print_nodes(name, upkeep.nodes(name), as_json)


@cache_app.command()
@with_config("kv-cache-dir")
def show(
    config: Config,
    key: Annotated[str, typer.Argument(help="Key of a node; its first digits are enough.")],
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show what a node holds, and the nodes that it continues."""
    from luceasync.cli.cache_tables import print_node

    with _opened(config) as upkeep:
        name, found = _one_node(upkeep, namespace, key)
        try:
            headers = upkeep.headers(name, found)
        except SnapshotMismatch as error:
            _fail(f"node {name}/{found}: {error}")
        print_node(headers, upkeep.nodes(name), as_json)


@cache_app.command()
@with_config("kv-cache-dir")
def verify(config: Config, namespace: Namespace = None) -> None:
    """Read every byte of every node; what is damaged is moved to the quarantine, exit 1."""
    from luceasync.cli.cache_tables import print_verdicts

    with _opened(config) as upkeep:
        names = _namespaces(upkeep, namespace)
        verdicts = (upkeep.verify(name, key) for name in names for key in upkeep.keys(name))
        is_sound = print_verdicts(verdicts)
    raise typer.Exit(0 if is_sound else 1)


@cache_app.command()
@with_config("kv-cache-dir")
def prune(
    config: Config,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What may stay, such as 100G.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Remove what is unused for longer.")
    ] = None,
    namespace: Namespace = None,
) -> None:
    """Remove the nodes that were not used for longest; never one that another needs."""
    import time

    from luceasync.cli.cache_tables import print_removed
    from luceasync.cli.words import DAY_S
    from luceasync.nodefiles.prune import prunable

    if budget is None and older_than is None:
        raise ConfigError("cache prune: expected --budget BYTES or --older-than DAYS, or both")
    budget_bytes = None if budget is None else _bytes(budget)
    unused_since_s = 0.0 if older_than is None else time.time() - older_than * DAY_S
    with _opened(config) as upkeep:
        nodes = [node for name in _namespaces(upkeep, namespace) for node in upkeep.nodes(name)]
        gone = prunable(nodes, budget_bytes=budget_bytes, unused_since_s=unused_since_s)
        num_bytes = sum(upkeep.remove(node.namespace, node.key) for node in gone)
    print_removed(len(gone), num_bytes, len(nodes) - len(gone))


@cache_app.command()
@with_config("kv-cache-dir")
def clear(
    config: Config,
    namespace: Namespace = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove all nodes, and what was set aside as damaged."""
    from luceasync.cli.cache_tables import print_removed
    from luceasync.cli.words import size_text

    with _opened(config) as upkeep:
        names = _namespaces(upkeep, namespace)
        totals = [total for total in upkeep.totals() if total.namespace in names]
        size = size_text(sum(total.num_bytes for total in totals))
        num_nodes = sum(total.num_nodes for total in totals)
        if not yes:
            typer.confirm(f"Remove {num_nodes} nodes, {size}, from {upkeep.root}?", abort=True)
        removed = [upkeep.clear(name) for name in names]
    print_removed(sum(count for count, _ in removed), sum(size for _, size in removed), 0)


@contextmanager
def _opened(config: Config) -> Iterator[Upkeep]:
    """The directory; a disk that cannot be read or written is one line."""
    from luceasync.models.mixers import END_KINDS
    from luceasync.nodefiles.upkeep import Upkeep

    root = config.cache.cache_dir
    if root is None:
        raise ConfigError("--kv-cache-dir: not given; expected the directory that servers use")
    try:
        yield Upkeep(root, END_KINDS)
    except OSError as error:
        raise ConfigError(f"--kv-cache-dir {root}: {error}") from None


def _namespaces(upkeep: Upkeep, prefix: str | None) -> list[str]:
    """All names, or the one that is meant."""
    return upkeep.namespaces() if prefix is None else [_one_namespace(upkeep, prefix)]


def _one_namespace(upkeep: Upkeep, prefix: str) -> str:
    names = [name for name in upkeep.namespaces() if name.startswith(prefix)]
    if prefix in names:
        return prefix
    if not names:
        _fail(f"no namespace {prefix} in {upkeep.root}")
    if len(names) > 1:
        raise ConfigError(f"namespace {prefix}: {', '.join(names[:4])} begin with it")
    return names[0]


def _one_node(upkeep: Upkeep, namespace: str | None, prefix: str) -> tuple[str, str]:
    """Namespace and key of the node that is meant."""
    names = _namespaces(upkeep, namespace)
    found = [(name, key) for name in names for key in upkeep.keys(name) if key.startswith(prefix)]
    if not found:
        _fail(f"no node {prefix} in {upkeep.root}")
    if len(found) > 1:
        words = ", ".join(f"{name}/{key[:16]}" for name, key in found[:4])
        raise ConfigError(f"KEY {prefix}: {len(found)} nodes begin with it, such as {words}")
    return found[0]


def _fail(words: str) -> NoReturn:
    typer.echo(f"luceasync: {words}", err=True)
    raise typer.Exit(1)


def _bytes(text: str) -> int:
    try:
        return parsers.whole(0)(text)
    except ValueError:
        raise ConfigError(
            f"--budget: {text!r} is not allowed; allowed: a whole number of bytes, such as 100G"
        ) from None
