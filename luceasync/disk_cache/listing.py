"""What lies in a directory of nodes, and what is new since it was listed before.

Only reads; its calls block. Knows no deadline and no event loop.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from luceasync.disk_cache.codec import (
    NAMESPACE,
    TEMPORARY,
    EndKinds,
    Half,
    NodePart,
    file_name,
    parse_file_name,
)
from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.metadata import NodeMetadata
from luceasync.disk_cache.outcomes import is_gone
from luceasync.disk_cache.reader import TokenAllowance, read_header, read_tokens
from luceasync.errors import CorruptNode, ForeignNode

NO_TOKENS = array("i")
MAX_LISTED_TOKENS = 1 << 26  # of one namespace, 256 MiB: sparse files may claim any number
NUM_PARTS = 16  # of a directory: the keys with the same first hex digit


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """A node, or one of its files, as a scan found it.

    For a file of another namespace or schema, only name, size and age are known: it has no
    `metadata`, tokens or parts. `end_bytes`: the size of what belongs to the node's end alone,
    `end_file_bytes`: that of the end's own file, `allocated_bytes`: what the disk holds of
    `num_bytes`, less for sparse files. Equality ignores the time of use.
    """

    namespace: str
    key: str
    num_bytes: int
    last_used_s: float = field(compare=False)
    metadata: NodeMetadata | None = None
    tokens: array[int] = field(default_factory=lambda: NO_TOKENS)
    parts: frozenset[NodePart] = frozenset()
    end_bytes: int = 0
    end_file_bytes: int = 0
    allocated_bytes: int = field(compare=False, default=0)

    @property
    def span_bytes(self) -> int:
        """Size of what does not belong to the end: rows, tokens, header."""
        return self.num_bytes - self.end_bytes

    def with_end(self, end: NodeMeta) -> NodeMeta:
        """The node of these rows, with the file of its end."""
        return replace(
            self,
            num_bytes=self.num_bytes + end.num_bytes,
            parts=self.parts | end.parts,
            end_bytes=self.end_bytes + end.num_bytes,
            end_file_bytes=end.num_bytes,
            allocated_bytes=self.allocated_bytes + end.allocated_bytes,
        )


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A node's file, and what identifies its content without opening it."""

    meta: NodeMeta
    inode: int
    mtime_ns: int

    def is_still(self, status: os.stat_result) -> bool:
        """Whether the file is unchanged."""
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        return seen == (self.inode, self.meta.num_bytes, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a namespace's directory: the files of nodes and of their ends by key, those
    that are damaged or not nodes, temporary files, and the faults of files that could not be read.
    """

    nodes: Mapping[str, ListedFile]
    ends: Mapping[str, ListedFile] = field(default_factory=dict)
    damaged: tuple[Path, ...] = ()
    temporaries: tuple[Path, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def whole(self) -> dict[str, NodeMeta]:
        """The nodes by key, each with its end if there is one."""
        return {
            key: found.meta.with_end(end.meta) if (end := self.ends.get(key)) else found.meta
            for key, found in self.nodes.items()
        }


EMPTY_LISTING = Listing({})


@dataclass(frozen=True, slots=True)
class Scan:
    """All nodes; those that are new or have changed since the last scan; and those that are gone
    since, as they were. `is_whole`: everything could be read.
    """

    nodes: tuple[NodeMeta, ...]
    added: tuple[NodeMeta, ...]
    removed: tuple[NodeMeta, ...]
    is_whole: bool


def namespaces(files: FileSystem, root: Path) -> list[Path]:
    """The directories of namespaces; none if the root does not exist. Raises OSError."""
    try:
        entries = files.entries(root)
    except FileNotFoundError:
        return []
    return [
        root / entry.name
        for entry in entries
        if NAMESPACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def list_nodes(
    files: FileSystem,
    directory: Path,
    known: Listing = EMPTY_LISTING,
    *,
    opening: EndKinds | None,
    part: int | None = None,
) -> Listing:
    """The nodes of one namespace. `opening`: the kinds of tensors that belong to ends, for files
    that are opened; None: list name, size and age alone.

    A `known` file that is unchanged is not opened again; one that cannot be read now counts as
    before. At most MAX_LISTED_TOKENS tokens are read, of the files that were used last: the rest is
    listed by name. With a `part` in [0, NUM_PARTS), known files outside it count as before unless
    their names are gone: on a network file system, a look at each file costs more than all names.
    """
    found: dict[Half, dict[str, ListedFile]] = {half: {} for half in Half}
    before = {Half.ROWS: known.nodes, Half.END: known.ends}
    damaged, temporaries, faults = [], [], []
    try:
        entries = files.entries(directory)
    except FileNotFoundError:
        return EMPTY_LISTING
    except OSError as error:
        return Listing(known.nodes, known.ends, faults=(str(error),))
    allowance = TokenAllowance(MAX_LISTED_TOKENS)
    if part is not None:
        entries, as_before = _in_part(entries, before, part)
        for half, old_files in as_before.items():
            found[half].update(old_files)
            allowance.count(sum(len(old.meta.tokens) for old in old_files.values()))
    for entry in entries if opening is None else sorted(entries, key=_last_used_first):
        path = directory / entry.name
        if TEMPORARY.fullmatch(entry.name):
            temporaries.append(path)
        elif named := parse_file_name(entry.name):
            key, half = named
            old = before[half].get(key)
            try:
                status = entry.stat(follow_symlinks=False)
                if old is not None and old.is_still(status):
                    allowance.count(len(old.meta.tokens))
                    found[half][key] = old
                else:
                    found[half][key] = _examine(
                        files, path, status, opening=opening, allowance=allowance
                    )
            except FileNotFoundError:  # another process has just removed it
                continue
            except CorruptNode:
                damaged.append(path)
            except OSError as error:
                if not is_gone(error):  # stale: it was replaced just now
                    faults.append(str(error))
                if old is not None:
                    found[half][key] = old
    return Listing(
        found[Half.ROWS], found[Half.END], tuple(damaged), tuple(temporaries), tuple(faults)
    )


def _in_part(
    entries: Iterable[os.DirEntry[str]], known: Mapping[Half, Mapping[str, ListedFile]], part: int
) -> tuple[list[os.DirEntry[str]], dict[Half, dict[str, ListedFile]]]:
    """The entries to look at: those that are not known, or in the part; and the known others."""
    looked_at: list[os.DirEntry[str]] = []
    as_before: dict[Half, dict[str, ListedFile]] = {half: {} for half in Half}
    for entry in entries:
        named = parse_file_name(entry.name)
        key, half = named or ("", Half.ROWS)
        old = known[half].get(key)
        if old is None or int(key[0], 16) == part:
            looked_at.append(entry)
        else:
            as_before[half][key] = old
    return looked_at, as_before


def look_up(files: FileSystem, directory: Path, key: str, opening: EndKinds) -> NodeMeta | None:
    """The node of this key; None if there is none that can be read now, or it is of another schema.
    A damaged file is left to list_nodes. Raises OSError for faults of the disk.
    """
    found: dict[Half, NodeMeta] = {}
    for half in Half:
        path = directory / file_name(key, half)
        try:
            found[half] = _examine(files, path, os.lstat(path), opening=opening).meta
        except CorruptNode:
            continue
        except OSError as error:
            if not is_gone(error):
                raise
    rows, end = found.get(Half.ROWS), found.get(Half.END)
    if rows is None or rows.metadata is None:
        return None
    return rows if end is None or end.metadata is None else rows.with_end(end)


def changes(before: Mapping[str, Listing], after: Mapping[str, Listing]) -> Scan:
    """The changes between two listings of all namespaces, by name."""
    old, new = _by_name(before), _by_name(after)
    return Scan(
        nodes=tuple(new.values()),
        added=tuple(meta for name, meta in new.items() if old.get(name) != meta),
        removed=tuple(meta for name, meta in old.items() if name not in new),
        is_whole=not any(listing.faults for listing in after.values()),
    )


def misplaced(nodes: Iterable[NodeMeta]) -> set[str]:
    """Keys of the nodes that do not begin where their parent ends. Without them there is no cycle
    of parents, whatever files say: each node ends where the next one begins.
    """
    of_ours = [(meta.key, meta.metadata) for meta in nodes if meta.metadata is not None]
    ends = {key: metadata.end for key, metadata in of_ours}
    return {
        key
        for key, metadata in of_ours
        if ends.get(metadata.parent, metadata.begin) != metadata.begin
    }


def _by_name(listings: Mapping[str, Listing]) -> dict[tuple[str, str], NodeMeta]:
    return {
        (namespace, key): meta
        for namespace, listing in listings.items()
        for key, meta in listing.whole.items()
    }


def _last_used_first(entry: os.DirEntry[str]) -> float:
    try:
        return -entry.stat(follow_symlinks=False).st_mtime
    except OSError:  # told when the file is looked at
        return 0.0


def _examine(
    files: FileSystem,
    path: Path,
    status: os.stat_result,
    *,
    opening: EndKinds | None,
    allowance: TokenAllowance | None = None,
) -> ListedFile:
    """The file. Raises OSError, and CorruptNode if it is damaged or not regular."""
    named = parse_file_name(path.name)
    assert named is not None, path
    key, half = named
    namespace = path.parent.name
    allocated_bytes = min(status.st_size, 512 * status.st_blocks)
    meta = NodeMeta(
        namespace, key, status.st_size, status.st_mtime, allocated_bytes=allocated_bytes
    )
    if opening is not None:
        try:
            if half is Half.ROWS:
                header, tokens = read_tokens(files, path, namespace, opening, allowance)
            else:
                header, tokens = read_header(files, path, namespace, opening), NO_TOKENS
        except ForeignNode:
            return ListedFile(meta, status.st_ino, status.st_mtime_ns)
        meta = replace(
            meta,
            metadata=header.metadata,
            tokens=tokens,
            parts=header.parts,
            end_bytes=header.end_bytes,
        )
    elif not stat.S_ISREG(status.st_mode):
        raise CorruptNode(f"{path.name}: expected a regular file")
    return ListedFile(meta, status.st_ino, status.st_mtime_ns)
