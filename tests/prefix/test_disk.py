"""What the disk tier gives back is what was written, or a miss that says why."""

import asyncio
import errno
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.errors import ConfigError, CorruptNode
from luceasync.prefix.directory import NUM_QUARANTINED
from luceasync.prefix.disk import DiskTier, Miss, MissReason, NodeFile, WriteOutcome
from tests.prefix.faulty_files import BIG, STEPS, FaultyFiles, failing, hanging
from tests.prefix.node_files import KEY, METADATA, NAMESPACE, contents_of, file_of, node

ROOT = Path(__file__).parents[2]
OTHER_KEY = "ef" * 32


def tier_of(root: Path, files: FaultyFiles | None = None, **limits: float) -> DiskTier:
    return DiskTier(root, NAMESPACE, files=files, **{"min_free_bytes": 0, **limits})


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[DiskTier]:
    async with tier_of(tmp_path) as tier:
        yield tier


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / NAMESPACE


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / f"{KEY}.safetensors"


def quarantined(directory: Path) -> list[Path]:
    return sorted((directory / "quarantine").iterdir())


def temporaries(directory: Path) -> list[Path]:
    return sorted(directory.glob(".*.tmp"))


def as_bytes(found: NodeFile | Miss) -> dict[str, bytes]:
    assert isinstance(found, NodeFile), found
    return {name: bytes(view) for name, view in found.tensors.items()}


async def reason_of(tier: DiskTier, key: str = KEY) -> str:
    found = await tier.read(key)
    assert isinstance(found, Miss)
    return found.reason


async def test_what_is_written_is_read(tier: DiskTier, path: Path) -> None:
    contents = contents_of()
    result = await tier.write(KEY, *node(contents))
    assert (result.outcome, result.num_bytes) == (WriteOutcome.WRITTEN, path.stat().st_size)
    found = await tier.read(KEY)
    assert as_bytes(found) == contents
    assert found.header.metadata == METADATA
    assert path.read_bytes() == file_of(contents)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 << 20), max_size=6))
async def test_tensors_of_any_sizes_are_read_as_written(sizes: list[int]) -> None:
    shapes = {f"t{i}": ("U8", (size,)) for i, size in enumerate(sizes)}
    contents = contents_of(1, shapes)
    with tempfile.TemporaryDirectory() as root:
        async with tier_of(Path(root)) as tier:
            await tier.write(KEY, *node(contents, shapes))
            assert as_bytes(await tier.read(KEY)) == contents


async def test_nobody_else_may_look(tmp_path: Path, path: Path) -> None:
    async with tier_of(tmp_path / "new" / "cache") as tier:
        await tier.write(KEY, *node(contents_of()))
    found = {stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "new").rglob("*")}
    assert found == {0o700, 0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


async def test_what_was_never_written_is_absent(tier: DiskTier) -> None:
    assert await reason_of(tier) == MissReason.ABSENT
    assert not await tier.touch(KEY)
    assert not await tier.remove(KEY)


async def test_a_directory_removed_under_the_server_is_made_again(
    tier: DiskTier, directory: Path
) -> None:
    (directory / "quarantine").rmdir()
    directory.rmdir()
    assert await reason_of(tier) == MissReason.ABSENT
    assert (await tier.write(KEY, *node(contents_of()))).outcome == WriteOutcome.WRITTEN


async def test_a_cache_directory_that_is_a_file_is_refused_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match="--kv-cache-dir"):
        async with tier_of(tmp_path / "cache"):
            pass


async def test_buffers_that_do_not_fit_their_header_are_not_written(
    tier: DiskTier, directory: Path
) -> None:
    header, buffers = node(contents_of())
    with pytest.raises(CorruptNode):
        await tier.write(KEY, header, buffers[:-2])
    with pytest.raises(CorruptNode):
        await tier.write(OTHER_KEY, header, buffers)
    assert [entry.name for entry in directory.iterdir()] == ["quarantine"]


