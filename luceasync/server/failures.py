"""What goes wrong, as the OpenAI error object and an HTTP status.

Owns the mapping from exceptions to statuses, types and codes. Knows nothing of routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from luceasync.errors import GenerationFailed, QueueFull, RequestError, Unavailable

LOADING_RETRY_AFTER_S = 1


class ErrorObject(msgspec.Struct):
    """OpenAI's error object; every failure of this server is told in one."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status with the error object and the headers that go with it."""

    status: int
    error: ErrorObject
    headers: dict[str, str]

    def body(self) -> ErrorBody:
        """What an event of a stream that has begun carries."""
        return ErrorBody(self.error)

    def response(self) -> Response:
        """The answer when nothing was sent yet."""
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


@singledispatch
def describe(error: Exception) -> Failure:
    """Tell `error` to a client. What we did not raise on purpose is not quoted: it may hold
    secrets.
    """
    message = "The server had an error while processing the request."
    return Failure(500, ErrorObject(message, "server_error"), {})


@describe.register
def _(error: GenerationFailed) -> Failure:
    return Failure(500, ErrorObject(str(error), "server_error", code="generation_failed"), {})


@describe.register
def _(error: RequestError) -> Failure:
    names = {401: "authentication_error", 404: "not_found_error"}
    kind = names.get(error.status, "invalid_request_error")
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return Failure(error.status, ErrorObject(str(error), kind, error.param, error.code), headers)


@describe.register
def _(error: QueueFull) -> Failure:
    headers = {"Retry-After": str(error.retry_after_s)}
    return Failure(429, ErrorObject(str(error), "rate_limit_error", code="queue_full"), headers)


@describe.register
def _(error: Unavailable) -> Failure:
    headers = {"Retry-After": str(LOADING_RETRY_AFTER_S)}
    return Failure(503, ErrorObject(str(error), "server_error", code="unavailable"), headers)


@describe.register
def _(error: HTTPException) -> Failure:
    """What Starlette's router raises: 404 for an unknown route, 405 for an undeclared method."""
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return Failure(
        error.status_code,
        ErrorObject(f"{phrase}: no such route or method.", kind, code=code),
        dict(error.headers or {}),
    )
