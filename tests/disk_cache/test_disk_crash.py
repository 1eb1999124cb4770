"""Processes that are killed, and processes that share a directory: whole nodes or none."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luceasync.disk_cache.outcomes import Miss
from luceasync.nodes import MissReason
from tests.disk_cache.faulty_files import BIG, BIG_END, STEPS
from tests.disk_cache.node_files import NAMESPACE, contents_of
from tests.disk_cache.tiers import as_bytes, quarantined, temporaries, tier_of

ROOT = Path(__file__).parents[2]


def child(root: Path, when: str, step: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.disk_cache.faulty_files", str(root), when, step]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


async def expect_whole_nodes_or_none(root: Path) -> int:
    """How many of the child's nodes are there, each as it was written."""
    async with tier_of(root) as tier:
        keys = {found.key for found in (await tier.scan()).nodes}
        for number in range(4):
            found = await tier.read(f"{number:08x}")
            if f"{number:08x}" in keys:
                end = contents_of(number, BIG_END)
                assert as_bytes(found) in (contents_of(number, BIG), contents_of(number, BIG) | end)
                assert found.end_fault is None
            else:
                assert found.reason == MissReason.GONE
    assert not temporaries(root / NAMESPACE)
    assert not quarantined(root / NAMESPACE)
    return len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_process_killed_at_any_step_leaves_a_whole_node_or_none(
    tmp_path: Path, when: str, step: str
) -> None:
    with child(tmp_path, when, step) as process:
        assert process.wait(60) == -9
    is_renamed = (when, step) == ("after", "rename") or step == "sync_directory"
    assert await expect_whole_nodes_or_none(tmp_path) == int(is_renamed)


@pytest.mark.slow
async def test_a_process_killed_at_any_time_leaves_whole_nodes_only(tmp_path: Path) -> None:
    source = random.Random(0)
    for _ in range(6):
        with child(tmp_path, "before", "never") as process:
            time.sleep(source.uniform(0, 0.15))
            process.kill()
        await expect_whole_nodes_or_none(tmp_path)


@pytest.mark.slow
async def test_reads_are_whole_while_another_process_replaces_the_file(tmp_path: Path) -> None:
    contents = contents_of(0, BIG)
    with child(tmp_path, "before", "never") as process:
        async with tier_of(tmp_path) as tier:
            while isinstance(await tier.read("00000003"), Miss):
                pass
            for _ in range(20):
                assert as_bytes(await tier.read("00000000")) == contents | contents_of(0, BIG_END)
        process.kill()
