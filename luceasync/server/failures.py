"""What goes wrong, as an HTTP status with its headers and words; a family makes the body of it.

Owns the mapping from exceptions to statuses. Knows nothing of routes or of any API's error object.
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
    NoHostMemory,
    QueueFull,
    RequestError,
    Unavailable,
)

# What a client is told of a fault: its words, without where this machine keeps its files. Knows
# no fault and no page.


# As Python quotes a name, which may hold spaces; else up to a space or the end of a phrase.
_QUOTED = re.compile(r"(?P<quote>['\"])/(?:(?!(?P=quote)).)*(?P=quote)")
_BARE = re.compile(r"(?<![\w./:'\"])/(?:[^\s/'\"]+/)*(?=[^\s/])")


def without_paths(words: str) -> str:
    """`words` with the last name of each absolute path in its place."""
    return _BARE.sub("", _QUOTED.sub(_last_name, words))


def _last_name(match: re.Match[str]) -> str:
    quote = match["quote"]
    return quote + match[0].strip(quote).rstrip("/").rpartition("/")[2] + quote


MAX_MESSAGE_CHARS = 2000  # of a refusal: whoever quotes a request must not send it back
MAX_PARAM_CHARS = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as a client may see it. `param` is the field at fault, `code` a stable word for
    programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@singledispatch
def describe(error: Exception) -> Failure:
    """Tell `error` to a client. What we did not raise on purpose is not quoted: it may hold
    secrets.
    """
    return Failure(500, "The server had an error while processing the request.")


@describe.register
def _(error: GenerationFailed) -> Failure:
    return Failure(500, without_paths(str(error)), code="generation_failed")


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
    return Failure(503, without_paths(str(error)), code="unavailable", headers=headers)


@describe.register
def _(error: NoHostMemory) -> Failure:
    headers = {"Retry-After": str(error.retry_after_s)}
    return Failure(503, str(error), code="kv_host_memory", headers=headers)


@describe.register
def _(error: HTTPException) -> Failure:
    """What Starlette's router raises: 404 for an unknown route, 405 for an undeclared method."""
    phrase = HTTPStatus(error.status_code).phrase
    return Failure(
        error.status_code,
        f"{phrase}: no such route or method.",
        code=phrase.lower().replace(" ", "_"),
        headers=dict(error.headers or {}),
    )
