"""The one model that is served is listed, and found by its name."""

from __future__ import annotations

from tests.server.scripted import ScriptedEngine


async def test_the_served_model_is_listed_and_found_by_name(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        listed = (await client.get("/v1/models")).json()
        found = (await client.get("/v1/models/tiny")).json()
    assert listed == {"object": "list", "data": [found]}
    assert (found["id"], found["object"], found["max_model_len"]) == ("tiny", "model", 4096)


async def test_an_unknown_model_is_404_in_openais_words(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["message"].startswith("The model `org/other` does not exist")
