"""What a scan lists, removes and leaves alone; what the quarantine holds."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from luceasync.disk_cache.codec import TEMPORARY
from luceasync.disk_cache.directory import NUM_QUARANTINED, NodeDirectory, make_usable
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.outcomes import WriteOutcome
from luceasync.errors import ConfigError
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import FaultyFiles
from tests.disk_cache.node_files import (
    END_KINDS,
    KEY,
    METADATA,
    NAMESPACE,
    contents_of,
    file_of,
    node,
)
from tests.disk_cache.tiers import quarantined, reason_of, temporaries, tier_of


async def test_the_quarantine_keeps_the_newest_only(tier: DiskTier, path: Path) -> None:
    for _ in range(NUM_QUARANTINED + 3):
        path.write_bytes(b"damaged")
        assert await reason_of(tier) == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == NUM_QUARANTINED
    assert tier.counters().quarantined == NUM_QUARANTINED + 3


async def test_the_quarantines_of_all_models_keep_the_newest_together(tmp_path: Path) -> None:
    names = ["beef", "feed", "cafe"]
    for _ in range(NUM_QUARANTINED):
        for name in names:
            async with DiskTier(tmp_path, name, END_KINDS, min_free_bytes=0) as tier:
                path = tmp_path / name / f"{KEY}.safetensors"
                path.write_bytes(b"damaged")
                assert await reason_of(tier) == MissReason.CORRUPT
    held = [len(quarantined(tmp_path / name)) for name in names]
    assert sum(held) == NUM_QUARANTINED and min(held) > 4


async def test_a_directory_named_as_a_node_does_not_fill_the_quarantine(
    tier: DiskTier, path: Path
) -> None:
    """It cannot be removed like a file, and its content may be a user's."""
    for _ in range(3):
        path.mkdir()
        (path / "a file").write_text("kept")
        assert await reason_of(tier) == MissReason.CORRUPT
    for _ in range(NUM_QUARANTINED + 3):
        path.write_bytes(b"damaged")
        assert await reason_of(tier) == MissReason.CORRUPT
    found = quarantined(path.parent)
    assert sum(entry.is_file() for entry in found) == NUM_QUARANTINED
    assert sum(entry.is_dir() for entry in found) == 3


async def test_a_sparse_file_that_claims_to_be_huge_is_quarantined_unread(
    tier: DiskTier, path: Path
) -> None:
    path.write_bytes(file_of(contents_of()))
    os.truncate(path, 64 << 30)
    scan = await tier.scan()
    assert (scan.nodes, len(quarantined(path.parent))) == ((), 1)


async def test_a_scan_finds_nodes_by_header_and_age(tier: DiskTier, path: Path) -> None:
    await tier.write(node(contents_of()))
    os.utime(path, (1000, 1000))
    (found,) = (await tier.scan()).nodes
    assert (found.namespace, found.key, found.metadata) == (NAMESPACE, KEY, METADATA)
    assert (found.num_bytes, found.last_used_s) == (path.stat().st_size, 1000)
    assert await tier.touch(["00" * 32, KEY]) == 1
    assert (await tier.scan()).nodes[0].last_used_s > 1000


async def test_a_scan_lists_other_namespaces_for_the_budget(tmp_path: Path, tier: DiskTier) -> None:
    async with DiskTier(tmp_path, "beef", END_KINDS, min_free_bytes=0) as other:
        result = await other.write(node(contents_of(), namespace="beef"))
    (found,) = (await tier.scan()).nodes
    assert (found.namespace, found.metadata) == ("beef", None)
    assert found.num_bytes == result.num_bytes
    assert await tier.remove(KEY, "beef") == result.num_bytes
    assert (await tier.scan()).nodes == ()


async def test_a_scan_follows_no_link(tmp_path: Path, tier: DiskTier, path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(file_of(contents_of()))
    (tmp_path / "beef").mkdir()
    for link in (path, tmp_path / "beef" / path.name):
        link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "beef")
    assert (await tier.scan()).nodes == ()
    assert len(quarantined(path.parent)) == 1


async def test_a_scan_leaves_unknown_files_alone(tier: DiskTier, directory: Path) -> None:
    names = ["README", "x.safetensors", "AB" * 32 + ".safetensors", ".hidden.tmp", "a.tmp"]
    for name in names:
        (directory / name).write_bytes(b"mine")
    (directory.parent / "notes").mkdir()
    (directory.parent / "notes" / "today").touch()
    assert (await tier.scan()).nodes == ()
    assert {entry.name for entry in directory.iterdir()} == {*names, "quarantine"}
    assert (directory.parent / "notes" / "today").exists()


async def test_a_scan_quarantines_damaged_headers(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of())[:-1])
    assert (await tier.scan()).nodes == ()
    assert len(quarantined(path.parent)) == 1


async def test_a_scan_removes_old_and_abandoned_temporary_files(
    tier: DiskTier, directory: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f".{KEY}.{process}.00.tmp" for process in (dead.pid, os.getpid(), os.getppid())]
    for name in names:
        (directory / name).touch()
    os.utime(directory / names[1], (1000, 1000))
    await tier.scan()
    assert [entry.name for entry in temporaries(directory)] == [names[2]]


async def test_a_scan_leaves_a_writer_alone_whose_process_it_cannot_see(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, until: threading.Event
) -> None:
    monkeypatch.setattr("luceasync.disk_cache.directory.os.getpid", lambda: 999_999_999)
    reached = threading.Event()
    files = FaultyFiles(lambda: (reached.set(), until.wait()), before="rename")
    async with tier_of(tmp_path, files) as other, asyncio.TaskGroup() as group:
        writing = group.create_task(other.write(node(contents_of())))
        await asyncio.to_thread(reached.wait)
        await tier.scan()
        until.set()
    assert writing.result().outcome == WriteOutcome.WRITTEN


def test_a_directory_of_another_user_is_refused_with_both_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner_id = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: owner_id + 1)
    with pytest.raises(ConfigError, match=f"user {owner_id} owns it, this is user {owner_id + 1}"):
        make_usable(tmp_path)


async def test_of_another_hosts_temporary_file_only_the_age_tells(
    tier: DiskTier, directory: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    new, old = (f".{KEY}.{'0a' * 8}.{dead.pid}.{number}.tmp" for number in ("00", "01"))
    for name in (new, old):
        (directory / name).touch()
    os.utime(directory / old, (1000, 1000))
    await tier.scan()
    assert [entry.name for entry in temporaries(directory)] == [new]


async def test_ages_of_other_hosts_files_are_told_by_the_file_systems_clock(
    tier: DiskTier, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 9e9)  # this host's clock is far ahead
    name = f".{KEY}.{'0a' * 8}.1.00.tmp"
    (directory / name).touch()
    await tier.scan()
    assert [entry.name for entry in temporaries(directory)] == [name]


async def test_a_temporary_file_of_ours_names_this_host(directory: Path, tmp_path: Path) -> None:
    ours = NodeDirectory(FileSystem(), tmp_path, NAMESPACE, 0, END_KINDS)
    match = TEMPORARY.fullmatch(ours.temporary(KEY).name)
    assert match is not None
    assert (match["host"], match["process"]) == (FileSystem().host, str(os.getpid()))


async def test_a_node_is_touched_at_most_every_ten_minutes(tier: DiskTier, path: Path) -> None:
    await tier.write(node(contents_of()))
    now_s = time.time()
    for age_s, moves in ((300, False), (900, True)):
        os.utime(path, (now_s - age_s,) * 2)
        assert await tier.touch([KEY]) == 1
        assert (path.stat().st_mtime > now_s - 60) is moves
