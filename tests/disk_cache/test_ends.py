"""An end has a file of its own: it comes and goes, and is damaged, without its rows."""

import os
import time
from pathlib import Path

import pytest

from luceasync.disk_cache.codec import Half, NodePart, decode_header, encode_file
from luceasync.disk_cache.directory import LONE_END_AGE_S
from luceasync.disk_cache.disk import DiskTier
from luceasync.errors import CorruptNode, ForeignNode
from luceasync.nodes import MissReason
from tests.disk_cache.node_files import (
    END_KINDS,
    END_SHAPES,
    KEY,
    METADATA,
    NAMESPACE,
    ROW_SHAPES,
    contents_of,
    end_of,
    entries_of,
    file_of,
    node,
)
from tests.disk_cache.tiers import as_bytes, quarantined, tier_of

OTHER_KEY = "ef" * 32
ROWS = {name: content for name, content in contents_of().items() if name in ROW_SHAPES}
END = {name: content for name, content in contents_of().items() if name in END_SHAPES}


@pytest.fixture
def end_path(path: Path) -> Path:
    return path.with_suffix(".end")


async def put(tier: DiskTier, *halves: Half, key: str = KEY) -> None:
    if Half.ROWS in halves:
        await tier.write(node(ROWS, key=key))
    if Half.END in halves:
        await tier.write(end_of(END, key=key))


def age(path: Path) -> None:
    old_s = time.time() - LONE_END_AGE_S - 1
    os.utime(path, (old_s, old_s))


async def test_both_files_are_read_as_one_node(tier: DiskTier, path: Path, end_path: Path) -> None:
    await put(tier, *Half)
    found = await tier.read(KEY)
    assert as_bytes(found) == contents_of()
    assert found.parts == {NodePart.SPAN, NodePart.STATE, NodePart.FEATURES}
    assert found.num_bytes == path.stat().st_size + end_path.stat().st_size
    assert found.end_fault is None


async def test_an_end_is_added_without_a_byte_of_the_rows(
    tier: DiskTier, path: Path, end_path: Path
) -> None:
    await put(tier, Half.ROWS)
    before, inode = tier.counters().bytes_written, path.stat().st_ino
    assert (await tier.read(KEY)).parts == {NodePart.SPAN, NodePart.FEATURES}
    await put(tier, Half.END)
    assert tier.counters().bytes_written - before == end_path.stat().st_size
    assert path.stat().st_ino == inode
    assert NodePart.STATE in (await tier.read(KEY)).parts


async def test_without_the_end_its_file_is_not_opened(tier: DiskTier, end_path: Path) -> None:
    await put(tier, *Half)
    end_path.write_bytes(b"damaged")
    found = await tier.read(KEY, with_end=False)
    assert as_bytes(found).keys() == ROW_SHAPES.keys() - {"dflash_feature_meta"}
    assert end_path.exists()


async def test_a_file_that_holds_rows_and_end_is_still_read(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of()))
    assert as_bytes(await tier.read(KEY)) == contents_of()
    (found,) = (await tier.scan()).nodes
    assert (found.end_file_bytes, NodePart.STATE in found.parts) == (0, True)


async def test_a_newer_end_beside_it_takes_precedence(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of(0)))
    newer = {name: contents_of(1)[name] for name in END}
    await tier.write(end_of(newer))
    assert as_bytes(await tier.read(KEY)) == contents_of(0) | newer


def of_another_span(end_path: Path) -> None:
    file = end_of(END, begin=METADATA.begin + 1)
    end_path.write_bytes(b"".join((file.header, *file.buffers)))


def with_tokens(end_path: Path) -> None:
    end_path.write_bytes(file_of(contents_of()))


def in_a_tensor(end_path: Path) -> None:
    content = bytearray(end_path.read_bytes())
    content[-1] ^= 1
    end_path.write_bytes(content)


