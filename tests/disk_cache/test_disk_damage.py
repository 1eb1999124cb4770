"""Whatever happened to a file: a miss of the right kind, no error, and never a wrong byte."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.disk_cache.codec import encode_header
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.outcomes import Miss
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import BIG, FaultyFiles
from tests.disk_cache.node_files import (
    KEY,
    METADATA,
    NAMESPACE,
    contents_of,
    entries_of,
    file_of,
    node,
)
from tests.disk_cache.tiers import as_bytes, quarantined, reason_of, tier_of

OTHER_KEY = "ef" * 32
SPAN = ("tokens", "ls0_attn_k.0", "empty")


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


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(damages())
async def test_damage_anywhere_is_a_miss_and_is_quarantined(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with tier_of(Path(root)) as tier:
            (Path(root) / NAMESPACE / f"{KEY}.safetensors").write_bytes(content)
            assert await reason_of(tier) == MissReason.CORRUPT
            assert await reason_of(tier) == MissReason.GONE
            (aside,) = quarantined(Path(root) / NAMESPACE)
            assert aside.read_bytes() == content


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(damages())
async def test_without_the_end_damage_is_a_miss_or_lies_in_the_end(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with tier_of(Path(root)) as tier:
            (Path(root) / NAMESPACE / f"{KEY}.safetensors").write_bytes(content)
            found = await tier.read(KEY, with_end=False)
            if not isinstance(found, Miss):
                assert as_bytes(found) == {name: contents_of()[name] for name in SPAN}
                assert await reason_of(tier) == MissReason.CORRUPT


async def test_one_flipped_bit_in_each_tensor_is_seen(tier: DiskTier, path: Path) -> None:
    await tier.write(node(contents_of()))
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
    await tier.write(node(contents_of(0)))
    await tier.write(node(contents_of(1), key=OTHER_KEY))
    other = path.with_name(f"{OTHER_KEY}.safetensors")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    assert [await reason_of(tier, key) for key in (KEY, OTHER_KEY)] == ["corrupt"] * 2


async def test_another_models_node_is_a_miss_and_stays(tier: DiskTier, path: Path) -> None:
    path.write_bytes(file_of(contents_of(), namespace="beef"))
    assert await reason_of(tier) == MissReason.CORRUPT
    assert path.exists()


async def test_another_schema_is_a_miss_and_stays(
    tier: DiskTier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("luceasync.disk_cache.codec.SCHEMA", "luceasync.node.0")
        path.write_bytes(file_of(contents_of()))
    assert await reason_of(tier) == MissReason.CORRUPT
    assert path.exists()


def put_link(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    target.write_bytes(file_of(contents_of()))
    path.symlink_to(target)


def put_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


@pytest.mark.parametrize("put", [put_link, put_directory, os.mkfifo], ids=["link", "dir", "fifo"])
async def test_what_is_not_a_regular_file_is_quarantined_and_not_followed(
    tier: DiskTier, path: Path, put
) -> None:
    put(path)
    assert await reason_of(tier) == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == 1
    assert not os.path.lexists(path)
    elsewhere = path.parents[1] / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_bytes() == file_of(contents_of())


def in_state(content: bytes) -> bytes:
    """The file with one bit of its recurrent state flipped."""
    return flip(content, content.index(contents_of()["ls1_delta.2"]))


async def test_damage_in_the_end_is_seen_when_it_is_read(tier: DiskTier, path: Path) -> None:
    path.write_bytes(in_state(file_of(contents_of())))
    found = await tier.read(KEY, with_end=False)
    assert as_bytes(found) == {name: contents_of()[name] for name in found.tensors}
    assert path.exists()
    assert await reason_of(tier) == MissReason.CORRUPT
    assert not path.exists()


async def test_damage_in_the_span_is_seen_without_the_end(tier: DiskTier, path: Path) -> None:
    content = file_of(contents_of())
    path.write_bytes(flip(content, content.index(contents_of()["ls0_attn_k.0"])))
    assert (await tier.read(KEY, with_end=False)).reason == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == 1


async def test_an_order_of_another_writer_gives_the_same_span(tier: DiskTier, path: Path) -> None:
    contents, entries = contents_of(), entries_of(contents_of())[::-1]
    entries.sort(key=lambda entry: entry.num_bytes % 4)
    header = encode_header(entries, METADATA)
    path.write_bytes(b"".join((header, *(contents[entry.name] for entry in entries))))
    found = await tier.read(KEY, with_end=False)
    assert as_bytes(found) == {name: contents[name] for name in SPAN}
    assert as_bytes(await tier.read(KEY)) == contents


@pytest.mark.parametrize("step", ["open", "readinto"])
async def test_a_file_that_another_host_has_just_replaced_is_a_miss_and_no_fault(
    tmp_path: Path, path: Path, step: str
) -> None:
    def stale() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async with tier_of(tmp_path, FaultyFiles(stale, before=step)) as tier:
        path.write_bytes(file_of(contents_of(0, BIG), BIG))
        assert await reason_of(tier) == MissReason.IO_ERROR
        assert tier.degraded == ""
    assert path.exists()
    assert not quarantined(path.parent)
