"""The disk tier returns what was written, or a miss that says why."""

import asyncio
import errno
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.disk_cache.codec import encode_file
from luceasync.disk_cache.disk import NUM_READERS, DiskTier
from luceasync.disk_cache.files import FileSystem, HungReads
from luceasync.disk_cache.outcomes import Miss, WriteOutcome
from luceasync.disk_cache.reader import NodeFile
from luceasync.errors import ConfigError, CorruptNode
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import BIG, STEPS, FaultyFiles, failing, hanging
from tests.disk_cache.node_files import (
    KEY,
    METADATA,
    NAMESPACE,
    TOKENS,
    contents_of,
    entries_of,
    file_of,
    node,
)
from tests.disk_cache.tiers import as_bytes, quarantined, reason_of, temporaries, tier_of

OTHER_KEY = "ef" * 32


async def test_what_is_written_is_read(tier: DiskTier, path: Path) -> None:
    contents = contents_of()
    result = await tier.write(node(contents))
    assert (result.outcome, result.num_bytes) == (WriteOutcome.WRITTEN, path.stat().st_size)
    found = await tier.read(KEY)
    assert as_bytes(found) == contents
    assert found.header.metadata == METADATA
    assert path.read_bytes() == file_of(contents)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 << 20), max_size=6))
async def test_tensors_of_any_sizes_are_read_as_written(sizes: list[int]) -> None:
    shapes = TOKENS | {f"t{i}": ("U8", (size,)) for i, size in enumerate(sizes)}
    contents = contents_of(1, shapes)
    with tempfile.TemporaryDirectory() as root:
        async with tier_of(Path(root)) as tier:
            await tier.write(node(contents, shapes))
            assert as_bytes(await tier.read(KEY)) == contents


async def test_only_the_owner_may_read(tmp_path: Path, path: Path) -> None:
    async with tier_of(tmp_path / "new" / "cache") as tier:
        await tier.write(node(contents_of()))
    found = {stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "new").rglob("*")}
    assert found == {0o700, 0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


async def test_what_was_never_written_is_absent(tier: DiskTier) -> None:
    assert await reason_of(tier) == MissReason.GONE
    assert await tier.touch([KEY]) == 0
    assert await tier.remove(KEY) == 0


async def test_a_directory_removed_under_the_server_is_made_again(
    tier: DiskTier, directory: Path
) -> None:
    (directory / "quarantine").rmdir()
    directory.rmdir()
    assert await reason_of(tier) == MissReason.GONE
    assert (await tier.write(node(contents_of()))).outcome == WriteOutcome.WRITTEN


async def test_a_cache_directory_that_is_a_file_is_refused_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match="--kv-cache-dir"):
        async with tier_of(tmp_path / "cache"):
            pass


def test_bytes_that_do_not_fit_their_header_are_not_encoded() -> None:
    contents = contents_of()
    for name, content in contents.items():
        with pytest.raises(CorruptNode, match=name):
            encode_file(entries_of(contents), contents | {name: content + b"\0"}, METADATA)
    with pytest.raises(CorruptNode, match="tokens"):
        node(contents, end=METADATA.end + 1)


async def test_a_node_of_another_namespace_is_not_written(tier: DiskTier, directory: Path) -> None:
    with pytest.raises(AssertionError, match="beef"):
        await tier.write(node(contents_of(), namespace="beef"))
    assert [entry.name for entry in directory.iterdir()] == ["quarantine"]


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


async def test_a_disk_that_hangs_is_a_miss_that_keeps_the_file(
    tmp_path: Path, path: Path, until: threading.Event
) -> None:
    files = FaultyFiles(hanging(until), before="open")
    async with tier_of(tmp_path, files, read_timeout_s=0.01) as tier:
        path.write_bytes(file_of(contents_of()))
        assert await reason_of(tier) == MissReason.IO_ERROR
        until.set()
    assert path.exists()


async def test_a_caller_may_set_a_shorter_timeout(
    tmp_path: Path, path: Path, until: threading.Event
) -> None:
    files = FaultyFiles(hanging(until), before="open")
    async with tier_of(tmp_path, files) as tier:
        path.write_bytes(file_of(contents_of()))
        found = await tier.read(KEY, timeout_s=0.01)
        assert found == Miss(MissReason.IO_ERROR, f"node {KEY} was not read within 0.01 s")
        assert tier.degraded == found.detail
        until.set()


