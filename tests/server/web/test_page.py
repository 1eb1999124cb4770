"""Browsers get a page that loads from this server alone; programs get JSON."""

from __future__ import annotations

import re
from pathlib import Path

from luceasync.config import ServerConfig
from luceasync.server.web import page
from luceasync.status import CacheStatus, SpeculationStatus
from tests.server.scripted import ScriptedEngine

WEB = Path(page.__file__).parent
FILES = [path for path in WEB.iterdir() if path.suffix in page.TYPES]
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_a_browser_gets_the_page_and_a_program_json(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        shown = await client.get("/", headers=BROWSER)
        told = await client.get("/")
        looked = await client.head("/")
    assert shown.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in shown.headers["content-security-policy"]
    assert "unsafe" not in shown.headers["content-security-policy"]
    assert told.json()["name"] == "luceasync" and looked.status_code == 200


async def test_the_page_uses_exactly_the_files_that_exist(in_memory):
    named = set()
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"(src|href)=\"(https?:)?//|@import|url\(", text), path
        named |= set(re.findall(r'(?:src|href)="(web/[^"]+)"', text))
        named |= {f"web/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named == {f"web/{path.name}" for path in FILES} - {
        "web/index.html",
        "web/api.css",
    }
    async with in_memory(ScriptedEngine()) as client:
        for name in named:
            response = await client.get(f"/{name}")
            assert response.status_code == 200 and response.content == (WEB / name[4:]).read_bytes()
            again = {"if-none-match": response.headers["etag"]}
            assert (await client.get(f"/{name}", headers=again)).status_code == 304
        assert (await client.get("/web/nothing.js")).status_code == 404


async def test_the_page_needs_no_key_but_the_status_does(in_memory):
    async with in_memory(ScriptedEngine(), ServerConfig(api_keys=("one",))) as client:
        assert (await client.get("/", headers=BROWSER)).status_code == 200
        assert (await client.get("/web/app.js")).status_code == 200
        assert (await client.get("/status")).status_code == 401


def test_no_script_writes_html() -> None:
    for path in WEB.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", path.read_text()
        )


async def test_the_status_contains_no_path(in_memory):
    engine = ScriptedEngine()
    engine.cache = CacheStatus(num_bytes={"memory": 5}, degraded="/home/x is full")
    engine.speculation = SpeculationStatus(10, (10, 10), (8, 2))
    async with in_memory(engine) as client:
        told = (await client.get("/status")).json()
    assert (told["model"], told["num_lanes"], told["ready"]) == ("tiny", 4, True)
    assert told["cache"]["num_bytes"] == {"memory": 5} and "/home" not in told["cache"]["degraded"]
    assert told["speculation"]["tau"] == 2.0
