"""Memory for the nodes of another process: made and given out here, mapped by both.

Knows no node and no process.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

from luceasync.errors import ConfigError
from luceasync.hoststore.arena import Arena, NoPageLock
from luceasync.ipc.memory import SealedMemory

ALIGN_BYTES = 2 << 20  # of a memory for nodes
SLAB_BYTES = 32 << 20  # of it, whose pages are made at a time
SPARE_BYTES = 256 << 20  # of it, with pages that nobody uses yet


def whole_bytes(num_bytes: float) -> int:
    """Enough for so many, in whole pages of any kind."""
    return -(-int(num_bytes) // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES


def lend_memory(
    num_bytes: int, least_spare_bytes: int, closing: ExitStack
) -> tuple[Arena, SealedMemory]:
    """New memory, and what is lent of it; both go with `closing`. Pages are made while at least
    `least_spare_bytes` have none. Raises ConfigError where the system shares no memory.
    """
    try:
        memory = SealedMemory.create("luceasync-nodes", num_bytes, populate=False)
    except OSError as error:
        raise ConfigError(
            f"--prefix-cache-memory: no {num_bytes} bytes can be shared with another process "
            f"({error.strerror}); --ipc-transport stream shares none"
        ) from None
    closing.callback(memory.close)
    never = threading.Event()  # pages are made when they are needed, not while nothing runs
    spare_bytes = max(SPARE_BYTES, least_spare_bytes)
    arena = Arena(num_bytes, NoPageLock(), SLAB_BYTES, never, spare_bytes, mapping=memory.mapping)
    closing.callback(arena.close)
    return arena, memory
