"""Threads that were told to end, and what is said where one does not.

Owns the deadline. Knows nothing of what they do.
"""

from __future__ import annotations

import logging
import threading

JOIN_S = 5.0

log = logging.getLogger(__name__)


def has_ended(thread: threading.Thread) -> bool:
    """Whether the thread, which was told to end, does so within JOIN_S; else that is said, and what
    it uses has to stay.
    """
    thread.join(JOIN_S)
    if thread.is_alive():
        log.error("thread %r did not end within %g s; it is left behind", thread.name, JOIN_S)
    return not thread.is_alive()