async def test_while_a_read_hangs_no_other_is_tried(
    tmp_path: Path, path: Path, until: threading.Event
) -> None:
    files = FaultyFiles(until.wait, before="open")
    async with tier_of(tmp_path, files) as tier:
        path.write_bytes(file_of(contents_of()))
        first = await tier.read(KEY, timeout_s=0.01)
        assert first.detail.endswith("not read within 0.01 s")
        for _ in range(100):  # more than there are threads: none of them is asked
            assert (await tier.read(KEY)).detail == "the disk hangs: a read has not returned"
        assert tier.degraded == first.detail
        until.set()
        async with asyncio.timeout(10):
            while tier.degraded:  # it comes back by itself, without another request
                await asyncio.sleep(0.001)
        assert isinstance(await tier.read(KEY), NodeFile)


async def test_memory_that_is_refused_is_a_miss_of_its_own(tmp_path: Path, path: Path) -> None:
    def refuse(num_bytes: int) -> memoryview:
        raise MemoryError(f"{num_bytes} bytes: the arena is full")

    async with tier_of(tmp_path, allocate=refuse) as tier:
        await tier.write(node(contents_of()))
        found = await tier.read(KEY)
        assert (found.reason, tier.degraded) == (MissReason.NO_MEMORY, "")
        assert found.detail.endswith("bytes: the arena is full")
        assert tier.counters().misses == {"no_memory": 1}
    assert path.exists()


async def test_nodes_are_read_into_the_memory_that_was_asked_for(tmp_path: Path) -> None:
    given: list[memoryview] = []

    def allocate(num_bytes: int) -> memoryview:
        given.append(memoryview(bytearray(num_bytes)))
        return given[-1]

    async with tier_of(tmp_path, allocate=allocate) as tier:
        await tier.write(node(contents_of()))
        found = await tier.read(KEY, with_end=False)
    assert all(view.obj is given[0].obj for view in found.tensors.values())
    assert [len(view) for view in given] == [found.num_bytes]


async def test_nodes_are_read_in_several_threads(tmp_path: Path) -> None:
    together = threading.Barrier(NUM_READERS)
    files = FaultyFiles(lambda: together.wait(60), before="readinto")
    shapes = TOKENS | {"a": ("U8", (1 << 20,))}
    keys = [f"{i:08x}" for i in range(2 * NUM_READERS)]
    async with tier_of(tmp_path, files) as tier:
        for key in keys:
            await tier.write(node(contents_of(1, shapes), shapes, key=key))
        found = await asyncio.gather(*map(tier.read, keys))
    assert [as_bytes(each) for each in found] == [contents_of(1, shapes)] * len(keys)


async def test_a_failed_removal_is_reported(tier: DiskTier, path: Path) -> None:
    path.mkdir()
    assert not await tier.remove(KEY)
    assert path.name in tier.degraded and str(path.parents[1]) not in tier.degraded


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename"])
@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ENOSPC, "no_space"), (errno.EIO, "io_error"), (errno.EMFILE, "io_error")],
)
async def test_a_write_that_fails_leaves_nothing_and_says_so(
    tmp_path: Path, directory: Path, step: str, number: int, outcome: str
) -> None:
    async with tier_of(tmp_path) as tier:
        await tier.write(node(contents_of(), key=OTHER_KEY))
    async with tier_of(tmp_path, FaultyFiles(failing(number), before=step)) as tier:
        assert (await tier.write(node(contents_of(0, BIG), BIG))).outcome == outcome
        assert os.strerror(number) in tier.degraded
        assert tier.counters().writes == {outcome: 1}
        assert tier.pending_bytes == 0
    names = {entry.name for entry in directory.iterdir()}
    assert names == {"quarantine", f"{OTHER_KEY}.safetensors"}


