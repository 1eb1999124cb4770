"""Anthropic's error object.

Source: docs.anthropic.com, API errors. Owns its fields and the type that follows from a status.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from luceasync.errors import RequestError
from luceasync.model_card import ModelCard
from luceasync.server.checks import cut
from luceasync.server.failures import Failure

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorObject(msgspec.Struct):
    type: str
    message: str


class ErrorBody(msgspec.Struct):
    """A whole error response, and the data of an error event."""

    error: ErrorObject
    type: Literal["error"] = "error"


def error_body(failure: Failure) -> ErrorBody:
    """`failure` in Anthropic's shape; the words name the field, which has no place of its own."""
    other = "api_error" if failure.status >= 500 else "invalid_request_error"
    return ErrorBody(ErrorObject(TYPES.get(failure.status, other), failure.message))


def unknown_model(name: str, card: ModelCard) -> RequestError:
    """The 404 for a model that is not served."""
    served = " or ".join(card.names)
    message = f"model: {cut(name)} is not served here; this server serves {served}."
    return RequestError(message, param="model", code="model_not_found", status=404)
