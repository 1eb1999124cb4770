"""The key of a node and why one was missed. Shared by the index, files, memory and the pipeline."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

# 32 bytes, a keyed hash of all tokens up to the node's end. A file's name is its hexadecimal form.
NodeKey = NewType("NodeKey", bytes)


class MissReason(StrEnum):
    """Why no more of a prompt could be restored, or a node not be read."""

    EMPTY = "empty"  # nothing has been saved
    NO_COMMON_PREFIX = "no_common_prefix"  # not even the first token is shared
    NO_STATE = "no_state"  # tokens are shared, but no recurrent state within them is held
    TOO_SHORT = "too_short"  # less than a chunk is shared
    PREFILL_IS_FASTER = "prefill_is_faster"  # the cost model says so
    CORRUPT = "corrupt"  # a file that is damaged, or not what its name says
    GONE = "gone"  # a file that another process has removed
    IO_ERROR = "io_error"  # a passing fault, a slow disk too; the file is kept
    RUN_WHOLE = "run_whole"  # somebody wants to see all of the prompt run
    NO_MEMORY = "no_memory"  # no room to keep it, or to restore into

    @property
    def is_passing(self) -> bool:
        """Whether the node may be had another time."""
        return self in (MissReason.IO_ERROR, MissReason.NO_MEMORY)
