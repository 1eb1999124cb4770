"""A store behind the directory: what is fetched is checked as any file is, and one that is slow,
wrong or gone costs a request no more than its patience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest

from luceasync.disk_cache import object_store
from luceasync.disk_cache.codec import Half
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.object_store import Health, NodeName, StoreSpec
from luceasync.errors import ConfigError
from tests.disk_cache.node_files import (
    END_SHAPES,
    KEY,
    NAMESPACE,
    contents_of,
    end_of,
    node,
)
from tests.disk_cache.tiers import as_bytes, quarantined, tier_of

PATIENCE_S = 5.0
DEADLINE_S = 20.0
ROWS, END = (NodeName(KEY, half) for half in Half)
OTHER_KEY = "cd" * 32


@pytest.fixture(autouse=True)
def hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written goes up at once."""
    (tmp_path / "store").mkdir()
    monkeypatch.setattr("luceasync.disk_cache.disk.MIN_UPLOAD_TOKENS", 0)
    monkeypatch.setattr(object_store, "UPLOAD_SHARE", 1.0)


@asynccontextmanager
async def server(root: Path, name: str, secret: bytes | None = None) -> AsyncIterator[DiskTier]:
    """The tier of a server with a directory of its own, and the store of all."""
    spec = StoreSpec(f"file://{root}/store", secret)
    async with tier_of(root / name, store=spec) as tier:
        uploading = asyncio.create_task(tier.upload())
        yield tier
        uploading.cancel()
        await asyncio.wait([uploading])


def objects(root: Path) -> list[Path]:
    names = (path for path in root.glob("store/*/*/*") if path.suffix in (".safetensors", ".end"))
    return sorted(names)


async def upload(root: Path, secret: bytes | None = None) -> dict[str, bytes]:
    """Have one server put a node into the store; what it holds."""
    async with server(root, "theirs", secret) as theirs:
        await put(theirs)
        async with asyncio.timeout(DEADLINE_S):
            while len(objects(root)) < 2:
                await asyncio.sleep(0.005)
        return as_bytes(await theirs.read(KEY))


async def put(tier: DiskTier, seed: int = 0) -> None:
    contents = contents_of(seed).items()
    await tier.write(node({name: each for name, each in contents if name not in END_SHAPES}))
    await tier.write(end_of({name: each for name, each in contents if name in END_SHAPES}))


def replace_calls(tier: DiskTier, **calls: Any) -> None:
    """Have calls of the store's package end otherwise."""
    store = tier._store
    assert store is not None
    names = ("exceptions", "head_async", "get_ranges_async", "put_async")
    store._obstore = SimpleNamespace(**{name: getattr(obstore, name) for name in names} | calls)


async def find(tier: DiskTier, *names: NodeName, patience_s: float = PATIENCE_S) -> list[str]:
    return [meta.key for meta in await tier.find(dict.fromkeys(names, patience_s))]


async def test_a_node_that_another_server_has_written_is_found_and_read(tmp_path: Path) -> None:
    expected = await upload(tmp_path)
    async with server(tmp_path, "ours") as ours:
        assert await find(ours, ROWS) == [KEY]
        (meta,) = await ours.find({ROWS: PATIENCE_S, END: PATIENCE_S})
        assert meta.end_file_bytes > 0
        assert as_bytes(await ours.read(KEY)) == expected
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("ours/*/*.*")} == {0o600}


async def test_what_is_there_or_nowhere_is_not_fetched(tmp_path: Path) -> None:
    async with server(tmp_path, "ours") as ours:
        assert await find(ours, ROWS) == []
        await put(ours)
        replace_calls(ours, head_async=None)
        assert await find(ours, ROWS) == [KEY]
        assert ours.degraded == ""


@pytest.mark.parametrize("damage", ["truncated", "another node's", "empty"])
async def test_an_object_that_is_not_what_its_name_says_is_not_believed(
    tmp_path: Path, damage: str
) -> None:
    await upload(tmp_path)
    path = next(path for path in objects(tmp_path) if path.suffix == ".safetensors")
    name = ROWS
    if damage == "another node's":
        name = NodeName(OTHER_KEY, Half.ROWS)
        target = path.parents[1] / OTHER_KEY[:2] / f"{OTHER_KEY}.safetensors"
        target.parent.mkdir()
        path.rename(target)
    else:
        path.write_bytes(path.read_bytes()[: 100 if damage == "truncated" else 0])
    async with server(tmp_path, "ours") as ours:
        assert await find(ours, name) == []
        assert len(quarantined(tmp_path / "ours" / NAMESPACE)) == 1


async def test_only_what_servers_with_the_same_secret_have_put_there_is_believed(
    tmp_path: Path,
) -> None:
    expected = await upload(tmp_path, b"a" * 32)
    for name, secret, keys in (("b", b"b" * 32, []), ("a", b"a" * 32, [KEY])):
        async with server(tmp_path, name, secret) as ours:
            assert await find(ours, ROWS, END) == keys
    async with server(tmp_path, "a", b"a" * 32) as ours:
        assert as_bytes(await ours.read(KEY)) == expected


async def test_a_store_that_hangs_is_a_miss_within_the_patience(tmp_path: Path) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.sleep(3600)

    async with server(tmp_path, "ours") as ours:
        replace_calls(ours, head_async=hang)
        began_s = time.monotonic()
        assert await find(ours, ROWS, patience_s=0.05) == []
        assert time.monotonic() - began_s < DEADLINE_S
        assert "in time" in ours.degraded


