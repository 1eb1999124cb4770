"""The list of models, and the form of errors."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from luceasync.server.failures import Failure
from luceasync.server.openai.common import error_body
from tests.server.scripted import ScriptedEngine


async def test_the_served_model_is_listed_and_found_by_name(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        listed = (await client.get("/v1/models")).json()
        found = (await client.get("/v1/models/tiny")).json()
    assert listed == {"object": "list", "data": [found]}
    assert (found["id"], found["object"], found["max_model_len"]) == ("tiny", "model", 4096)


async def test_every_name_of_it_is_listed(in_memory):
    engine = ScriptedEngine()
    engine.card = replace(engine.card, aliases=("*", "small"))
    async with in_memory(engine) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "small"]
        assert (await client.get("/v1/models/anything")).json()["id"] == "anything"


async def test_an_unknown_model_is_a_404_worded_like_openais(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["message"].startswith("The model `org/other` does not exist")
    assert error["message"].endswith("This server serves `tiny`.")


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
