"""The cache commands: list, inspect, verify and remove the prefixes on disk, without a model.

Owns their flags, exit codes and output. Imports the disk cache when a command runs, so that --help
is fast. Independent of file formats.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from luceasync import parsers
from luceasync.cli.flags import with_config
from luceasync.cli.output import (
    DAY_S,
    age_text,
    count_text,
    plain_table,
    print_json,
    print_plain,
    size_text,
)
from luceasync.config import Config
from luceasync.errors import ConfigError, SnapshotMismatch

if TYPE_CHECKING:
    from rich.table import Table

    from luceasync.disk_cache.codec import NodeHeader
    from luceasync.disk_cache.listing import NodeMeta
    from luceasync.disk_cache.object_store import StoreUpkeep
    from luceasync.disk_cache.upkeep import NamespaceTotal, Upkeep, Verdict

cache_app = typer.Typer(
    name="cache", help="Inspect and clean up the prefix cache on disk.", no_args_is_help=True
)

SHORT_DIGITS = 12  # of a key; enough to identify it

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only this namespace; a unique prefix is enough."),
]


Store = Annotated[
    str | None,
    typer.Option("--kv-store", metavar="URL", help="That of a store, not of a directory."),
]


@cache_app.command(name="ls")
@with_config("kv-cache-dir")
def show_list(
    config: Config,
    context: typer.Context,
    namespace: Annotated[
        str | None, typer.Argument(help="List the nodes of this namespace.", show_default=False)
    ] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """List the namespaces, one per model and precision served, or the nodes of one."""
    if store is not None:
        _refuse_directory(context)
        list_store(store, namespace, as_json)
        return
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
    key: Annotated[str, typer.Argument(help="Key of a node; a unique prefix is enough.")],
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Show what a node holds, and its chain of parents."""
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
    """Read every byte of every node; quarantine damaged ones and exit with 1 if there are any."""
    with _opened(config) as upkeep:
        names = _namespaces(upkeep, namespace)
        verdicts = (upkeep.verify(name, key) for name in names for key in upkeep.keys(name))
        is_sound = print_verdicts(verdicts)
        print_orphans(node for name in names for node in _orphans(upkeep.nodes(name)))
    raise typer.Exit(0 if is_sound else 1)