async def test_after_three_failures_the_store_is_left_alone_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = 0

    async def fail(*_: object, **__: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise obstore.exceptions.GenericError("no route to the store\nmore of it")

    now_s = 0.0
    async with server(tmp_path, "ours") as ours:
        replace_calls(ours, head_async=fail)
        assert ours._store is not None
        ours._store._health = Health(lambda: now_s)
        for _ in range(5):
            assert await find(ours, ROWS) == []
        assert num_calls == object_store.NUM_FAILURES
        assert ours.degraded.endswith(": no route to the store")
        assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
        now_s = object_store.REST_S + 1
        replace_calls(ours)
        await find(ours, ROWS)
        assert ours.degraded == ""


async def test_what_would_come_too_late_by_earlier_rates_is_not_fetched(
    tmp_path: Path,
) -> None:
    await upload(tmp_path)
    async with server(tmp_path, "ours") as ours:
        assert ours._store is not None
        ours._store._observe(1, 1.0)
        replace_calls(ours, get_ranges_async=None)
        assert await find(ours, ROWS) == []
        assert ours.degraded == ""


async def test_a_link_that_was_too_slow_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    async def hang(*_: object, **__: object) -> None:
        nonlocal num_calls
        num_calls += 1
        await asyncio.sleep(DEADLINE_S)

    await upload(tmp_path)
    async with server(tmp_path, "ours") as ours:
        replace_calls(ours, get_ranges_async=hang)
        for _ in range(3):
            assert await ours.find({ROWS: 0.1}) == []
        assert num_calls == 1
        replace_calls(ours)
        monkeypatch.setattr(object_store, "REST_S", 0.0)
        assert await find(ours, ROWS) == [KEY]


async def test_a_client_that_leaves_says_nothing_about_the_link(tmp_path: Path) -> None:
    """What it waited for had come so far is not known, and need not have been late."""
    asked = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.sleep(DEADLINE_S)

    await upload(tmp_path)
    async with server(tmp_path, "ours") as ours:
        replace_calls(ours, get_ranges_async=hang)
        finding = asyncio.create_task(find(ours, ROWS))
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
            finding.cancel()
            await asyncio.wait([finding])
        assert finding.cancelled() and ours._store is not None
        assert ours._store._bytes_per_s is None and ours.degraded == ""
        replace_calls(ours)
        assert await find(ours, ROWS) == [KEY]


async def test_objects_do_not_change(tmp_path: Path) -> None:
    await upload(tmp_path)
    before = [path.read_bytes() for path in objects(tmp_path)]
    async with server(tmp_path, "ours") as ours:
        await put(ours, seed=1)
        store = ours._store
        assert store is not None
        async with asyncio.timeout(DEADLINE_S):
            while not store._there >= {ROWS, END}:
                await asyncio.sleep(0.005)
    assert [path.read_bytes() for path in objects(tmp_path)] == before


@pytest.mark.parametrize(
    ("url", "words"),
    [("ftp://host/x", "s3://"), ("bucket", "s3://"), ("s3://", "--kv-store s3://: ")],
)
def test_a_store_of_another_kind_is_refused(tmp_path: Path, url: str, words: str) -> None:
    async def opened() -> None:
        async with tier_of(tmp_path, store=StoreSpec(url)):
            pass

    with pytest.raises(ConfigError, match=words) as caught:
        asyncio.run(opened())
    assert str(caught.value).startswith(f"--kv-store {url}")
    assert "\n" not in str(caught.value)


async def test_a_store_that_refuses_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise obstore.exceptions.PermissionDeniedError("403: not yours\nmore of it")

    monkeypatch.setattr(obstore, "head_async", refuse)
    with pytest.raises(ConfigError, match=r"^--kv-store file://\S+: 403: not yours$"):
        async with server(tmp_path, "ours"):
            pass


async def test_a_store_that_is_gone_at_the_start_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upload(tmp_path)

    async def gone(*_: object) -> None:
        raise obstore.exceptions.GenericError("connection refused")

    with monkeypatch.context() as patched:
        patched.setattr(obstore, "head_async", gone)
        server_of_ours = server(tmp_path, "ours")
        ours = await server_of_ours.__aenter__()
    assert ours.degraded == f"--kv-store file://{tmp_path}/store: connection refused"
    assert await find(ours, ROWS) == [KEY]
    assert ours.degraded == ""
    await server_of_ours.__aexit__(None, None, None)


async def test_what_a_namespace_depends_on_is_said_once(tmp_path: Path) -> None:
    for number, dtype in enumerate(("bf16", "fp32")):  # the second one changes nothing
        spec = StoreSpec(f"file://{tmp_path}/store", facts={"kv_dtype": dtype})
        async with tier_of(tmp_path / f"{number}", store=spec) as tier:
            assert tier.degraded == ""
    upkeep = object_store.StoreUpkeep(f"file://{tmp_path}/store")
    assert upkeep.namespaces() == [NAMESPACE]
    assert upkeep.facts(NAMESPACE) == {"kv_dtype": "bf16"}
    assert upkeep.facts("other") is None
    assert upkeep.total(NAMESPACE).num_nodes == 0


async def test_nodes_of_another_schema_under_our_names_are_an_error_at_the_start(
    tmp_path: Path,
) -> None:
    theirs = StoreSpec(f"file://{tmp_path}/store", facts={"schema": "luceasync.node.9"})
    async with tier_of(tmp_path / "theirs", store=theirs):
        pass
    ours = replace(theirs, facts={"schema": "luceasync.node.2"})
    words = r"namespace\.json is of schema 'luceasync\.node\.9'; expected 'luceasync\.node\.2'$"
    with pytest.raises(ConfigError, match=rf"^--kv-store \S+: {NAMESPACE}/{words}"):
        async with tier_of(tmp_path / "ours", store=ours):
            pass


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"luceasync\[store\]"):
        object_store.ObjectStore(StoreSpec("file:///x"), None, "x")  # type: ignore[arg-type]
