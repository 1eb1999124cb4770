"""The end of this process by a deadline, whatever hangs in it.

Knows nothing of requests or of disks: a thread in a system call that never returns cannot be ended,
and the interpreter waits for it.
"""

from __future__ import annotations

import os
import sys
import threading

HANGING_STATUS = 1


def end_process_after(seconds: float) -> None:
    """End the process with HANGING_STATUS unless it has ended by itself in that time."""
    timer = threading.Timer(seconds, _end, [seconds])
    timer.daemon = True
    timer.start()


def _end(seconds: float) -> None:
    words = (
        f"The process was told to end {seconds:g} s ago, and something in it hangs: it ends now. "
        "What was on its way to the disk is lost.\n"
    )
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())
    finally:
        os._exit(HANGING_STATUS)