async def test_a_write_that_succeeds_ends_the_degraded_state(tmp_path: Path) -> None:
    faults = [failing(errno.ENOSPC)]
    files = FaultyFiles(lambda: faults and faults.pop()(), before="write")
    async with tier_of(tmp_path, files) as tier:
        outcomes = [(await tier.write(node(contents_of()))).outcome for _ in range(2)]
        assert outcomes == [WriteOutcome.NO_SPACE, WriteOutcome.WRITTEN]
        assert tier.degraded == ""
        assert as_bytes(await tier.read(KEY)) == contents_of()


@pytest.mark.parametrize("step", ["create", "write", "sync", "sync_directory"])
async def test_a_disk_that_has_healed_says_so_without_another_write(tmp_path, step) -> None:
    is_faulty = [True]
    fault = failing(errno.EROFS)
    files = FaultyFiles(lambda: fault() if is_faulty else None, before=step)
    async with tier_of(tmp_path, files) as tier:
        await tier.write(node(contents_of()))
        await tier.look_again()
        assert os.strerror(errno.EROFS) in tier.degraded
        is_faulty.clear()
        await tier.look_again()
        assert tier.degraded == ""
        assert not temporaries(tmp_path / NAMESPACE)


async def test_a_disk_that_is_too_full_for_the_last_node_stays_degraded(tmp_path: Path) -> None:
    files = FileSystem()
    async with tier_of(tmp_path, files, min_free_bytes=1 << 20) as tier:
        files.free_bytes = lambda path: 1 << 20
        assert (await tier.write(node(contents_of()))).outcome is WriteOutcome.BELOW_FLOOR
        await tier.look_again()
        assert tier.degraded
        files.free_bytes = lambda path: 2 << 20
        await tier.look_again()
        assert tier.degraded == ""


async def test_a_disk_that_can_be_read_again_says_so_without_another_read(tmp_path: Path) -> None:
    is_faulty = [True]
    fault = failing(errno.EIO)
    files = FaultyFiles(lambda: fault() if is_faulty else None, before="readinto")
    async with tier_of(tmp_path, files) as tier:
        big = node(contents_of(0, BIG), BIG)
        await tier.write(big)
        assert await reason_of(tier) == MissReason.IO_ERROR
        await tier.look_again()
        assert os.strerror(errno.EIO) in tier.degraded
        is_faulty.clear()
        await tier.look_again()
        assert tier.degraded == ""


async def test_a_look_that_hangs_is_not_repeated(tmp_path: Path, until: threading.Event) -> None:
    faults = [until.wait, failing(errno.EIO)]
    files = FaultyFiles(lambda: faults and faults.pop()(), before="create")
    async with tier_of(tmp_path, files, read_timeout_s=0.01) as tier:
        await tier.write(node(contents_of()))
        for _ in range(20):  # more than there are threads
            await tier.look_again()
        assert not faults and tier.degraded
        until.set()
        async with asyncio.timeout(10):
            while tier.degraded:
                await tier.look_again()
                await asyncio.sleep(0.001)


async def test_failed_reads_are_reported_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    faults = [failing(errno.EIO), failing(errno.EIO)]
    files = FaultyFiles(lambda: faults and faults.pop()(), before="open")
    async with tier_of(tmp_path, files) as tier:
        for _ in range(2):
            await tier.write(node(contents_of()))
            assert await reason_of(tier) == MissReason.IO_ERROR
            await tier.write(node(contents_of(), key=OTHER_KEY))
            await tier.touch([KEY])
            assert os.strerror(errno.EIO) in tier.degraded
        assert as_bytes(await tier.read(KEY)) == contents_of()
        assert tier.degraded == ""


async def test_a_name_that_could_not_be_synced_is_written_but_reported(tmp_path: Path) -> None:
    files = FaultyFiles(failing(errno.EIO), before="sync_directory")
    async with tier_of(tmp_path, files) as tier:
        result = await tier.write(node(contents_of()))
        assert (result.outcome, bool(result.detail)) == (WriteOutcome.WRITTEN, True)
        assert tier.degraded == result.detail
        assert as_bytes(await tier.read(KEY)) == contents_of()


async def test_free_space_that_must_stay_is_not_written_to(tmp_path: Path, path: Path) -> None:
    async with tier_of(tmp_path, min_free_bytes=1 << 60) as tier:
        result = await tier.write(node(contents_of()))
    assert result.outcome == WriteOutcome.BELOW_FLOOR
    assert not path.exists()


