"""A failure in OpenAI's shape: its type follows from the status alone."""

from __future__ import annotations

import msgspec
import pytest

from luceasync.server.failures import Failure
from luceasync.server.openai.common import error_body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status, kind):
    assert error_body(Failure(status, "no")).error.type == kind


def test_absent_fields_are_null():
    told = msgspec.to_builtins(error_body(Failure(400, "no", param="n")))
    assert told == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
    }
