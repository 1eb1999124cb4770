"""A directory is looked after while servers run on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.upkeep import Upkeep
from luceasync.errors import ConfigError
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import FaultyFiles, failing
from tests.disk_cache.node_files import KEY, NAMESPACE, contents_of, file_of, node
from tests.disk_cache.tiers import quarantined, reason_of


async def test_a_server_goes_on_after_its_directory_was_cleared(tmp_path: Path, tier: DiskTier):
    await tier.write(node(contents_of()))
    await tier.scan()
    assert Upkeep(tmp_path).clear(NAMESPACE)[0] == 1
    assert list(tmp_path.iterdir()) == []
    assert await reason_of(tier) == MissReason.GONE
    assert [meta.key for meta in (await tier.scan()).removed] == [KEY]
    assert (await tier.write(node(contents_of()))).outcome == "written"


async def test_damage_is_set_aside_where_the_quarantine_was_cleared(
    tmp_path: Path, tier: DiskTier, path: Path
) -> None:
    await tier.write(node(contents_of()))
    (path.parent / "quarantine").rmdir()
    path.write_bytes(b"damaged")
    assert await reason_of(tier) == MissReason.CORRUPT
    assert len(quarantined(path.parent)) == 1


def test_what_a_server_writes_is_left_alone(tmp_path: Path, path: Path, tier: object) -> None:
    path.write_bytes(file_of(contents_of()))
    writing = path.with_name(f".{KEY}.{os.getpid()}.00.tmp")
    writing.touch()
    Upkeep(tmp_path).clear(NAMESPACE)
    assert [entry.name for entry in path.parent.iterdir()] == [writing.name]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_what_cannot_be_read_now_is_no_damage(
    tmp_path: Path, path: Path, tier: object, number: int
) -> None:
    path.write_bytes(file_of(contents_of()))
    upkeep = Upkeep(tmp_path)
    upkeep._files = FaultyFiles(failing(number), before="open")
    assert upkeep.verify(NAMESPACE, KEY).state == "unreadable"
    with pytest.raises(OSError, match=os.strerror(number)):
        upkeep.nodes(NAMESPACE)  # its children would look like orphans
    assert path.exists()


def test_a_node_removed_meanwhile_is_gone(tmp_path: Path) -> None:
    assert Upkeep(tmp_path).verify(NAMESPACE, KEY).state == "gone"
    assert Upkeep(tmp_path).remove(NAMESPACE, KEY) == 0


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an existing directory"):
        Upkeep(tmp_path / "none")
