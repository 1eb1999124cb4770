"""The one model that is served is listed, and found by its name."""

from __future__ import annotations

from dataclasses import replace

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


async def test_an_unknown_model_is_404_in_openais_words(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["message"].startswith("The model `org/other` does not exist")
    assert error["message"].endswith("This server serves `tiny`.")
