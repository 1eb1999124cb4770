"""A cache directory is maintained while servers use it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.listing import NodeMeta
from luceasync.disk_cache.upkeep import Upkeep, prunable
from luceasync.errors import ConfigError
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import FaultyFiles, failing
from tests.disk_cache.node_files import KEY, METADATA, NAMESPACE, contents_of, file_of, node
from tests.disk_cache.tiers import quarantined, reason_of


async def test_a_server_goes_on_after_its_directory_was_cleared(tmp_path: Path, tier: DiskTier):
    await tier.write(node(contents_of()))
    await tier.scan()
    assert Upkeep(tmp_path).clear(NAMESPACE)[0] == 1
    assert list(tmp_path.iterdir()) == []
    assert await reason_of(tier) == MissReason.GONE
    assert [meta.key for meta in (await tier.scan()).removed] == [KEY]
    assert (await tier.write(node(contents_of()))).outcome == "written"


async def test_damage_is_quarantined_after_the_quarantine_was_cleared(
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


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an existing directory"):
        Upkeep(tmp_path / "none")


async def test_damaged_files_make_room_too(tmp_path: Path, path: Path, tier: DiskTier) -> None:
    path.write_bytes(b"damaged")
    names = frozenset({(NAMESPACE, KEY)})
    assert Upkeep(tmp_path).shed(names, 1) == len(b"damaged")
    assert not path.exists()
    assert Upkeep(tmp_path).shed(names, 1) == 0


def meta(key: str, parent: str, used_s: float, begin: int = 1, num_bytes: int = 10) -> NodeMeta:
    own = replace(METADATA, key=key, parent=parent, begin=begin if parent else 0, end=begin + 1)
    return NodeMeta("n", key, num_bytes, used_s, own)


def pruned(nodes: list[NodeMeta], **limits: float | None) -> list[str]:
    return [node.key for node in prunable(nodes, **limits)]


def test_a_parent_goes_after_its_children_however_old_it_is() -> None:
    nodes = [meta("root", "", 1), meta("a", "root", 5), meta("b", "root", 3)]
    assert pruned(nodes, budget_bytes=20) == ["b"]
    assert pruned(nodes, budget_bytes=10) == ["b", "a"]
    assert pruned(nodes, budget_bytes=0) == ["b", "a", "root"]
    assert pruned(nodes, unused_since_s=4) == ["b"]


def test_what_has_no_chain_to_the_root_goes_first() -> None:
    nodes = [meta("root", "", 1), meta("a", "gone", 9), meta("b", "a", 9, begin=2)]
    assert pruned(nodes, budget_bytes=20) == ["b"]
    assert pruned(nodes, budget_bytes=10) == ["b", "a"]


def placed(key: str, parent: str, begin: int, end: int, used_s: float = 9) -> NodeMeta:
    own = replace(METADATA, key=key, parent=parent, begin=begin, end=end)
    return NodeMeta("n", key, 10, used_s, own)


def test_files_on_a_cycle_go_first() -> None:
    circle = [placed("a", "b", 64, 128), placed("b", "a", 128, 192), placed("c", "c", 64, 128)]
    nodes = [*circle, meta("root", "", 1)]
    assert set(pruned(nodes, budget_bytes=10)) == {"a", "b", "c"}
    assert pruned(nodes, budget_bytes=0)[-1] == "root"


def test_a_node_of_another_schema_has_no_children() -> None:
    nodes = [NodeMeta("n", "old", 10, 1), meta("root", "", 2)]
    assert pruned(nodes, budget_bytes=10) == ["old"]


def test_the_same_key_in_two_namespaces_is_two_nodes() -> None:
    nodes = [meta("root", "", 1), replace(meta("root", "", 2), namespace="m"), meta("a", "root", 3)]
    assert pruned(nodes, budget_bytes=20) == ["root"]


@given(
    parents=st.lists(st.integers(0, 30), max_size=30),
    budget_bytes=st.integers(0, 300),
    used_s=st.randoms(use_true_random=False),
)
def test_no_orphan_is_ever_left_and_the_budget_is_kept(parents, budget_bytes, used_s) -> None:
    nodes = [meta("0", "", 0)]
    for number, parent in enumerate(parents, 1):
        above = nodes[parent % number].key
        nodes.append(meta(str(number), above, used_s.random(), begin=number))
    gone = set(pruned(nodes, budget_bytes=budget_bytes))
    left = [node for node in nodes if node.key not in gone]
    assert {n.metadata.parent for n in left} <= {"", *(n.key for n in left)}
    assert sum(node.num_bytes for node in left) <= budget_bytes
    assert sum(node.num_bytes for node in left) + 10 > min(budget_bytes, 10 * len(nodes))
