"""What a conversation writes and runs, what a restart costs, and what saving costs others. CPU.

    python scripts/bench_cache.py [--part turns|branches|restart|stall] [--tokens 32768]

Random weights in float32; --tokens in ten turns; the loop is asked every millisecond how late it is
while a node of 1 GiB is saved and written. Restarts: see bench_restart.py. Prints markdown.
"""

from __future__ import annotations

import asyncio
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from luceasync.bench import command
from luceasync.bench.figures import percentile
from luceasync.bench.lives import Machine, ask, forget, life, make_machine, text_of, user, written
from luceasync.bench.report import Report, Table, figure, ms
from luceasync.bench.restarts import compare_restarts
from luceasync.bench.small import SMALL, WIDE
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.request import Sampling
from luceasync.text.tokenizer import Tokenizer

NUM_TURNS = 10
NUM_BRANCHES = 5
NUM_ANSWER_TOKENS = 64
NUM_RESTARTS = 6
STALL_TOKENS = 1100
NUM_NODES = 4  # of 1 GiB, one after the other


# A process that only sleeps: by how much the machine alone wakes it too late.
SLEEPER = """
import select, sys, time
late = [0.0]
while not select.select([sys.stdin], [], [], 0)[0]:
    before = time.perf_counter()
    time.sleep(0.001)
    late.append(time.perf_counter() - before - 0.001)
print(max(late))
"""


async def watch(late_s: list[float]) -> None:
    """Note by how much the event loop is late, every millisecond."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        late_s.append(time.perf_counter() - before - 0.001)


def main() -> None:
    """Measure and print."""
    parts: dict[str, Callable[[Report, Machine, int], Coroutine[Any, Any, None]]] = {
        "turns": converse,
        "branches": branch,
        "stall": stall,
    }
    parser = command.parser(__doc__)
    parser.add_argument("--part", choices=(*parts, "restart"))
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    report = command.begin(options)
    for part in [options.part] if options.part else (*parts, "restart"):
        shapes = {"wide": WIDE} if part == "stall" else SMALL
        num_tokens = STALL_TOKENS if part == "stall" else options.tokens
        for name, config in shapes.items():
            with tempfile.TemporaryDirectory() as root:
                machine = make_machine(
                    config, "cpu:0", num_tokens + 2048, Path(root), dtype="fp32", parallel=1
                )
                report.say(f"\n{part}, {name}")
                if part == "restart":
                    compare_restarts(report, machine, num_tokens, NUM_RESTARTS)
                else:
                    asyncio.run(parts[part](report, machine, num_tokens))
                machine.backend.close()


async def converse(report: Report, machine: Machine, num_tokens: int) -> None:
    """Ten turns; each is to run what it adds, and to write that."""
    messages: list[dict[str, Any]] = []
    known = 0
    table = report.table(("turn", "prompt", "new", "prefilled"))
    async with life(machine) as engine:
        for turn in range(NUM_TURNS):
            messages += user(text_of(num_tokens // NUM_TURNS - 80, f"{turn}: "))
            asked = await ask(engine, messages, NUM_ANSWER_TOKENS, letters())
            usage, num_run = asked.finish.usage, asked.finish.timings.num_prefilled
            table.add(turn + 1, usage.prompt_tokens, usage.prompt_tokens - known, num_run)
            known = usage.prompt_tokens + usage.completion_tokens - 1
            messages.append({"role": "assistant", "content": asked.text})
    tell_written(report, machine, known, NUM_TURNS)


async def branch(report: Report, machine: Machine, num_tokens: int) -> None:
    """One long system prompt with tools, and five tasks that go on from it."""
    system = {"role": "system", "content": text_of(num_tokens // 2, "Tools: 0: ")}
    num_new = 0
    table = report.table(("branch", "prompt", "cached", "prefilled"))
    async with life(machine) as engine:
        for number in range(NUM_BRANCHES):
            task = user(text_of(num_tokens // 2 // NUM_BRANCHES, f"{number}: "))
            asked = await ask(engine, [system, *task], NUM_ANSWER_TOKENS, letters())
            usage, num_run = asked.finish.usage, asked.finish.timings.num_prefilled
            table.add(number + 1, usage.prompt_tokens, usage.cached_tokens, num_run)
            num_new += num_run + usage.completion_tokens - 1
    tell_written(report, machine, num_new, NUM_BRANCHES + 1)


def tell_written(report: Report, machine: Machine, num_tokens: int, num_states: int) -> None:
    """What lies in the directory when an engine has ended, beside what so many tokens and states
    need.
    """
    files = machine.files
    num_bytes = sum(file.stat().st_size for file in files)
    sizes = machine.backend.nodes.sizes
    rows, state = num_tokens * sizes.token_bytes, sizes.state_bytes
    needed = rows + num_states * state
    report.say(
        f"\n{len(files)} files, {num_bytes / 2**20:.1f} MiB; keys and values {rows / 2**20:.1f} "
        f"MiB and {num_states} states of {state / 2**20:.2f} MiB are {needed / 2**20:.1f} MiB: "
        f"{num_bytes / needed:.3f}x"
    )
    report.keep({"written_bytes": num_bytes, "needed_bytes": needed})


async def stall(report: Report, machine: Machine, num_tokens: int) -> None:
    """How late the loop is while nothing, a prefill, and a write of more than 1 GiB happens."""
    table = report.table(
        ("while", "seconds", "loop late, p99", "p100", "a process that only sleeps, p100")
    )
    texts = [text_of(num_tokens - 40, f"{number}: ") for number in range(NUM_NODES)]
    async with life(machine) as engine:
        async with watched(table, "nothing happens"):
            await asyncio.sleep(2.0)
        for text in texts:
            async with watched(table, "a prompt is run and its node saved"):
                await ask(engine, user(text), 1)
            async with watched(table, "the node is written"):
                await written(engine)
    async with watched(table, "the nodes are forgotten"):
        await asyncio.to_thread(forget, machine)
    async with life(machine) as engine, watched(table, "one is read again"):
        await ask(engine, user(texts[0]), 1)


@asynccontextmanager
async def watched(table: Table, what: str) -> AsyncIterator[None]:
    late_s: list[float] = [0.0]
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sleeper:
        await asyncio.sleep(0.1)
        task, started = asyncio.create_task(watch(late_s)), time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - started
        task.cancel()
        machine_s = float(sleeper.communicate("end")[0])
    cells = [ms(s) for s in (percentile(late_s, 99), max(late_s), machine_s)]
    table.add(what, figure(elapsed_s), *cells)


def letters() -> Sampling:
    """Answers in letters, so that they can be sent back as text."""
    encode = Tokenizer.load(BUNDLED_MODEL_DIR).encode
    return Sampling(logit_bias={encode(letter)[0]: 100.0 for letter in string.ascii_lowercase})


if __name__ == "__main__":
    main()