def flip(content: bytes, at: int, bit: int = 0) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


@st.composite
def damages(draw: st.DrawFn) -> bytes:
    """The file of a node with something wrong in it."""
    content = file_of(contents_of())
    at = draw(st.integers(0, len(content) - 1))
    page = at - at % 4096
    more = draw(st.binary(min_size=1, max_size=5000))
    zeroed = content[:page] + bytes(len(content[page : page + 4096])) + content[page + 4096 :]
    flipped = flip(content, at, draw(st.integers(0, 7)))
    in_data = flip(content, draw(st.integers(4096, len(content) - 1)))
    return draw(
        st.sampled_from([flipped, in_data, content[:at], content + more, zeroed, more + content])
    )


@settings(max_examples=150, deadline=None)
@given(damages())
async def test_damage_anywhere_is_a_miss_and_is_set_aside(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with tier_of(Path(root)) as tier:
            (Path(root) / NAMESPACE / f"{KEY}.safetensors").write_bytes(content)
            assert await reason_of(tier) == MissReason.CORRUPT
            assert await reason_of(tier) == MissReason.ABSENT
            (aside,) = quarantined(Path(root) / NAMESPACE)
            assert aside.read_bytes() == content


async def test_one_flipped_bit_in_each_tensor_is_seen(tier: DiskTier, path: Path) -> None:
    await tier.write(KEY, *node(contents_of()))
    header = (await tier.read(KEY)).header
    content = path.read_bytes()
    for slot in (slot for slot in header.slots if slot.begin < slot.end):
        path.write_bytes(flip(content, slot.end - 1, 7))
        assert await reason_of(tier) == MissReason.CORRUPT


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"\xff" * 8, (1 << 40).to_bytes(8, "big")])
async def test_no_header_at_all_is_damage(tier: DiskTier, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert await reason_of(tier) == MissReason.CORRUPT


async def test_a_file_longer_than_its_header_says_is_not_read(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of()))
    os.truncate(path, 1 << 42)  # sparse; more than there is memory
    assert await reason_of(tier) == MissReason.CORRUPT


async def test_two_files_that_changed_places_are_both_damaged(tier: DiskTier, path: Path) -> None:
    await tier.write(KEY, *node(contents_of(0)))
    await tier.write(OTHER_KEY, *node(contents_of(1), key=OTHER_KEY))
    other = path.with_name(f"{OTHER_KEY}.safetensors")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    assert [await reason_of(tier, key) for key in (KEY, OTHER_KEY)] == ["corrupt"] * 2


async def test_another_models_node_is_a_miss_and_stays(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of(), namespace="beef"))
    assert await reason_of(tier) == MissReason.FOREIGN
    assert path.exists()