DAMAGE = {
    "a bit of the state": in_a_tensor,
    "empty": lambda end_path: end_path.write_bytes(b""),
    "cut": lambda end_path: os.truncate(end_path, end_path.stat().st_size - 1),
    "of other tokens": of_another_span,
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_end_is_quarantined_and_the_rows_are_good(
    tier: DiskTier, path: Path, end_path: Path, kind: str
) -> None:
    await put(tier, *Half)
    DAMAGE[kind](end_path)
    found = await tier.read(KEY)
    assert as_bytes(found) == ROWS
    assert found.end_fault is not None
    assert (path.exists(), end_path.exists()) == (True, False)
    assert len(quarantined(path.parent)) == tier.counters().quarantined == 1
    assert (await tier.read(KEY)).end_fault is None  # there is none any more


async def test_rows_in_the_place_of_an_end_are_a_file_of_others(
    tier: DiskTier, end_path: Path
) -> None:
    await put(tier, *Half)
    with_tokens(end_path)
    found = await tier.read(KEY)
    assert as_bytes(found) == ROWS
    assert found.end_fault is not None
    assert end_path.exists()


async def test_two_ends_that_changed_places_are_both_damaged(tier: DiskTier) -> None:
    await put(tier, *Half)
    await put(tier, *Half, key=OTHER_KEY)
    paths = [tier._directory.path(key, half=Half.END) for key in (KEY, OTHER_KEY)]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    assert all([(await tier.read(key)).end_fault for key in (KEY, OTHER_KEY)])


async def test_damaged_rows_leave_nothing_to_be_found(tier: DiskTier, path: Path) -> None:
    await put(tier, *Half)
    path.write_bytes(b"damaged")
    assert (await tier.read(KEY)).reason is MissReason.CORRUPT
    assert (await tier.read(KEY)).reason is MissReason.GONE


async def test_an_end_without_rows_is_removed_once_it_is_no_longer_young(
    tier: DiskTier, end_path: Path
) -> None:
    await put(tier, Half.END)
    assert (await tier.scan()).nodes == ()
    assert end_path.exists()
    age(end_path)
    await tier.scan()
    assert not end_path.exists()


async def test_an_old_end_with_rows_stays(tier: DiskTier, end_path: Path) -> None:
    await put(tier, *Half)
    age(end_path)
    await tier.scan()
    assert end_path.exists()


async def test_a_scan_counts_both_and_tells_when_an_end_comes_or_goes(
    tier: DiskTier, path: Path, end_path: Path
) -> None:
    await put(tier, Half.ROWS)
    (found,) = (await tier.scan()).added
    assert (found.num_bytes, found.end_file_bytes) == (path.stat().st_size, 0)
    await put(tier, Half.END)
    (found,) = (await tier.scan()).added
    sizes = (path.stat().st_size, end_path.stat().st_size)
    assert (found.num_bytes, found.end_file_bytes) == (sum(sizes), sizes[1])
    assert NodePart.STATE in found.parts
    assert (await tier.scan()).added == ()
    assert await tier.remove_end(KEY) == sizes[1]
    (found,) = (await tier.scan()).added
    assert NodePart.STATE not in found.parts
    assert path.exists()


async def test_a_node_is_removed_with_its_end(tier: DiskTier, directory: Path) -> None:
    await put(tier, *Half)
    num_bytes = sum(entry.stat().st_size for entry in directory.iterdir() if entry.is_file())
    assert await tier.remove(KEY) == num_bytes
    assert [entry.name for entry in directory.iterdir()] == ["quarantine"]


def test_an_end_is_no_rows_and_rows_are_no_end() -> None:
    for file, other in ((node(ROWS), Half.END), (end_of(END), Half.ROWS)):
        names = {"namespace": NAMESPACE, "key": KEY, "end_kinds": END_KINDS}
        with pytest.raises(ForeignNode, match="schema"):
            decode_header(file.header, file.num_bytes, **names, half=other)
    with pytest.raises(CorruptNode, match="tokens"):
        encode_file(entries_of(ROWS), ROWS, METADATA, Half.END)
    with pytest.raises(CorruptNode, match="tokens"):
        encode_file(entries_of(END), END, METADATA, Half.ROWS)


async def test_another_process_finds_what_this_one_adds(tmp_path: Path, tier: DiskTier) -> None:
    async with tier_of(tmp_path) as other:
        await put(other, *Half)
        await other.scan()
        await tier.remove_end(KEY)
        found = await other.read(KEY)
        assert found.parts == {NodePart.SPAN, NodePart.FEATURES}
        assert (tmp_path / NAMESPACE / f"{KEY}.safetensors").exists()