async def test_pending_writes_are_bounded(tmp_path: Path, until: threading.Event) -> None:
    files = FaultyFiles(hanging(until), before="create")
    async with tier_of(tmp_path, files, max_pending_bytes=1) as tier, asyncio.TaskGroup() as group:
        first = group.create_task(tier.write(node(contents_of())))
        await asyncio.sleep(0)
        assert tier.pending_bytes > 1  # a single node may be larger than the limit
        assert (await tier.write(node(contents_of()))).outcome == WriteOutcome.BUSY
        until.set()
    assert first.result().outcome == WriteOutcome.IO_ERROR


@pytest.mark.parametrize("step", STEPS)
async def test_a_write_that_takes_too_long_is_abandoned_and_leaves_no_temporary(
    tmp_path: Path, directory: Path, step: str, until: threading.Event
) -> None:
    files = FaultyFiles(hanging(until), before=step)
    async with tier_of(tmp_path, files, write_timeout_s=0.2) as tier:
        result = await tier.write(node(contents_of()))
        asyncio.get_running_loop().call_later(0.05, until.set)
    assert result.outcome == WriteOutcome.TIMEOUT
    assert not temporaries(directory)


@pytest.mark.parametrize("step", STEPS)
async def test_a_cancelled_write_leaves_no_temporary(
    tmp_path: Path, directory: Path, step: str, until: threading.Event
) -> None:
    reached = threading.Event()
    files = FaultyFiles(lambda: (reached.set(), hanging(until)()), before=step)
    async with tier_of(tmp_path, files) as tier:
        writing = asyncio.create_task(tier.write(node(contents_of())))
        await asyncio.to_thread(reached.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        asyncio.get_running_loop().call_later(0.05, until.set)
    assert not temporaries(directory)
    assert tier.pending_bytes == 0


async def test_two_tiers_write_and_remove_the_same_node(tmp_path: Path) -> None:
    file = node(contents_of())
    async with tier_of(tmp_path) as one, tier_of(tmp_path) as two:
        for _ in range(10):
            results = await asyncio.gather(*(t.write(file) for t in (one, two)))
            assert {result.outcome for result in results} == {WriteOutcome.WRITTEN}
            assert as_bytes(await two.read(KEY)) == contents_of()
            freed = await asyncio.gather(one.remove(KEY), two.remove(KEY))
            assert sorted(freed) == [0, results[0].num_bytes]


@pytest.mark.slow
async def test_the_event_loop_goes_on_during_a_large_write(tier: DiskTier) -> None:
    shapes = TOKENS | {"a": ("U8", (200 << 20,))}
    file = node(contents_of(0, TOKENS) | {"a": bytes(200 << 20)}, shapes)
    num_ticks = 0
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(tier.write(file))
        while not writing.done():
            num_ticks += 1
            await asyncio.sleep(0)
    assert writing.result().outcome == WriteOutcome.WRITTEN
    assert num_ticks > 200 // 4  # more than pieces


async def test_counters_say_what_was_done(tier: DiskTier, path: Path) -> None:
    size = (await tier.write(node(contents_of()))).num_bytes
    await tier.read(KEY)
    await tier.read(OTHER_KEY)
    path.write_bytes(b"")
    await tier.read(KEY)
    counters = tier.counters()
    assert (counters.writes, counters.bytes_written) == ({"written": 1}, size)
    assert (counters.reads, counters.hits, counters.bytes_read) == (3, 1, size)
    assert counters.misses == {"gone": 1, "corrupt": 1}
    assert counters.quarantined == 1


@pytest.mark.parametrize(
    ("fault", "words"), [(None, ""), (OSError("EIO"), "EIO"), (ValueError("given up"), "")]
)
async def test_the_first_read_that_returns_ends_a_hang(fault, words):
    heard: list[str] = []
    hung = HungReads(heard.append)
    calls: list[asyncio.Future] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for call in calls:
        hung.leave(call)
    assert hung and heard == []
    if fault is None:
        calls[1].set_result(None)
    else:
        calls[1].set_exception(fault)
    await asyncio.sleep(0)
    assert not hung and heard == [words]
    calls[0].set_exception(OSError("late"))
    await asyncio.sleep(0)
    assert heard == [words]
