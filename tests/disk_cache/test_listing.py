"""A scan reports what is there and what changed, and opens nothing twice."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.disk_cache import listing as module
from luceasync.disk_cache.codec import NodePart
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.listing import NodeMeta, list_nodes, misplaced
from luceasync.disk_cache.reader import NodeFile
from luceasync.prefix_tree.node import pack_tokens
from tests.disk_cache.faulty_files import FaultyFiles, failing
from tests.disk_cache.node_files import KEY, METADATA, NAMESPACE, contents_of, file_of, node
from tests.disk_cache.tiers import quarantined, tier_of

OTHER_KEY = "ef" * 32


async def put(tier: DiskTier, key: str, *leave_out: str) -> None:
    contents = {name: c for name, c in contents_of().items() if name not in leave_out}
    await tier.write(node(contents, key=key))


def counting(opened: list[int], number: int | None = None) -> FaultyFiles:
    """Files that note each that is opened and, with a number, fail to open it."""

    def fault() -> None:
        opened.append(1)
        if number is not None:
            failing(number)()

    return FaultyFiles(fault, before="open")


async def test_a_scan_reports_what_a_node_holds(tier: DiskTier, path: Path) -> None:
    await put(tier, KEY)
    (found,) = (await tier.scan()).nodes
    assert found.tokens == pack_tokens(contents_of()["tokens"])
    assert found.parts == {NodePart.SPAN, NodePart.STATE, NodePart.FEATURES}
    assert found.end_bytes == 3 * 5 * 4 + 2 * 4 * 4 * 4 + 13
    assert found.span_bytes + found.end_bytes == found.num_bytes == path.stat().st_size


async def test_a_scan_reports_what_others_added_and_removed(tmp_path: Path) -> None:
    async with tier_of(tmp_path) as one, tier_of(tmp_path) as two:
        await put(two, KEY)
        scan = await one.scan()
        assert ([n.key for n in scan.added], scan.removed) == ([KEY], ())
        await put(two, OTHER_KEY)
        await two.remove(KEY)
        scan = await one.scan()
        assert [[n.key for n in nodes] for nodes in (scan.nodes, scan.added)] == [[OTHER_KEY]] * 2
        assert [(n.key, n.metadata) for n in scan.removed] == [(KEY, METADATA)]
        assert (await one.scan()).added == ()


async def test_a_node_that_holds_something_else_now_is_added_again(tier: DiskTier) -> None:
    await put(tier, KEY)
    await tier.scan()
    await put(tier, KEY, "ls1_delta.2", "ls0_conv.1")
    scan = await tier.scan()
    assert (scan.added, scan.removed) == (scan.nodes, ())
    assert NodePart.STATE not in scan.added[0].parts


async def test_known_files_are_not_opened_again(tmp_path: Path, path: Path) -> None:
    opened: list[int] = []
    async with tier_of(tmp_path, counting(opened)) as tier:
        await put(tier, KEY)
        for _ in range(3):
            await tier.scan()
        assert len(opened) == 1
        os.utime(path, (1000, 1000))
        scan = await tier.scan()
        assert (len(opened), scan.added, scan.nodes[0].last_used_s) == (2, (), 1000)


async def test_a_shared_directory_is_looked_at_in_parts(tmp_path: Path) -> None:
    keys = [f"{digit:x}" * 64 for digit in range(16)]
    async with tier_of(tmp_path, is_shared=True) as tier, tier_of(tmp_path) as other:
        for key in keys:
            await put(other, key)
        await tier.scan()
        for key in keys:
            os.utime(tmp_path / NAMESPACE / f"{key}.safetensors", (1000, 1000))
        await put(other, OTHER_KEY)
        await other.remove(keys.pop())
        scan = await tier.scan()  # a new name and a missing one are told at once
        assert ([n.key for n in scan.added], len(scan.removed)) == ([OTHER_KEY], 1)
        scans = [await tier.scan() for _ in range(15)]
        num_seen = [sum(n.last_used_s == 1000 for n in scan.nodes) for scan in scans]
        assert num_seen == [*range(2, 15), 14, 15]


async def test_unreadable_files_stay_listed(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = counting([], errno.EMFILE)
    async with tier_of(tmp_path, files) as tier:
        with monkeypatch.context() as sound:
            sound.setattr(files, "at", lambda when, step: None)
            await put(tier, KEY)
            await tier.scan()
        os.utime(path, (1000, 1000))
        scan = await tier.scan()
        assert ([n.key for n in scan.nodes], scan.removed) == ([KEY], ())
        assert not scan.is_whole
        assert os.strerror(errno.EMFILE) in tier.degraded


@pytest.mark.parametrize("name", ["", NAMESPACE])
async def test_a_directory_that_cannot_be_listed_now_loses_no_node(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await put(tier, KEY)
    await tier.scan()
    listed = tier._files.entries

    def entries(path: Path) -> list[os.DirEntry[str]]:
        return failing(errno.EIO)() if path == tmp_path / name else listed(path)

    monkeypatch.setattr(tier._files, "entries", entries)
    scan = await tier.scan()
    assert ([n.key for n in scan.nodes], scan.added, scan.removed) == ([KEY], (), ())
    assert not scan.is_whole
    assert os.strerror(errno.EIO) in tier.degraded


async def test_a_directory_that_is_gone_has_lost_its_nodes(tier: DiskTier, path: Path) -> None:
    await put(tier, KEY)
    await tier.scan()
    path.unlink()
    (path.parent / "quarantine").rmdir()
    path.parent.rmdir()
    assert [n.key for n in (await tier.scan()).removed] == [KEY]


async def test_damaged_tokens_are_found_by_a_scan(tier: DiskTier, path: Path) -> None:
    content = file_of(contents_of())
    at = content.index(contents_of()["tokens"])
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert (await tier.scan()).nodes == ()
    assert len(quarantined(path.parent)) == 1


async def test_a_node_of_another_schema_only_takes_up_space(
    tier: DiskTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("luceasync.disk_cache.codec.SCHEMA", "luceasync.node.1")
        path.write_bytes(file_of(contents_of()))
    (found,) = (await tier.scan()).nodes
    assert (found.num_bytes, found.metadata) == (path.stat().st_size, None)
    assert len(found.tokens) == 0


def placed(key: str, parent: str, begin: int, end: int) -> NodeMeta:
    metadata = replace(METADATA, key=key, parent=parent, begin=begin, end=end)
    return NodeMeta(NAMESPACE, key, 1, 0.0, metadata)


def test_nodes_on_a_cycle_are_misplaced() -> None:
    sound = [placed("aa", "", 0, 64), placed("bb", "aa", 64, 128), placed("cc", "gone", 64, 128)]
    assert misplaced(sound) == set()
    circle = [placed("dd", "ee", 64, 128), placed("ee", "dd", 128, 192)]
    assert misplaced([*sound, *circle]) == {"dd"}
    assert misplaced([*sound, placed("ff", "bb", 64, 128)]) == {"ff"}


async def test_files_that_claim_more_tokens_than_are_read_are_listed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LISTED_TOKENS", 2 * 17)
    keys = [f"{number:02x}" * 32 for number in range(4)]
    async with tier_of(tmp_path) as tier:
        for age, key in enumerate(keys):
            await put(tier, key)
            os.utime(tmp_path / NAMESPACE / f"{key}.safetensors", (1000 - age, 1000 - age))
        for _ in range(2):
            nodes = {meta.key: meta for meta in (await tier.scan()).nodes}
            assert [bool(nodes[key].tokens) for key in keys] == [True, True, False, False]
            assert nodes[keys[3]].metadata is None and nodes[keys[3]].num_bytes > 0
        assert isinstance(await tier.read(keys[3]), NodeFile)  # it is whole


async def test_a_sparse_file_is_told_by_what_the_disk_holds_of_it(
    tier: DiskTier, path: Path
) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)
    listed = list_nodes(FileSystem(), path.parent, opening=None).whole[KEY]
    assert (listed.num_bytes, listed.allocated_bytes) == (1 << 30, 0)