@cache_app.command()
@with_config("kv-cache-dir")
def prune(
    config: Config,
    context: typer.Context,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Most bytes to keep, such as 100G.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Remove nodes unused for longer.")
    ] = None,
    namespace: Namespace = None,
    store: Store = None,
) -> None:
    """Remove the least recently used nodes; never one that another node needs. From a store,
    remove objects written longer ago.
    """
    from luceasync.disk_cache.upkeep import prunable

    if store is not None:
        _refuse_directory(context)
        prune_store(store, budget, older_than, namespace)
        return
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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove all nodes, quarantined ones included."""
    with _opened(config) as upkeep:
        names = _namespaces(upkeep, namespace)
        totals = [total for total in upkeep.totals() if total.namespace in names]
        size = size_text(sum(total.num_bytes for total in totals))
        nodes = count_text(sum(total.num_nodes for total in totals), "node")
        if not yes:
            typer.confirm(f"Remove {nodes}, {size}, from {upkeep.root}?", abort=True)
        removed = [upkeep.clear(name) for name in names]
    print_removed(sum(count for count, _ in removed), sum(size for _, size in removed), 0)


def _refuse_directory(context: typer.Context) -> None:
    """Raise ConfigError if a directory is given beside a store. One that a variable or the TOML
    file sets is the server's, and no error.
    """
    if context.params.get("kv_cache_dir") is not None:
        raise ConfigError("--kv-store and --kv-cache-dir are both given; one is expected")


def list_store(url: str, prefix: str | None, as_json: bool) -> None:
    """Print the namespaces of a store, or the one that begins with `prefix`. Objects are counted,
    not read. Raises ConfigError.
    """
    from luceasync.disk_cache.object_store import StoreUpkeep

    upkeep = StoreUpkeep(url)
    totals = [upkeep.total(name) for name in _of_store(upkeep, url, prefix)]
    if as_json:
        print_json({"namespaces": [asdict(total) for total in totals]})
        return
    table = _table("namespace", "nodes", "bytes", "last written")
    for total in totals:
        row = str(total.num_nodes), size_text(total.num_bytes), _age(total.newest_s)
        table.add_row(total.namespace, *row)
    print_plain(table)


def prune_store(url: str, budget: str | None, older_than: float | None, prefix: str | None) -> None:
    """Remove objects of a store by age, and print how many bytes that was. Raises ConfigError."""
    from luceasync.disk_cache.object_store import StoreUpkeep

    if older_than is None or budget is not None:
        raise ConfigError(
            "cache prune --kv-store: expected --older-than DAYS, and no --budget: a store knows "
            "when an object was written, not when it was used"
        )
    upkeep, before_s = StoreUpkeep(url), time.time() - older_than * DAY_S
    removed = [upkeep.prune(name, before_s) for name in _of_store(upkeep, url, prefix)]
    num_gone = sum(count for count, _ in removed)
    size = size_text(sum(num_bytes for _, num_bytes in removed))
    print_plain(f"{count_text(num_gone, 'object')} removed, {size}")


def _of_store(upkeep: StoreUpkeep, url: str, prefix: str | None) -> list[str]:
    names = [name for name in upkeep.namespaces() if name.startswith(prefix or "")]
    if prefix is not None and not names:
        _fail(f"no namespace {prefix} in {url}")
    return names


@contextmanager
def _opened(config: Config) -> Iterator[Upkeep]:
    """The cache directory. Turns an OSError into a ConfigError."""
    from luceasync.disk_cache.upkeep import Upkeep
    from luceasync.models.mixers import END_KINDS

    root = config.cache.cache_dir
    if root is None:
        raise ConfigError("--kv-cache-dir: not given; expected the cache directory of a server")
    try:
        yield Upkeep(root, END_KINDS)
    except OSError as error:
        raise ConfigError(f"--kv-cache-dir {root}: {error}") from None


def _namespaces(upkeep: Upkeep, prefix: str | None) -> list[str]:
    """All namespaces, or the one that begins with `prefix`."""
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
    """Namespace and key of the node whose key begins with `prefix`."""
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
        return parsers.integer(0)(text)
    except ValueError:
        raise ConfigError(
            f"--budget: {text!r} is not allowed; allowed: an integer number of bytes, such as 100G"
        ) from None


def print_namespaces(totals: Sequence[NamespaceTotal], as_json: bool) -> None:
    """Print each namespace and its size."""
    if as_json:
        print_json({"namespaces": [asdict(total) for total in totals]})
        return
    table = _table("namespace", "nodes", "bytes", "last used")
    for total in totals:
        size = size_text(total.num_bytes)
        table.add_row(total.namespace, str(total.num_nodes), size, _age(total.last_used_s))
    size = size_text(sum(total.num_bytes for total in totals))
    table.add_row("total", str(sum(total.num_nodes for total in totals)), size, "")
    print_plain(table)


def print_nodes(namespace: str, nodes: Iterable[NodeMeta], as_json: bool) -> None:
    """Print the nodes of a namespace, each after its parent."""
    ordered = _parents_first(nodes)
    if as_json:
        print_json({"namespace": namespace, "nodes": [_summary(node) for node in ordered]})
        return
    print_plain(_node_table(ordered))


def print_node(headers: Sequence[NodeHeader], nodes: Iterable[NodeMeta], as_json: bool) -> None:
    """Print one of the nodes: its metadata, its tensors, and its chain from the root. `headers` are
    those of its files, beginning with the file that contains its rows.
    """
    header = headers[0]
    by_key = {node.key: node for node in nodes}
    node = by_key[header.metadata.key]
    chain = _chain(node, by_key)
    if as_json:
        print_json(
            {
                **_summary(node),
                "split": list(header.metadata.split),
                "tensors": _tensors(headers),
                "chain": [_summary(each) for each in chain],
            }
        )
        return
    facts = _summary(node) | {
        "split": header.metadata.split,
        "num_tokens": len(node.tokens),
        "num_bytes": size_text(node.num_bytes),
        "end_bytes": size_text(node.end_bytes),
        "end_file_bytes": size_text(node.end_file_bytes),
        "created_s": _age(header.metadata.created_s),
        "last_used_s": _age(node.last_used_s),
    }
    for name, value in facts.items():
        words = name.removeprefix("num_").removesuffix("_s").replace("_", " ")
        print_plain(f"{words:10} {_shown(value)}")
    print_plain("", _tensor_table(headers), "", _node_table(chain))
    if _is_orphan(chain):
        print_plain("", "Its parents are missing: no request can use it.")


def print_verdicts(verdicts: Iterable[Verdict]) -> bool:
    """Print each defect as it is found, then the counts. Returns whether all nodes are intact."""
    counts = Counter[str]()
    for verdict in verdicts:
        counts[verdict.state] += 1
        if verdict.state in ("damaged", "unreadable"):
            print_plain(f"{verdict.state}: {verdict.namespace}/{verdict.key}: {verdict.detail}")
    print_plain(
        f"{count_text(counts['whole'], 'node')} intact, "
        f"{counts['damaged']} damaged and quarantined, {counts['unreadable']} unreadable, "
        f"{counts['foreign']} of another schema"
    )
    return counts["damaged"] == counts["unreadable"] == 0


def print_orphans(orphans: Iterable[NodeMeta]) -> None:
    """Print how many intact nodes are unusable, if any."""
    if num_orphans := sum(1 for _ in orphans):
        print_plain(
            f"{count_text(num_orphans, 'intact node')} below a missing parent: no request can use "
            "them until the parent is computed again"
        )


def print_removed(num_gone: int, num_bytes: int, num_left: int) -> None:
    """Print how much was removed."""
    print_plain(
        f"{count_text(num_gone, 'node')} removed, {size_text(num_bytes)}; "
        f"{count_text(num_left, 'node')} left"
    )


def _summary(node: NodeMeta) -> dict[str, object]:
    """A node as JSON values."""
    known = {} if node.metadata is None else asdict(node.metadata)
    known.pop("split", None)
    return {
        "namespace": node.namespace,
        "key": node.key,
        **known,
        "num_tokens": len(node.tokens),
        "parts": sorted(node.parts),
        "num_bytes": node.num_bytes,
        "end_bytes": node.end_bytes,
        "end_file_bytes": node.end_file_bytes,
        "last_used_s": node.last_used_s,
    }


def _tensors(headers: Sequence[NodeHeader]) -> list[dict[str, object]]:
    return [
        {
            "name": slot.name,
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "num_bytes": slot.end - slot.begin,
        }
        for header in headers
        for slot in header.slots
    ]


def _tensor_table(headers: Sequence[NodeHeader]) -> Table:
    table = _table("tensor", "dtype", "shape", "bytes")
    for slot in (slot for header in headers for slot in header.slots):
        shape = " x ".join(map(str, slot.shape))
        table.add_row(slot.name, slot.dtype, shape, size_text(slot.end - slot.begin))
    return table


def _node_table(nodes: Iterable[NodeMeta]) -> Table:
    from luceasync.disk_cache.codec import NodePart

    table = _table("key", "parent", "tokens", "rows", "end", "state", "last used")
    for node in nodes:
        size, age = size_text(node.span_bytes), _age(node.last_used_s)
        end_size = size_text(node.end_bytes) if node.end_bytes else "-"
        if node.metadata is None:
            table.add_row(node.key[:SHORT_DIGITS], "", "another schema", size, end_size, "", age)
            continue
        parent = node.metadata.parent[:SHORT_DIGITS] or "-"
        span = f"[{node.metadata.begin}, {node.metadata.end})"
        state = "yes" if NodePart.STATE in node.parts else "no"
        table.add_row(node.key[:SHORT_DIGITS], parent, span, size, end_size, state, age)
    return table


def _parents_first(nodes: Iterable[NodeMeta]) -> list[NodeMeta]:
    """Each node directly before its children; broken chains come last."""
    by_key = {node.key: node for node in nodes}
    below: dict[str, list[NodeMeta]] = {}
    for node in sorted(by_key.values(), key=lambda n: (_begin(n), n.key), reverse=True):
        parent = node.metadata.parent if node.metadata is not None else ""
        below.setdefault(parent if parent in by_key else "", []).append(node)
    ordered: list[NodeMeta] = []
    walk = below.get("", [])
    while walk:
        ordered.append(walk.pop())
        walk.extend(below.get(ordered[-1].key, ()))
    return ordered


def _begin(node: NodeMeta) -> int:
    return 0 if node.metadata is None else node.metadata.begin


def _chain(node: NodeMeta, by_key: dict[str, NodeMeta]) -> list[NodeMeta]:
    """The nodes from the root, or the last ancestor present, down to `node`."""
    chain = [node]
    while chain[-1].metadata is not None:
        parent = by_key.get(chain[-1].metadata.parent)
        if parent is None or parent.metadata is None:
            break
        if parent.metadata.end != chain[-1].metadata.begin:
            break
        chain.append(parent)
    return chain[::-1]


def _is_orphan(chain: Sequence[NodeMeta]) -> bool:
    """Whether a chain from `_chain` does not reach the root."""
    return chain[0].metadata is None or chain[0].metadata.begin > 0


def _orphans(nodes: Iterable[NodeMeta]) -> Iterator[NodeMeta]:
    """Nodes of one namespace that have lost a parent."""
    by_key = {node.key: node for node in nodes}
    for node in by_key.values():
        if node.metadata is not None and _is_orphan(_chain(node, by_key)):
            yield node


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _age(time_s: float) -> str:
    return age_text(time.time() - time_s)


def _table(*columns: str) -> Table:
    return plain_table(*columns, names=("namespace", "key", "parent", "tensor", "dtype"))
