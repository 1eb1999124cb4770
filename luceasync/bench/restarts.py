"""First tokens of engines that begin anew, beside plain reads of what they take up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from luceasync.bench.figures import median
from luceasync.bench.lives import Machine, ask, life, text_of, user
from luceasync.bench.model import Decoding
from luceasync.bench.reading import plain_read, prepare
from luceasync.bench.report import Report, figure, ms
from luceasync.bench.rounds import interleave, measure
from luceasync.disk_cache.disk import NUM_READERS

NUM_STEPS = 20
STATES = ("page cache", "disk")
Parts = tuple[float, ...]  # seconds


def compare_restarts(report: Report, machine: Machine, num_tokens: int, num_rounds: int) -> None:
    """The runs, interleaved, and a row for each place where files may be."""
    text = text_of(num_tokens - 64)
    asyncio.run(keep(machine, text[: len(text) // 2], 2))  # kernels are compiled
    for file in machine.files:
        file.unlink()
    prefill_s, num_prompt = asyncio.run(keep(machine, text, 1))
    files = machine.files
    runs: dict[str, Callable[[], Parts]] = {}
    for state in STATES:
        runs |= ways(machine, files, state, text)
    samples = interleave(runs, num_rounds, num_warmups=0)
    step = Decoding(machine.backend, 1, num_prompt)
    step_s = median(measure({"": step}, NUM_STEPS)[""])
    num_bytes = sum(file.stat().st_size for file in files)
    title = (
        f"{num_prompt} tokens, {num_bytes / 2**30:.2f} GiB in {len(files)} files; "
        f"prefill {prefill_s * 1e3:.0f} ms, decode step {step_s * 1e3:.1f} ms"
    )
    limits = ("read + copy + step", "ratio", f"{NUM_READERS} readers + copy + step", "their ratio")
    columns = ("files in", "first token", "restore", "new tokens", *limits, "prefill / it")
    table = report.table(columns, title)
    for state in STATES:
        ours, restore, new = (median(part) for part in zip(*samples[f"ours, {state}"], strict=True))
        cells = [ms(each, 0) for each in (ours, restore, new)]
        for num_readers in (1, NUM_READERS):
            plain = [seconds for [seconds] in samples[f"{num_readers}, {state}"]]
            limit_s = median(plain) + step_s
            cells += [ms(limit_s, 0), figure(ours / limit_s)]
        table.add(state, *cells, figure(prefill_s / ours, digits=1))


def ways(
    machine: Machine, files: Sequence[Path], state: str, text: str
) -> dict[str, Callable[[], Parts]]:
    """Our first token, and its limits by one reader and by as many as ours."""
    [device] = (shard.device for shard in machine.backend.plan.shards)

    def plain(num_readers: int) -> Callable[[], Parts]:
        return lambda: (plain_read(files, device, num_readers, state),)

    return {
        f"ours, {state}": lambda: asyncio.run(restart(machine, files, state, text)),
        f"1, {state}": plain(1),
        f"{NUM_READERS}, {state}": plain(NUM_READERS),
    }


async def keep(machine: Machine, text: str, max_tokens: int) -> tuple[float, int]:
    """Seconds to the first token of a prompt that nobody knows, and its tokens."""
    async with life(machine) as engine:
        asked = await ask(engine, user(text), max_tokens)
    return asked.first_s, asked.finish.usage.prompt_tokens


async def restart(machine: Machine, files: Sequence[Path], state: str, text: str) -> Parts:
    """Seconds to our first token, of its restore and of its new tokens."""
    async with life(machine) as engine:
        prepare(files, state)
        asked = await ask(engine, user(text), 2)
    finish = asked.finish
    assert finish.usage.cached_tokens > finish.usage.prompt_tokens - 8, finish
    return asked.first_s, finish.restore.restore_s, finish.timings.prefill_s