async def test_another_schema_is_a_miss_and_stays(
    tier: DiskTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("luceasync.prefix.codec.SCHEMA", "luceasync.node.0")
        path.write_bytes(file_of(contents_of()))
    assert await reason_of(tier) == MissReason.FOREIGN
    assert path.exists()


def put_link(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    target.write_bytes(file_of(contents_of()))
    path.symlink_to(target)


def put_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


@pytest.mark.parametrize("put", [put_link, put_directory, os.mkfifo], ids=["link", "dir", "fifo"])
async def test_what_is_no_regular_file_is_set_aside_and_not_followed(
    tier: DiskTier, path: Path, put
) -> None:
    put(path)
    assert await reason_of(tier) == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == 1
    assert not os.path.lexists(path)
    elsewhere = path.parents[1] / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_bytes() == file_of(contents_of())


async def test_the_quarantine_keeps_the_newest_only(tier: DiskTier, path: Path) -> None:
    for _ in range(NUM_QUARANTINED + 3):
        path.write_bytes(b"damaged")
        assert await reason_of(tier) == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == NUM_QUARANTINED
    assert tier.counters().quarantined == NUM_QUARANTINED + 3


@pytest.mark.parametrize("step", ["open", "readinto"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
async def test_a_passing_fault_is_a_miss_that_keeps_the_file(
    tmp_path: Path, path: Path, step: str, number: int
) -> None:
    files = FaultyFiles(failing(number), before=step)
    async with tier_of(tmp_path, files) as tier:
        path.write_bytes(file_of(contents_of(0, BIG), BIG))
        assert await reason_of(tier) == MissReason.IO_ERROR
        assert os.strerror(number) in tier.degraded
    assert path.exists()
    assert not quarantined(path.parent)


async def test_a_file_cut_while_it_is_read_is_damage(tmp_path: Path, path: Path) -> None:
    files = FaultyFiles(lambda: os.truncate(path, 1 << 20), before="readinto")
    async with tier_of(tmp_path, files) as tier:
        path.write_bytes(file_of(contents_of(0, BIG), BIG))
        found = await tier.read(KEY)
    assert found.reason == MissReason.CORRUPT
    assert found.detail.startswith(f"{1 << 20} bytes: expected")


async def test_a_disk_that_hangs_is_a_miss_that_keeps_the_file(tmp_path: Path, path: Path) -> None:
    until = threading.Event()
    files = FaultyFiles(hanging(until), before="open")
    async with tier_of(tmp_path, files, read_timeout_s=0.01) as tier:
        path.write_bytes(file_of(contents_of()))
        assert await reason_of(tier) == MissReason.TIMEOUT
        until.set()
    assert path.exists()


async def test_what_cannot_be_removed_is_told(tier: DiskTier, path: Path) -> None:
    path.mkdir()
    assert not await tier.remove(KEY)
    assert path.name in tier.degraded


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ENOSPC, "no_space"), (errno.EIO, "io_error"), (errno.EMFILE, "io_error")],
)
async def test_a_write_that_fails_leaves_nothing_and_says_so(
    tmp_path: Path, directory: Path, step: str, number: int, outcome: str
) -> None:
    async with tier_of(tmp_path) as tier:
        await tier.write(OTHER_KEY, *node(contents_of(), key=OTHER_KEY))
    async with tier_of(tmp_path, FaultyFiles(failing(number), before=step)) as tier:
        assert (await tier.write(KEY, *node(contents_of(0, BIG), BIG))).outcome == outcome
        assert os.strerror(number) in tier.degraded
        assert tier.counters().writes == {outcome: 1}
        assert tier.pending_bytes == 0
    names = {entry.name for entry in directory.iterdir()}
    assert names == {"quarantine", f"{OTHER_KEY}.safetensors"}


async def test_a_write_that_succeeds_ends_the_degraded_state(tmp_path: Path) -> None:
    faults = [failing(errno.ENOSPC)]
    files = FaultyFiles(lambda: faults and faults.pop()(), before="write")
    async with tier_of(tmp_path, files) as tier:
        outcomes = [(await tier.write(KEY, *node(contents_of()))).outcome for _ in range(2)]
        assert outcomes == [WriteOutcome.NO_SPACE, WriteOutcome.WRITTEN]
        assert tier.degraded == ""
        assert as_bytes(await tier.read(KEY)) == contents_of()


async def test_a_name_that_could_not_be_synced_is_written_but_told(tmp_path: Path) -> None:
    files = FaultyFiles(failing(errno.EIO), before="sync_directory")
    async with tier_of(tmp_path, files) as tier:
        result = await tier.write(KEY, *node(contents_of()))
        assert (result.outcome, bool(result.detail)) == (WriteOutcome.WRITTEN, True)
        assert tier.degraded == result.detail
        assert as_bytes(await tier.read(KEY)) == contents_of()


async def test_free_space_that_must_stay_is_not_written_to(tmp_path: Path, path: Path) -> None:
    async with tier_of(tmp_path, min_free_bytes=1 << 60) as tier:
        result = await tier.write(KEY, *node(contents_of()))
    assert result.outcome == WriteOutcome.BELOW_FLOOR
    assert not path.exists()


async def test_no_more_waits_to_be_written_than_allowed(tmp_path: Path) -> None:
    until = threading.Event()
    files = FaultyFiles(hanging(until), before="create")
    async with tier_of(tmp_path, files, max_pending_bytes=1) as tier, asyncio.TaskGroup() as group:
        first = group.create_task(tier.write(KEY, *node(contents_of())))
        await asyncio.sleep(0)
        assert tier.pending_bytes > 1  # a single node may be larger than the limit
        assert (await tier.write(KEY, *node(contents_of()))).outcome == WriteOutcome.BUSY
        until.set()
    assert first.result().outcome == WriteOutcome.IO_ERROR


@pytest.mark.parametrize("step", STEPS)
async def test_a_write_that_takes_too_long_is_given_up_and_leaves_no_temporary(
    tmp_path: Path, directory: Path, step: str
) -> None:
    until = threading.Event()
    files = FaultyFiles(hanging(until), before=step)
    async with tier_of(tmp_path, files, write_timeout_s=0.2) as tier:
        result = await tier.write(KEY, *node(contents_of()))
        asyncio.get_running_loop().call_later(0.05, until.set)
    assert result.outcome == WriteOutcome.TIMEOUT
    assert not temporaries(directory)


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_write_leaves_no_temporary(
    tmp_path: Path, directory: Path, step: str
) -> None:
    until, reached = threading.Event(), threading.Event()
    files = FaultyFiles(lambda: (reached.set(), hanging(until)()), before=step)
    async with tier_of(tmp_path, files) as tier:
        writing = asyncio.create_task(tier.write(KEY, *node(contents_of())))
        await asyncio.to_thread(reached.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        asyncio.get_running_loop().call_later(0.05, until.set)
    assert not temporaries(directory)
    assert tier.pending_bytes == 0


async def test_a_scan_finds_what_is_there_by_header_and_age(tier: DiskTier, path: Path) -> None:
    await tier.write(KEY, *node(contents_of()))
    os.utime(path, (1000, 1000))
    (found,) = await tier.scan()
    assert (found.namespace, found.key, found.metadata) == (NAMESPACE, KEY, METADATA)
    assert (found.num_bytes, found.last_used_s) == (path.stat().st_size, 1000)
    assert await tier.touch(KEY)
    assert (await tier.scan())[0].last_used_s > 1000


async def test_a_scan_lists_other_namespaces_for_the_budget(tmp_path: Path, tier: DiskTier) -> None:
    async with DiskTier(tmp_path, "beef", min_free_bytes=0) as other:
        result = await other.write(KEY, *node(contents_of(), namespace="beef"))
    (found,) = await tier.scan()
    assert (found.namespace, found.metadata) == ("beef", None)
    assert found.num_bytes == result.num_bytes
    assert await tier.remove(KEY, "beef")
    assert await tier.scan() == []


async def test_a_scan_leaves_unknown_files_alone(tier: DiskTier, directory: Path) -> None:
    names = ["README", "x.safetensors", "AB" * 32 + ".safetensors", ".hidden.tmp", "a.tmp"]
    for name in names:
        (directory / name).write_bytes(b"mine")
    (directory.parent / "notes").mkdir()
    (directory.parent / "notes" / "today").touch()
    assert await tier.scan() == []
    assert {entry.name for entry in directory.iterdir()} == {*names, "quarantine"}
    assert (directory.parent / "notes" / "today").exists()


async def test_a_scan_sets_damaged_headers_aside(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of())[:-1])
    assert await tier.scan() == []
    assert len(quarantined(path.parent)) == 1


async def test_a_scan_removes_what_the_dead_left_and_the_old(
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
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luceasync.prefix.directory.os.getpid", lambda: 999_999_999)
    until, reached = threading.Event(), threading.Event()
    files = FaultyFiles(lambda: (reached.set(), until.wait()), before="rename")
    async with tier_of(tmp_path, files) as other, asyncio.TaskGroup() as group:
        writing = group.create_task(other.write(KEY, *node(contents_of())))
        await asyncio.to_thread(reached.wait)
        await tier.scan()
        until.set()
    assert writing.result().outcome == WriteOutcome.WRITTEN


def child(root: Path, when: str, step: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.prefix.faulty_files", str(root), when, step]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


async def expect_whole_nodes_or_none(root: Path) -> int:
    """How many of the child's nodes are there, each as it was written."""
    async with tier_of(root) as tier:
        keys = {found.key for found in await tier.scan()}
        for number in range(4):
            found = await tier.read(f"{number:08x}")
            if f"{number:08x}" in keys:
                assert as_bytes(found) == contents_of(number, BIG)
            else:
                assert found.reason == MissReason.ABSENT
    assert not temporaries(root / NAMESPACE)
    assert not quarantined(root / NAMESPACE)
    return len(keys)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_process_killed_at_any_step_leaves_a_whole_node_or_none(
    tmp_path: Path, when: str, step: str
) -> None:
    with child(tmp_path, when, step) as process:
        assert process.wait(60) == -9
    is_renamed = (when, step) == ("after", "rename") or step == "sync_directory"
    assert await expect_whole_nodes_or_none(tmp_path) == int(is_renamed)


async def test_a_process_killed_at_any_time_leaves_whole_nodes_only(tmp_path: Path) -> None:
    source = random.Random(0)
    for _ in range(6):
        with child(tmp_path, "before", "never") as process:
            time.sleep(source.uniform(0, 0.15))
            process.kill()
        await expect_whole_nodes_or_none(tmp_path)


async def test_reads_are_whole_while_another_process_replaces_the_file(tmp_path: Path) -> None:
    contents = contents_of(0, BIG)
    with child(tmp_path, "before", "never") as process:
        async with tier_of(tmp_path) as tier:
            while isinstance(await tier.read("00000003"), Miss):
                pass
            for _ in range(20):
                assert as_bytes(await tier.read("00000000")) == contents
        process.kill()


async def test_two_tiers_write_and_remove_the_same_node(tmp_path: Path) -> None:
    header, buffers = node(contents_of())
    async with tier_of(tmp_path) as one, tier_of(tmp_path) as two:
        for _ in range(10):
            results = await asyncio.gather(*(t.write(KEY, header, buffers) for t in (one, two)))
            assert {result.outcome for result in results} == {WriteOutcome.WRITTEN}
            assert as_bytes(await two.read(KEY)) == contents_of()
            assert sorted(await asyncio.gather(one.remove(KEY), two.remove(KEY))) == [False, True]


async def test_the_event_loop_goes_on_during_a_large_write(tier: DiskTier) -> None:
    shapes = {"a": ("U8", (200 << 20,))}
    header, buffers = node({"a": bytes(200 << 20)}, shapes)
    num_ticks = 0
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(tier.write(KEY, header, buffers))
        while not writing.done():
            num_ticks += 1
            await asyncio.sleep(0)
    assert writing.result().outcome == WriteOutcome.WRITTEN
    assert num_ticks > 200 // 4  # more than pieces


async def test_counters_say_what_was_done(tier: DiskTier, path: Path) -> None:
    size = (await tier.write(KEY, *node(contents_of()))).num_bytes
    await tier.read(KEY)
    await tier.read(OTHER_KEY)
    path.write_bytes(b"")
    await tier.read(KEY)
    counters = tier.counters()
    assert (counters.writes, counters.bytes_written) == ({"written": 1}, size)
    assert (counters.reads, counters.hits, counters.bytes_read) == (3, 1, size)
    assert counters.misses == {"absent": 1, "corrupt": 1}
    assert counters.quarantined == 1
