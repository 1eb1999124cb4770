"""The GGUF files that a path refers to: a file, all parts of a split one, or those in a directory.

Reads directory entries, and the first four bytes of a file with another suffix.
"""

from __future__ import annotations

import re
from pathlib import Path

from luceasync.errors import ModelError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")

FileIdentity = tuple[int, int, int]  # size, modification time, inode


def identity_of(path: Path) -> FileIdentity | None:
    """A value that changes with the content of the file; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def gguf_at(path: Path) -> Path | None:
    """The GGUF file at `path`, or the one with the weights in the directory `path`; the first part
    of a split one. None if there is none. Raises ModelError for a directory with several.
    """
    try:
        if path.is_file():
            return path if path.suffix.lower() == SUFFIX or _begins_as_gguf(path) else None
        if not path.is_dir() or any((path / name).exists() for name in SAFETENSORS):
            return None
        found = sorted(p for p in path.iterdir() if p.suffix.lower() == SUFFIX and p.is_file())
    except (OSError, ValueError):
        return None  # the caller that needs the path reports the error
    models: dict[str, Path] = {}
    for file in found:
        part = PART.fullmatch(file.name)
        models.setdefault(part["stem"] + part["count"] if part else file.name, file)
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:4])
        raise ModelError(f"{path}: there are {len(models)} GGUF files ({names}); name one of them")
    return next(iter(models.values()), None)


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parts_of(path: Path) -> list[Path]:
    """All parts of the split file that `path` belongs to, in order; only `path` if it is not named
    like a part. Raises ModelError if a part is missing.
    """
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count:
        raise ModelError(f"{path}: part {int(part['number'])} of {count} is impossible")
    names = (f"{part['stem']}-{i:05}-of-{count:05}{path.suffix}" for i in range(1, count + 1))
    paths = []
    for name in names:  # lazily: a name may claim 99999 parts
        paths.append(path.with_name(name))
        if not paths[-1].is_file():
            raise ModelError(f"{paths[-1]}: part {len(paths)} of {count} does not exist")
    return paths
