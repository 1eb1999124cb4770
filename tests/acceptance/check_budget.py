"""Many servers write to one directory while its keeper is killed: how much ever lies there. CPU.

    python -m tests.acceptance.check_budget [--writers 20] [--budget 60]

Each writer is a process with the prefix cache of a server, on nodes of a counting model. Exit
status 1 if more than the headroom lay beyond the budget, if no other writer took the keeper's place
in time, or if files no longer gave way.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from luceasync.disk_cache.files import FileSystem
from luceasync.disk_cache.keeper import LEASE, LEASE_S, RENEW_S
from luceasync.prefix_cache.index import HEADROOM
from luceasync.prefix_tree.eviction import MIN_AGE_S
from tests.acceptance import command
from tests.disk_cache.tiers import tier_of
from tests.prefix_cache.test_disk_budget import LargeStates, Worker
from tests.prefix_cache.token_target import Bench

NUM_TURNS = 4
LOOK_S = 0.02
TAKE_OVER_S = LEASE_S + 2 * RENEW_S


async def write(root: Path, number: int, budget_bytes: int, pause_s: float) -> None:
    """Converse, and write what it makes, until killed."""
    draws = random.Random(number)
    prefixes: list = []
    worker = Worker((0,), lambda outcome: outcome(prefixes[0]))
    bench = Bench(disk=worker, disk_bytes=budget_bytes, is_shared=True)
    bench.target.__class__ = LargeStates
    prefixes.append(bench.prefixes)
    async with tier_of(root, FileSystem(), is_shared=True) as disk:
        serving = asyncio.create_task(worker.serve(disk))
        while not serving.done():
            prompt = [draws.randrange(1, 2**15) for _ in range(300)]
            for _ in range(NUM_TURNS):
                bench.serve([*prompt], len(prompt) - 6, num_generated=6)
                prompt += [draws.randrange(1, 2**15) for _ in range(120)]
                until_s = time.monotonic() + draws.uniform(0.5, 1.5) * pause_s
                while time.monotonic() < until_s:
                    bench.prefixes.hand_over()
                    await asyncio.sleep(0.05)


@dataclass
class Seen:
    """What lay in the directory while it was looked at. `names`: of files, in all this time."""

    most_bytes: int = 0
    num_gone: int = 0
    names: frozenset[str] = frozenset()

    def look(self, root: Path) -> None:
        names, num_bytes = set(), 0
        for path in root.rglob("*"):
            with suppress(FileNotFoundError):
                if path.is_file() and path.name != LEASE:
                    num_bytes += path.stat().st_size
                    names.add(path.name)
        whole = {name for name in names if not name.endswith(".tmp")}
        self.most_bytes = max(self.most_bytes, num_bytes)
        self.num_gone += len(self.names - whole)
        self.names = frozenset(whole)


def keeper_of(root: Path) -> int:
    """The process that has the lease; 0 if none has."""
    with suppress(FileNotFoundError, IndexError):
        return int((root / LEASE).read_text().split(".")[1])
    return 0


def watch(root: Path, seconds: float, until: Callable[[], bool] = lambda: False) -> Seen:
    """Look at the directory for so long, or until something has happened."""
    seen, end_s = Seen(), time.monotonic() + seconds
    while time.monotonic() < end_s and not until():
        seen.look(root)
        time.sleep(LOOK_S)
    return seen


def start(number: int, work: Callable[[], object]) -> int:
    """Do it in another process; its id."""
    process_id = os.fork()
    if not process_id:
        with suppress(KeyboardInterrupt):
            work()
        os._exit(1)
    return process_id


def rows(root: Path, writers: Sequence[int], seconds: float):
    """What happened, how long it took, and what lay there meanwhile."""
    began_s = time.monotonic()
    seen = watch(root, MIN_AGE_S + seconds)
    yield "the first keeper", time.monotonic() - began_s, seen, bool(keeper_of(root))
    began_s, first = time.monotonic(), keeper_of(root)
    os.kill(first, signal.SIGKILL)
    seen = watch(root, 2 * TAKE_OVER_S, lambda: keeper_of(root) not in (0, first))
    took_s = time.monotonic() - began_s
    yield "killed, until another keeps it", took_s, seen, took_s < TAKE_OVER_S
    began_s = time.monotonic()
    seen = watch(root, seconds)
    is_kept = keeper_of(root) in set(writers) - {first} and seen.num_gone > 0
    yield "the second keeper", time.monotonic() - began_s, seen, is_kept


def main() -> int:
    """Run it; the exit status."""
    parser = command.parser(__doc__)
    parser.add_argument("--writers", type=int, default=20, help="default: 20")
    parser.add_argument("--budget", type=int, default=60, help="megabytes; default: 60")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds of a turn; default: 4")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each keeper; default: 60")
    options = parser.parse_args()
    report, is_right = command.open_report(options), True
    budget_bytes = options.budget * 10**6
    columns = ("what", "s", "most there, MB", "of the budget", "files gone", "right")
    table = report.table(columns, f"{options.writers} writers, {options.budget} MB")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        writers = [
            start(n, lambda n=n: asyncio.run(write(root, n, budget_bytes, options.pause)))
            for n in range(options.writers)
        ]
        try:
            for what, seconds, seen, is_kept in rows(root, writers, options.seconds):
                share = seen.most_bytes / budget_bytes
                is_good = is_kept and share <= 1 + HEADROOM
                is_right &= is_good
                most = f"{seen.most_bytes / 1e6:.1f}"
                table.add(what, f"{seconds:.0f}", most, f"{share:.1%}", seen.num_gone, str(is_good))
        finally:
            for process_id in writers:
                os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
