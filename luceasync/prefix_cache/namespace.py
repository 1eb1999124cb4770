"""The namespace of a model's saved state: a digest of everything that its numbers depend on.

Owns what goes into the digest, and the memo of weight files that were hashed before. Does not know
tensors or nodes; split, device and tokenizer are not part of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from luceasync.disk_cache.codec import SCHEMA
from luceasync.disk_cache.files import FileSystem
from luceasync.errors import CorruptNode, ModelError
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.models.families import family_of
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec

log = logging.getLogger(__name__)

EXACTNESS = "exact"  # every token is attended to, as in training
MEMO = "digests.json"
MAX_MEMO_BYTES = 4 << 20  # 20,000 weight files
DIGEST_BYTES = 16

Facts = dict[str, Any]  # by name, as JSON has them
Memo = dict[str, list[Any]]  # path -> [*identity of the file's content, digest]


def namespace_of(
    weight_files: Sequence[Path], spec: ModelSpec, precision: Precision, cache_dir: Path | None
) -> str:
    """The namespace of a model with these weights, stored and computed in `precision`. Raises as
    facts_of."""
    return named(facts_of(weight_files, spec, precision, cache_dir))


def named(facts: Facts) -> str:
    """The namespace of these facts."""
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest(DIGEST_BYTES)


def facts_of(
    weight_files: Sequence[Path], spec: ModelSpec, precision: Precision, cache_dir: Path | None
) -> Facts:
    """Everything that the numbers of saved state depend on.

    Reads every weight file whose digest is not in the memo of `cache_dir` (None: all of them).
    Raises ModelError if one cannot be read, or changes while it is read.
    """
    files = [path.resolve() for path in weight_files]
    known = {} if cache_dir is None else _read_memo(cache_dir / MEMO)
    found = {str(path): _digested(path, known.get(str(path))) for path in files}
    if cache_dir is not None and any(known.get(path) != entry for path, entry in found.items()):
        _remember(cache_dir, found)
    return {
        "schema": SCHEMA,
        "architecture": family_of(spec).architecture(spec),
        **_dtypes(precision),
        "chunk_tokens": CHUNK_TOKENS,
        "exactness": EXACTNESS,
        "weights": sorted(digest for *_, digest in found.values()),
    }


def _dtypes(precision: Precision) -> dict[str, str]:
    """The dtype of keys and values; other dtypes only if they differ from it."""
    others = {"weights_dtype": precision.weights, "compute_dtype": precision.compute}
    different = {name: dtype for name, dtype in others.items() if dtype != precision.kv}
    return {"kv_dtype": precision.kv, **different}


def _digested(path: Path, remembered: list[Any] | None) -> list[Any]:
    """The identity of the file's content, then its digest: the remembered one if the identity is
    unchanged."""
    try:
        identity = _identity(path)
        if remembered is not None and remembered[:-1] == identity:
            return remembered
        hasher = blake3(max_threads=blake3.AUTO).update_mmap(path)
        if _identity(path) != identity:
            raise ModelError(f"{path}: changed while it was read")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return [*identity, hasher.hexdigest()]


def _identity(path: Path) -> list[int]:
    """Values that change whenever the file's content does."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_memo(path: Path) -> Memo:
    """The valid entries; none if the memo is damaged."""
    try:
        with FileSystem().open(path) as file:
            text = file.read(MAX_MEMO_BYTES + 1)
        if len(text) > MAX_MEMO_BYTES:
            raise ValueError(f"expected at most {MAX_MEMO_BYTES} bytes")
        entries = json.loads(text.decode())
    except FileNotFoundError:
        return {}
    except (CorruptNode, OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s", path, error)
        return {}
    if not isinstance(entries, dict):
        log.warning("%s is ignored: expected a JSON object", path)
        return {}
    return {name: entry for name, entry in entries.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    *identity, digest = entry
    return all(type(number) is int for number in identity) and (
        isinstance(digest, str) and len(digest) == 64
    )


def _remember(cache_dir: Path, found: Memo) -> None:
    """Add the entries to the memo, which is replaced as a whole. If two processes do this at the
    same time, the entries of one may be lost: those files are hashed again."""
    path = cache_dir / MEMO
    temporary = cache_dir / f".{MEMO}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(_read_memo(path) | found, indent=1)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:  # the next start merely takes longer
        log.warning("%s could not be written: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink()
