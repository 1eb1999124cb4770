"""Whether the model is there to answer.

Owns the refusal while it is not. Knows nothing of why.
"""

from __future__ import annotations

from luceasync.errors import Unavailable
from luceasync.request import Engine


def require_ready(engine: Engine) -> None:
    """Raise Unavailable unless the model is loaded."""
    status = engine.status()
    if not status.ready:
        raise Unavailable(status.detail, status.retry_after_s)
