"""Orders of the engine's thread, over a real directory."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luceasync.disk_cache.codec import END_PARTS, Half, NodePart, part_of
from luceasync.disk_cache.disk import DiskTier
from luceasync.models.mixers import END_KINDS
from luceasync.nodes import MissReason
from luceasync.prefix_cache import disk_worker as module
from luceasync.prefix_cache.disk_orders import HalfNode, ReadOrder, WriteReport
from luceasync.prefix_cache.disk_worker import DiskWorker
from luceasync.prefix_tree.node import node_key, tenant_key
from tests.disk_cache.faulty_files import FaultyFiles, failing
from tests.disk_cache.tiers import quarantined, tier_of

TENANT = tenant_key("")
DEADLINE_S = 20.0


class Heard:
    """Records what the engine's thread is told."""

    def __init__(self) -> None:
        self.fetches: list = []
        self.writes: list = []
        self.added: list = []
        self.removed: list = []
        self.others: list = []
        self.come: list = []

    def reading(self, come) -> None:
        self.come.append(come)

    def fetched(self, key: bytes, result) -> None:
        self.fetches.append((key, result))

    def written(self, key: bytes, written: WriteReport) -> None:
        self.writes.append((key, written.half, written.is_there))

    def files_changed(self, added, removed, *, is_whole: bool) -> None:
        self.added += added
        self.removed += removed

    def others_changed(self, files, num_removals: int) -> None:
        self.others = sorted(size for _, size in files)


def write(worker: DiskWorker, node: HalfNode) -> None:
    """Both files of a node."""
    for half in Half:
        worker.write(half_of(node, half))


def half_of(node: HalfNode, half: Half) -> HalfNode:
    tensors = {
        name: tensor
        for name, tensor in node.tensors.items()
        if (part_of(name, END_KINDS) in END_PARTS) == (half is Half.END)
    }
    return replace(node, half=half, tensors=tensors)


def outcomes(node: HalfNode, *are_there: bool) -> list:
    """What the disk reports of its files."""
    return [(node.key, half, is_there) for half, is_there in zip(Half, are_there, strict=True)]


def kept(number: int = 0, parent: HalfNode | None = None, num_tokens: int = 64) -> HalfNode:
    """A whole node; see half_of."""
    tokens = array("i", [number] * num_tokens)
    begin = 0 if parent is None else parent.end
    return HalfNode(
        half=Half.ROWS,
        key=node_key(tokens, TENANT, None if parent is None else parent.key),
        parent=None if parent is None else parent.key,
        begin=begin,
        end=begin + num_tokens,
        is_turn_end=True,
        is_generated=True,
        tensors={
            "tokens": torch.frombuffer(tokens, dtype=torch.int32),
            "ls0_attn_k.0": torch.full((num_tokens, 2, 16), number, dtype=torch.bfloat16),
            "ls0_delta.1": torch.full((4, 4), float(number)),
            "snap_prefill_logits": torch.arange(32.0),
        },
    )


@asynccontextmanager
async def serving(root: Path, files=None) -> AsyncIterator[tuple[DiskWorker, Heard]]:
    heard = Heard()
    worker = DiskWorker((0, 2), lambda outcome: outcome(heard))
    async with tier_of(root, files) as disk:
        await worker.scan(disk)
        task = asyncio.create_task(worker.serve(disk))
        yield worker, heard
        await worker.drain(DEADLINE_S)
        task.cancel()
        await asyncio.wait([task])


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0.002)


async def test_a_node_comes_back_as_it_was(tmp_path):
    node = kept(3)
    async with serving(tmp_path) as (worker, heard):
        write(worker, node)
        await until(lambda: len(heard.writes) == 2)
        worker.read([ReadOrder(node.key, with_end=True)])
        await until(lambda: heard.fetches)
    [(key, found)] = heard.fetches
    assert (key, heard.writes) == (node.key, outcomes(node, True, True))
    assert found.tensors.keys() == node.tensors.keys()
    assert all(torch.equal(found.tensors[name], node.tensors[name]) for name in node.tensors)
    assert found.parts == found.file_parts == {NodePart.SPAN, NodePart.STATE, NodePart.LOGITS}


async def test_the_span_comes_alone(tmp_path):
    node = kept(3)
    async with serving(tmp_path) as (worker, heard):
        write(worker, node)
        await until(lambda: len(heard.writes) == 2)
        worker.read([ReadOrder(node.key, with_end=False)])
        await until(lambda: heard.fetches)
    found = heard.fetches[0][1]
    assert found.tensors.keys() == {"tokens", "ls0_attn_k.0"}
    assert found.file_parts is None  # its end was not opened


