"""What is kept can be listed and dropped by those who have an admin key, and by nobody else."""

from __future__ import annotations

import pytest

from luceasync.config import ServerConfig
from tests.server.scripted import ScriptedEngine

ADMIN = {"authorization": "Bearer root"}
CONFIG = ServerConfig(api_keys=("one",), admin_keys=("root",))


async def test_nodes_are_listed_and_dropped(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine, CONFIG) as client:
        listed = (await client.get("/admin/cache", headers=ADMIN)).json()
        assert listed["num_nodes"] == 2 and listed["nodes"][0]["key"] == "ab" * 32
        one = await client.delete("/admin/cache/" + "ab" * 32, headers=ADMIN)
        assert one.json() == {"dropped": 1} and engine.kept == ["cd" * 32]
        again = await client.delete("/admin/cache/" + "ab" * 32, headers=ADMIN)
        assert again.status_code == 404
        odd = await client.delete("/admin/cache/../x", headers=ADMIN)
        assert odd.status_code == 404
        assert (await client.delete("/admin/cache/xyz", headers=ADMIN)).status_code == 400
        assert (await client.delete("/admin/cache", headers=ADMIN)).json() == {"dropped": 1}
    assert engine.kept == []


@pytest.mark.parametrize("config", [ServerConfig(), CONFIG])
async def test_nobody_else_may(in_memory, config):
    engine = ScriptedEngine()
    async with in_memory(engine, config) as client:
        for method in ("GET", "DELETE"):
            headers = {"authorization": "Bearer one"}
            refused = await client.request(method, "/admin/cache", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_admin_key")
    assert len(engine.kept) == 2
