"""The key of a node, and the reasons for a miss. Shared by the index, files, memory and
pipeline.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

# 32 bytes, a keyed hash of all tokens up to the node's end. A file's name is its hexadecimal form.
NodeKey = NewType("NodeKey", bytes)


class MissReason(StrEnum):
    """Why no more of a prompt could be restored, or a node could not be read."""

    EMPTY = "empty"  # nothing has been saved
    NO_COMMON_PREFIX = "no_common_prefix"  # not even the first token is shared
    NO_STATE = "no_state"  # tokens are shared, but no recurrent state is held within them
    TOO_SHORT = "too_short"  # less than a chunk is shared
    PREFILL_IS_FASTER = "prefill_is_faster"  # according to the cost model
    CORRUPT = "corrupt"  # a file is damaged, or does not contain what its name states
    GONE = "gone"  # another process has removed the file
    IO_ERROR = "io_error"  # a transient fault or a slow disk; the file stays
    RUN_WHOLE = "run_whole"  # log-probabilities of the whole prompt were requested
    NO_MEMORY = "no_memory"  # no room to hold it, or to read it into

    @property
    def is_passing(self) -> bool:
        """Whether the node may be available later."""
        passing = (MissReason.IO_ERROR, MissReason.NO_MEMORY, MissReason.PREFILL_IS_FASTER)
        return self in passing