async def test_a_new_server_is_told_of_the_files(tmp_path):
    first = kept(1)
    second = kept(2, first)
    async with serving(tmp_path) as (worker, _):
        write(worker, first)
        write(worker, second)
    async with serving(tmp_path) as (_, heard):
        pass
    found = {node.key: node for node in heard.added}
    assert found.keys() == {first.key, second.key}
    node = found[second.key]
    assert (node.parent, node.begin, node.end) == (first.key, 64, 128)
    assert node.is_generated
    assert node.has_state
    assert node.has_logits


async def test_written_nodes_are_released(tmp_path):
    node = kept(1)
    rows = weakref.ref(node.tensors["ls0_attn_k.0"])
    async with serving(tmp_path) as (worker, heard):
        write(worker, node)
        await until(lambda: len(heard.writes) == 2)
        del node
        await until(lambda: rows() is None)


async def test_nodes_are_written_in_order_however_large(tmp_path):
    nodes = [kept(0, num_tokens=1 << 14)]
    for i in range(1, 5):
        nodes.append(kept(i, nodes[-1], num_tokens=1 << (14 - 2 * i)))
    async with serving(tmp_path) as (worker, heard):
        for node in nodes:
            write(worker, node)
    assert [key for key, half, _ in heard.writes if half is Half.ROWS] == [n.key for n in nodes]
    assert [half for _, half, _ in heard.writes] == [*Half] * len(nodes)


async def test_a_fault_is_reported_and_does_not_end_the_work(tmp_path):
    node = kept(1)
    async with serving(tmp_path, FaultyFiles(failing(5), before="rename")) as (worker, heard):
        write(worker, node)
        worker.read([ReadOrder(node.key, with_end=True)])
        await until(lambda: len(heard.writes) == 2 and heard.fetches)
    assert heard.writes == outcomes(node, False, False)
    [(key, miss)] = heard.fetches
    assert (key, miss.reason) == (node.key, MissReason.GONE)


async def test_a_scan_that_fails_does_not_end_the_work(tmp_path, monkeypatch):
    looks: list[int] = []

    async def scan(self: DiskWorker, disk: object) -> None:
        looks.append(1)
        raise ZeroDivisionError

    node = kept(1)
    monkeypatch.setattr("luceasync.prefix_cache.disk_worker.RESCAN_S", 0.001)
    async with serving(tmp_path) as (worker, heard):
        monkeypatch.setattr(DiskWorker, "scan", scan)
        await until(lambda: len(looks) > 1)
        write(worker, node)
        await until(lambda: len(heard.writes) == 2)
        monkeypatch.setattr("luceasync.prefix_cache.disk_worker.RESCAN_S", 1000.0)
    assert heard.writes == outcomes(node, True, True)


async def test_a_passing_fault_of_the_disk_loses_nothing(tmp_path):
    node = kept(1, num_tokens=1 << 12)
    async with serving(tmp_path) as (worker, _):
        write(worker, node)
    async with serving(tmp_path, FaultyFiles(failing(5), before="readinto")) as (worker, heard):
        worker.read([ReadOrder(node.key, with_end=True)])
        await until(lambda: heard.fetches)
    assert heard.fetches[0][1].reason is MissReason.IO_ERROR
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 1


async def test_a_read_is_told_of_and_can_be_given_up(tmp_path):
    """It is a miss that keeps the file, and no fault of the disk."""
    may_go = threading.Event()
    may_go.set()
    files = FaultyFiles(lambda: may_go.wait(DEADLINE_S), before="open")
    async with serving(tmp_path, files) as (worker, heard):
        write(worker, node := kept(1, num_tokens=1 << 12))
        await until(lambda: len(heard.writes) == 2)
        may_go.clear()
        worker.read([ReadOrder(node.key, with_end=True)])
        await until(lambda: {node.key: 0} in heard.come)
        worker.give_up([node.key])
        await until(lambda: worker._reading[node.key].is_given_up)
        may_go.set()
        await until(lambda: heard.fetches)
        assert heard.fetches[0][1].reason is MissReason.PREFILL_IS_FASTER
        worker.read([ReadOrder(node.key, with_end=True)])
        await until(lambda: len(heard.fetches) == 2)
        assert heard.fetches[1][1].num_bytes > 0
        told = len(heard.come)
        await asyncio.sleep(3 * module.PROGRESS_S)
        assert len(heard.come) <= told + 1, "nothing is told while nothing is read"


