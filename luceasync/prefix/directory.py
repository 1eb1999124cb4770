"""The directory of node files: what its names mean, and its upkeep. Its calls block.

Owns `<root>/<namespace>/<key>.safetensors`, the temporary files beside them and the quarantine.
Knows no deadline, no event loop and no tensor.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from luceasync.errors import CorruptNode, ForeignNode
from luceasync.prefix.codec import KEY, NodeMetadata, decode_header
from luceasync.prefix.files import FileSystem, read_head

SUFFIX = ".safetensors"
QUARANTINE = "quarantine"
NUM_QUARANTINED = 16  # what is set aside to be looked at must not fill the disk
ORPHAN_AGE_S = 3600
TEMPORARY = re.compile(r"\.[0-9a-f]+\.([0-9]{1,9})\.[0-9a-f]+\.tmp")
NAMESPACE = re.compile(r"[0-9A-Za-z_-]{1,128}")


class BelowFloor(Exception):
    """A write would leave the file system with less free space than must stay."""


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """A file found by a scan; `metadata` is None where it is another namespace's."""

    namespace: str
    key: str
    num_bytes: int
    last_used_s: float
    metadata: NodeMetadata | None


class NodeDirectory:
    """The files of one namespace, among those of others under the same root."""

    def __init__(self, files: FileSystem, root: Path, namespace: str, min_free_bytes: int) -> None:
        assert NAMESPACE.fullmatch(namespace), namespace
        self._files = files
        self._root = root
        self._namespace = namespace
        self._min_free_bytes = min_free_bytes

    def path(self, key: str, namespace: str | None = None) -> Path:
        """Where a node is, of another namespace if one is named."""
        assert KEY.fullmatch(key), key
        return self._root / (namespace or self._namespace) / f"{key}{SUFFIX}"

    def temporary(self, key: str) -> Path:
        """A name that nobody else uses, from which a file is renamed to the node's."""
        return self.path(key).with_name(f".{key}.{os.getpid()}.{secrets.token_hex(8)}.tmp")

    def make(self) -> None:
        """Make the directories that are missing, for their owner alone. Raises OSError."""
        quarantine = self._root / self._namespace / QUARANTINE
        for directory in (*reversed(quarantine.parents), quarantine):
            if not directory.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)

    def create(self, temporary: Path, num_bytes: int) -> FileIO:
        """A new file for `num_bytes` bytes. Raises OSError, and BelowFloor for want of space."""
        self.make()
        free_bytes = self._files.free_bytes(temporary.parent)
        if free_bytes - num_bytes < self._min_free_bytes:
            raise BelowFloor(
                f"{num_bytes} bytes to write, {free_bytes} free: {self._min_free_bytes} must stay"
            )
        return self._files.create(temporary)

    def scan(self, now_s: float) -> tuple[list[NodeMeta], int, list[str]]:
        """The nodes, how many files were set aside, and what could not be looked at.

        Temporary files that nobody writes any more are removed, unknown names left alone.
        """
        nodes: list[NodeMeta] = []
        num_set_aside = 0
        faults: list[str] = []
        for path in sorted(self._root.glob("*/*")):
            namespace = path.parent.name
            if path.parent.is_symlink() or not NAMESPACE.fullmatch(namespace):
                continue
            try:
                if path.suffix == SUFFIX and KEY.fullmatch(path.stem):
                    nodes.append(self._look_at(path, namespace))
                elif match := TEMPORARY.fullmatch(path.name):
                    self._collect(path, int(match[1]), now_s)
            except (FileNotFoundError, ForeignNode):  # another process's to remove, or to own
                continue
            except CorruptNode:
                num_set_aside += self.set_aside(path)
            except OSError as error:
                faults.append(str(error))
        return nodes, num_set_aside, faults

    def set_aside(self, path: Path) -> int:
        """Move what is there to the quarantine and drop the oldest there; how many were moved."""
        quarantine = path.parent / QUARANTINE
        try:
            self._files.rename(path, quarantine / f"{path.stem}.{secrets.token_hex(4)}")
        except OSError:  # another process was faster, or the disk cannot be written to
            return 0
        with contextlib.suppress(OSError):  # one more than wanted does no harm
            kept = sorted(quarantine.iterdir(), key=lambda entry: entry.lstat().st_ctime_ns)
            for entry in kept[:-NUM_QUARANTINED]:
                self._files.remove(entry)
        return 1

    def _look_at(self, path: Path, namespace: str) -> NodeMeta:
        metadata = None
        status = path.lstat()
        if namespace == self._namespace:
            with self._files.open(path) as raw:
                head, file_bytes = read_head(raw)
            header = decode_header(head, file_bytes, namespace=namespace, key=path.stem)
            metadata = header.metadata
        elif not stat.S_ISREG(status.st_mode):
            raise ForeignNode(f"{path.name}: expected a regular file")
        return NodeMeta(namespace, path.stem, status.st_size, status.st_mtime, metadata)

    def _collect(self, path: Path, process_id: int, now_s: float) -> None:
        """Remove a temporary file if nobody writes it any more.

        The id may be of another container: there the lock still tells. A file that was created
        just now may not be locked yet: there the id tells.
        """
        is_old = now_s - path.lstat().st_mtime > ORPHAN_AGE_S
        if is_old or not (_is_alive(process_id) or self._files.is_locked(path)):
            self._files.remove(path)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
