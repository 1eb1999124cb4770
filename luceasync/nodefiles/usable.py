"""Whether a cache directory can be written to: looked at, or made.

Owns the words of the refusal. Knows nothing of what lies in it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from luceasync.errors import ConfigError
from luceasync.nodefiles.directory import make_private

FLAG = "--kv-cache-dir"


def check_usable(root: Path) -> Path:
    """`root`, or the nearest directory above it that is there; nothing is made. Raises ConfigError
    unless it can be written to.
    """
    nearest = next(path for path in (root, *root.resolve().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{FLAG} {root}: {nearest} is no directory that can be written to")
    return nearest


def make_usable(root: Path) -> None:
    """Make `root`, for its owner alone. Raises ConfigError unless it can be written to."""
    try:
        make_private(root)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{FLAG} {root}: {error.strerror}; expected a directory to write to"
        ) from None
