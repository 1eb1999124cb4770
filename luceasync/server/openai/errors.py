"""OpenAI's error object.

Owns its fields and the type that follows from a status. Knows nothing of exceptions.
"""

from __future__ import annotations

import msgspec

from luceasync.errors import RequestError
from luceasync.server.failures import Failure

MAX_NAME_CHARS = 200  # of a model that there is not
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: ErrorObject


def error_body(failure: Failure) -> ErrorBody:
    """`failure` in OpenAI's shape."""
    kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind = TYPES.get(failure.status, kind)
    return ErrorBody(ErrorObject(failure.message, kind, failure.param, failure.code))


def unknown_model(name: str) -> RequestError:
    """The 404 for a model that is not served, worded as OpenAI words it."""
    return RequestError(
        f"The model `{name[:MAX_NAME_CHARS]}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
        status=404,
    )
