"""Browsers get a page that loads from this server alone; programs get JSON."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from luceasync.request import ModelCard
from luceasync.server.web import page
from luceasync.server_config import ServerConfig
from luceasync.status import CacheStatus, SpeculationStatus
from tests.server.scripted import ScriptedEngine

WEB = Path(page.__file__).parent
VENDOR = WEB / "vendor"
OWN = [path for path in WEB.iterdir() if path.suffix in page.TYPES]
OF_THE_DOCS = {"api.css", "docs.js"}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_ZIPPED_BYTES = 600_000  # of all that is vendored; a page without formulas loads a third of it


def libraries() -> dict[str, str]:
    """The SHA-256 of each vendored file, as the table says."""
    rows = re.findall(
        r"^\| [^|]+ \| [\d.]+ \| [^|]+ \| (\S+) \| \S+ \| ([0-9a-f]{64}) \|$",
        (VENDOR / "README.md").read_text(),
        re.MULTILINE,
    )
    return dict(rows)


def used_files() -> set[str]:
    """What the page's own files name, and the formulas' style sheet."""
    used = {"index.html"}
    for path in OWN:
        text = path.read_text()
        used |= set(re.findall(r'(?:src|href)="web/([^"]+)"', text))
        used |= set(re.findall(r'(?:from|import) "\./([^"]+)"', text))
        used |= set(re.findall(r'"(?:\./|web/)(vendor/[^"]+)"', text))
    fonts = re.findall(r"url\((fonts/[^)]+\.woff2)\)", next(VENDOR.rglob("katex.css")).read_text())
    return used | {f"vendor/katex-0.19.1/{name}" for name in fonts}


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
    there = {
        path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.suffix in page.TYPES
    }
    assert used_files() == there - OF_THE_DOCS
    async with in_memory(ScriptedEngine()) as client:
        for name in there:
            plain = await client.get(f"/web/{name}", headers={"accept-encoding": "identity"})
            assert plain.status_code == 200 and plain.content == (WEB / name).read_bytes()
        for name in ("nothing.js", "page.py", "../page.py", "vendor", "vendor/README.md"):
            assert (await client.get(f"/web/{name}")).status_code == 404


async def test_files_are_compressed_and_asked_for_again_only_if_they_may_change(in_memory):
    async with in_memory(ScriptedEngine()) as client:
        for name in ("app.js", "vendor/uplot-1.6.32.js"):
            told = await client.get(f"/web/{name}", headers={"accept-encoding": "gzip"})
            assert told.headers["content-encoding"] == "gzip"
            assert told.content == (WEB / name).read_bytes()
            again = {"accept-encoding": "gzip", "if-none-match": told.headers["etag"]}
            assert (await client.get(f"/web/{name}", headers=again)).status_code == 304
            is_forever = "immutable" in told.headers["cache-control"]
            assert is_forever == name.startswith("vendor/")


def test_no_file_of_the_page_names_another_host() -> None:
    for path in OWN:
        assert not re.search(r"(src|href)=\"(https?:)?//|@import|url\(", path.read_text()), path


def test_libraries_are_those_of_the_table_with_their_licences() -> None:
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.suffix in page.TYPES
    }
    assert libraries() == found
    licences = {path.stem for path in (VENDOR / "licences").iterdir()}
    assert licences == {re.split(r"-[\d.]+", name)[0] for name in found}


def test_libraries_are_small() -> None:
    sizes = [len(gzip.compress((VENDOR / name).read_bytes(), 6)) for name in libraries()]
    assert sum(sizes) < MAX_ZIPPED_BYTES


def test_scripts_are_short() -> None:
    assert [path.name for path in OWN if len(path.read_text().splitlines()) > 500] == []


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
    engine.speculation = SpeculationStatus(10, (10, 10), (8, 2), off_reason="/home/x is gone")
    async with in_memory(engine) as client:
        told = (await client.get("/status")).json()
    assert (told["model"], told["num_lanes"], told["ready"]) == ("tiny", 4, True)
    assert told["cache"]["num_bytes"] == {"memory": 5} and "/home" not in told["cache"]["degraded"]
    assert told["speculation"]["tau"] == 2.0 and "/home" not in told["speculation"]["off_reason"]


async def test_thinking_is_offered_where_the_model_can(in_memory):
    for template, thinks in (("{{ messages }}", False), ("{% if enable_thinking %}", True)):
        engine = ScriptedEngine()
        engine.card = ModelCard("t", 0, 8, 1, "f", chat_template=template, thinks=True)
        async with in_memory(engine) as client:
            assert (await client.get("/status")).json()["thinks"] == thinks