async def test_an_order_that_fails_is_reported(tmp_path):
    node = kept(1)
    odd = replace(node, tensors={**node.tensors, "ls0_attn_v.0": torch.zeros(3, dtype=torch.bool)})
    async with serving(tmp_path) as (worker, heard):
        write(worker, odd)
        await until(lambda: len(heard.writes) == 2)
        write(worker, node)
    assert heard.writes == [*outcomes(node, False, True), *outcomes(node, True, True)]


@pytest.mark.parametrize("order", ["remove", "quarantine"])
async def test_removed_and_quarantined_nodes_are_not_found_again(tmp_path, order: str):
    node = kept(1)
    async with serving(tmp_path) as (worker, _):
        write(worker, node)
    async with serving(tmp_path) as (worker, _):
        worker.remove([node.key]) if order == "remove" else worker.quarantine(node.key)
    async with serving(tmp_path) as (_, heard):
        assert not heard.added
    [directory] = tmp_path.glob("*")
    assert len(quarantined(directory)) == 2 * (order == "quarantine")


async def test_a_missing_node_is_gone(tmp_path):
    async with serving(tmp_path) as (worker, heard):
        worker.touch([kept(1).key])
        worker.read([ReadOrder(kept(1).key, with_end=True)])
        await until(lambda: heard.fetches)
    [(key, miss)] = heard.fetches
    assert (key, miss.reason) == (kept(1).key, MissReason.GONE)


async def test_a_node_that_does_not_begin_where_its_parent_ends_is_ignored(tmp_path):
    first, second = kept(1), kept(2, num_tokens=32)
    third = replace(kept(3), parent=second.key, begin=64, end=128)
    async with serving(tmp_path) as (worker, _):
        for node in (first, second, third):
            write(worker, node)
    async with serving(tmp_path) as (_, heard):
        pass
    assert {node.key for node in heard.added} == {first.key, second.key}
    assert heard.removed == [third.key]


async def test_files_of_another_model_are_told_and_removed_children_first(tmp_path):
    first, theirs = kept(1), "beef4567"
    async with DiskTier(tmp_path, theirs, END_KINDS, min_free_bytes=0) as disk:
        worker = DiskWorker((0, 2), lambda outcome: None)
        for node in (first, kept(2, first)):
            await worker._write(disk, half_of(node, Half.ROWS), 0)
    files = [*(tmp_path / theirs).glob("*.safetensors")]
    os.utime(tmp_path / theirs / f"{first.key.hex()}.safetensors", (1, 1))
    async with serving(tmp_path) as (worker, heard):
        assert heard.others == sorted(path.stat().st_size for path in files)
        assert not heard.added
        worker.remove_others(1)
        await until(lambda: len(heard.others) == 1)
    assert [path.stem for path in files if path.exists()] == [first.key.hex()]


async def test_a_server_that_writes_hears_soon_what_another_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RESCAN_WHEN_WRITING_S", 0.0)
    async with serving(tmp_path) as (worker, heard):
        other = tmp_path / "beef4567"
        other.mkdir()
        (other / f"{kept(1).key.hex()}.safetensors").write_bytes(b"x" * 77)
        write(worker, kept(2))
        await until(lambda: heard.others)
    assert heard.others == [77]


async def test_a_disk_that_has_healed_is_noticed_without_an_order(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.001)
    is_faulty, fault = [True], failing(5)
    files = FaultyFiles(lambda: fault() if is_faulty else None, before="write")
    degraded: list[str] = []

    class Tier(DiskTier):
        async def look_again(self) -> None:
            degraded.append(self.degraded)
            await super().look_again()

    worker = DiskWorker((0, 2), lambda outcome: outcome(Heard()))
    async with Tier(tmp_path, "beef4567", END_KINDS, min_free_bytes=0, files=files) as disk:
        task = asyncio.create_task(worker.serve(disk))
        worker.write(half_of(kept(1), Half.ROWS))
        await until(lambda: len(degraded) > 2)
        is_faulty.clear()
        await until(lambda: not disk.degraded)
        task.cancel()
        await asyncio.wait([task])


async def test_a_full_disk_is_one_line_and_another_one_once_it_is_full_again(tmp_path, caplog):
    is_full, fault = [True], failing(28)
    files = FaultyFiles(lambda: fault() if is_full else None, before="write")
    async with serving(tmp_path, files) as (worker, heard):
        for number, *full in ((1, True), (2, True), (3,), (4, True)):
            is_full[:] = full
            worker.write(half_of(kept(number), Half.ROWS))
            await until(lambda: len(heard.writes) == number)  # noqa: B023
    assert [is_there for _, _, is_there in heard.writes] == [False, False, True, False]
    assert caplog.text.count("rows not on disk: ") == 2
