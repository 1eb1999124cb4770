"""The budget of the directory bounds what lies there at any time, with real files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from io import FileIO
from pathlib import Path

import pytest
import torch

from luceasync.disk_cache.codec import PAGE_BYTES
from luceasync.disk_cache.disk import DiskTier
from luceasync.disk_cache.files import FileSystem
from luceasync.prefix_cache import disk_worker as module
from luceasync.prefix_cache import index
from luceasync.prefix_cache.disk_worker import DiskWorker
from tests.disk_cache.tiers import tier_of
from tests.prefix_cache.token_target import Bench, TokenTarget

STATE_ITEMS = 8192
STATE_FILE_BYTES = 8 * STATE_ITEMS + 2 * PAGE_BYTES
BUDGET_BYTES = 12 * STATE_FILE_BYTES
DEADLINE_S = 60.0


class LargeStates(TokenTarget):
    """Its states take as much as thousands of tokens."""

    def export(self, node: str) -> dict[str, torch.Tensor]:
        tensors = super().export(node)
        if "ls0_delta.1" in tensors:
            tensors["ls0_delta.1"] = tensors["ls0_delta.1"].expand(STATE_ITEMS).contiguous()
        return tensors


class Worker(DiskWorker):
    """Over a directory that is empty at first."""

    def nodes(self) -> list:
        return []

    def find(self, orders) -> None:
        """No prompt here continues what another server has written."""
        self._tell(lambda prefixes: prefixes.found(orders, []))


class Watched(FileSystem):
    """Knows the most that ever lay there: when a file is whole under its temporary name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.most_bytes = 0

    def sync(self, raw: FileIO) -> None:
        super().sync(raw)
        self.most_bytes = max(self.most_bytes, bytes_in(self.root))


def bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@asynccontextmanager
async def serving(files: FileSystem, root: Path, **how) -> AsyncIterator[tuple[Bench, DiskTier]]:
    prefixes: list = []
    worker = Worker((0,), lambda outcome: outcome(prefixes[0]))
    bench = Bench(disk=worker, disk_bytes=BUDGET_BYTES, **how)
    bench.target.__class__ = LargeStates
    prefixes.append(bench.prefixes)
    async with tier_of(root, files, is_shared=how.get("is_shared", False)) as disk:
        task = asyncio.create_task(worker.serve(disk))
        yield bench, disk
        task.cancel()
        await asyncio.wait([task])


async def settled(bench: Bench) -> None:
    """Write all that is queued."""
    async with asyncio.timeout(DEADLINE_S):
        while len(bench.prefixes._write_back) or bench.disk._jobs._unfinished_tasks:
            bench.prefixes.hand_over()
            await asyncio.sleep(0.001)


async def chat(bench: Bench, number: int, num_turns: int, *, is_settled: bool) -> None:
    prompt = [number + 1] * 300
    for turn in range(num_turns):
        bench.serve([*prompt], len(prompt) - 6, num_generated=6)
        prompt += [100 + number, 200 + turn] * 60
        if is_settled:
            await settled(bench)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("is_settled", [True, False])
@pytest.mark.parametrize("recurrent", [True, False])
async def test_a_minutes_writes_never_exceed_the_budget(tmp_path, recurrent, is_settled) -> None:
    files = Watched(tmp_path)
    async with serving(files, tmp_path, recurrent=recurrent) as (bench, disk):
        for number in range(12):  # all within the age at which files stay
            await chat(bench, number, 4, is_settled=is_settled)
        await settled(bench)
        written = disk.counters().bytes_written
        assert bytes_in(tmp_path) == bench.index.num_bytes("disk")
    assert BUDGET_BYTES / 2 < files.most_bytes <= BUDGET_BYTES
    assert not recurrent or written > 2 * BUDGET_BYTES


@pytest.mark.slow
async def test_states_inside_a_conversation_go_before_its_rows(tmp_path) -> None:
    async with serving(Watched(tmp_path), tmp_path) as (bench, _):
        await chat(bench, 0, 16, is_settled=True)
        ends = bench.ends("disk")
    assert len(list(tmp_path.glob("*/*.safetensors"))) == len(ends) > 16  # no rows were removed
    held = [has_state for _, has_state in sorted(ends.items())]
    assert held[-2:] == [True, True]  # the tip of the conversation, and where it is opened
    assert not all(held)
    assert sum(held) == len(list(tmp_path.glob("*/*.end")))


@pytest.mark.slow
async def test_what_does_not_fit_at_all_is_not_written(tmp_path) -> None:
    files = Watched(tmp_path)
    async with serving(files, tmp_path) as (bench, _):
        bench.serve([1] * 40_000, num_generated=6)
        await settled(bench)
    assert files.most_bytes <= BUDGET_BYTES


@asynccontextmanager
async def sharing(
    num_servers: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[Bench]]:
    """Servers of one directory that look at it all the time."""
    monkeypatch.setattr(module, "RENEW_S", 0.02)
    monkeypatch.setattr(module, "RESCAN_WHEN_WRITING_S", 0.01)
    monkeypatch.setattr(module, "SHARED_SCAN_SHARE", 1.0)
    monkeypatch.setattr(index, "MIN_AGE_S", 0.0)
    async with AsyncExitStack() as stack:
        servers = [serving(FileSystem(), root, is_shared=True) for _ in range(num_servers)]
        yield [(await stack.enter_async_context(server))[0] for server in servers]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_of_servers_that_share_a_directory_one_keeps_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(4, tmp_path, monkeypatch) as benches:
        for number in range(12):
            await chat(benches[number % 4], number, 4, is_settled=True)
        written = [bench.index.saved["disk"] for bench in benches]
        await until(lambda: bytes_in(tmp_path) <= BUDGET_BYTES)
        evicted = [bench.index.evicted["disk"] for bench in benches]
    assert min(written) > 0
    assert sorted(evicted)[:3] == [0, 0, 0]
    assert max(evicted) > 0


async def test_the_keeper_makes_room_for_others_while_it_has_no_turn_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_bytes = (1 - index.HEADROOM) * BUDGET_BYTES
    async with sharing(2, tmp_path, monkeypatch) as benches:
        await until(lambda: any(bench.index.keeps_disk for bench in benches))
        keeper, other = sorted(benches, key=lambda bench: not bench.index.keeps_disk)
        for number in range(12):
            await chat(other, number, 4, is_settled=True)
            await until(lambda: bytes_in(tmp_path) <= most_bytes)
    assert keeper.index.evicted["disk"] > 0
    assert not other.index.evicted["disk"]
