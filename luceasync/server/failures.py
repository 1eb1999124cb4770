"""Maps exceptions to failures: an HTTP status, headers and a message; families turn them into
bodies.

Independent of routes and of any API's error object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from http import HTTPStatus

from starlette.exceptions import HTTPException

from luceasync.errors import (
    GenerationFailed,
    HostMemoryExhausted,
    QueueFull,
    RequestError,
    Unavailable,
)

MAX_MESSAGE_CHARS = 2000  # an error that quotes the request must not send all of it back
MAX_PARAM_CHARS = 300

# A quoted path, as Python quotes it, may contain spaces; a bare path ends at a space or a quote.
_QUOTED = re.compile(r"(?P<quote>['\"])/(?:(?!(?P=quote)).)*(?P=quote)")
_BARE = re.compile(r"(?<![\w./:'\"])/(?:[^\s/'\"]+/)*(?=[^\s/])")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as the client may see it. `param` is the invalid field, `code` a stable identifier
    for programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@singledispatch
def describe(error: Exception) -> Failure:
    """The failure to report to the client. Unexpected exceptions are not quoted: they may contain
    secrets.
    """
    return Failure(500, "The server had an error while processing the request.")


@describe.register
def _(error: GenerationFailed) -> Failure:
    return Failure(500, redact_paths(str(error)), code="generation_failed")


@describe.register
def _(error: RequestError) -> Failure:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    message, param = str(error)[:MAX_MESSAGE_CHARS], (error.param or "")[:MAX_PARAM_CHARS]
    return Failure(error.status, message, param or None, error.code, headers)


@describe.register
def _(error: QueueFull) -> Failure:
    headers = {"Retry-After": str(error.retry_after_s)}
    return Failure(429, str(error), code="queue_full", headers=headers)


@describe.register
def _(error: Unavailable) -> Failure:
    headers = {"Retry-After": str(error.retry_after_s)}
    return Failure(503, redact_paths(str(error)), code="unavailable", headers=headers)


@describe.register
def _(error: HostMemoryExhausted) -> Failure:
    headers = {"Retry-After": str(error.retry_after_s)}
    return Failure(503, str(error), code="kv_host_memory", headers=headers)


@describe.register
def _(error: HTTPException) -> Failure:
    """Raised by Starlette's router: 404 for an unknown route, 405 for an undeclared method."""
    phrase = HTTPStatus(error.status_code).phrase
    return Failure(
        error.status_code,
        f"{phrase}: no such route or method.",
        code=phrase.lower().replace(" ", "_"),
        headers=dict(error.headers or {}),
    )


def redact_paths(text: str) -> str:
    """`text` with each absolute path reduced to its last component: clients need not know where
    this machine keeps its files.
    """
    return _BARE.sub("", _QUOTED.sub(_last_name, text))


def _last_name(match: re.Match[str]) -> str:
    quote = match["quote"]
    return quote + match[0].strip(quote).rstrip("/").rpartition("/")[2] + quote
