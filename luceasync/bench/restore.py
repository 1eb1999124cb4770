"""`luceasync bench restore`: how fast kept prefixes are restored, from memory and from files, and
how much of a turn is lost when the process is killed.

An engine that is killed is a process that runs this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from luceasync.bench.device import is_gpu, synchronize
from luceasync.bench.engines import (
    Answered,
    EngineSetup,
    Messages,
    ask,
    engine_of,
    text_of,
    user,
    wait_until_written,
    write_random_model,
)
from luceasync.bench.model import Decoding, load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import (
    NOTHING,
    Report,
    Run,
    figure,
    interleave,
    measure,
    median,
    ms,
    percentile,
    share,
)
from luceasync.bench.shapes import SMALL, Shape
from luceasync.cyext.flatten import fill
from luceasync.disk_cache.disk import NUM_READERS
from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.copy_stream import DoneTicket, Ticket
from luceasync.host_cache.nodes import Span
from luceasync.models.precision import Dtype
from luceasync.nodes import NodeKey
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.platform import open_platform

STREAM, SOURCE, TARGET = range(3)  # lanes: one decodes, one is saved, one is restored into
STREAM_TOKENS = 256
TURN_TOKENS = 256
NUM_STEPS = 20  # of decoding, for the limit of a first token
STATES = ("page cache", "disk")
TAIL_TOKENS = 64  # of a prompt, which the template adds
PINNING_DEADLINE_S = 600.0


# --- nodes in memory ------------------------------------------------------------------------------


class Traffic:
    """A chain of nodes that is saved or restored again as soon as the previous copy has
    finished.
    """

    def __init__(self, backend: LayerSplitBackend, num_tokens: int, num_nodes: int) -> None:
        self._backend = backend
        ends = [num_tokens * (i + 1) // num_nodes for i in range(num_nodes)]
        begins = [0, *ends[:-1]]
        spans = zip(begins, ends, strict=True)
        self._spans = [Span(begin, end, end == num_tokens) for begin, end in spans]
        self._keys = [NodeKey(f"{num_nodes}-{end}".encode()) for end in ends]
        sizes = [backend.nodes.sizes.of(span) for span in self._spans]
        self.num_bytes = sum(rows + state for rows, state in sizes)
        self._saved: Ticket = DoneTicket()
        self._restored: Ticket = DoneTicket()

    def save(self) -> None:
        """Start to save the source lane unless a save is in progress."""
        if not self._saved.is_done:
            return
        for key, span in zip(self._keys, self._spans, strict=True):
            self._backend.nodes.drop(key)
            self._saved = self._backend.nodes.save(SOURCE, key, span)

    def restore(self) -> None:
        """Start to restore the chain into the target lane unless a restore is in progress."""
        if self._restored.is_done:
            self._restored = self._backend.nodes.restore(TARGET, self._keys, self._spans[-1].end)

    def wait(self) -> None:
        """Wait for the copies in progress."""
        self._saved.wait()
        self._restored.wait()
        synchronize()


@torch.inference_mode()
def bench_memory(
    report: Report,
    shape: Shape,
    device: str,
    *,
    dtype: Dtype,
    tokens: int,
    steps: int,
    rounds: int,
) -> None:
    """Gaps between the tokens of a stream while nodes are saved and restored beside it, and the
    rates of nodes beside a plain copy of pinned memory.
    """
    plan = plan_for(shape, [device], parallel=3, max_ctx_tokens=tokens + 512, dtype=dtype)
    token_bytes = sum(shard.token_bytes for shard in plan.shards)
    state_bytes = sum(shard.lane_state_bytes for shard in plan.shards)
    memory = ready_memory(device, 4 * (tokens * token_bytes + state_bytes) + (256 << 20))
    backend = load_random(shape, plan, memory=memory)
    prefill(backend, STREAM, random_prompt(STREAM_TOKENS))
    prefill(backend, SOURCE, random_prompt(tokens))
    node, turns = Traffic(backend, tokens, 1), Traffic(backend, tokens, tokens // TURN_TOKENS)
    for each in (node, turns):
        each.save()
        each.wait()
    tell_gaps(report, backend, node, turns, steps, rounds)
    tell_rates(report, device, node, turns, rounds)
    backend.close()
    memory.close()


def ready_memory(device: str, num_bytes: int) -> HostMemory:
    """Host memory for nodes, all of it pinned if the device is a GPU."""
    memory = host_memory([device], num_bytes)
    wait = getattr(memory, "wait", None)
    assert wait is None or wait(PINNING_DEADLINE_S), "host memory is not ready in time"
    return memory


def tell_gaps(
    report: Report,
    backend: LayerSplitBackend,
    node: Traffic,
    turns: Traffic,
    steps: int,
    rounds: int,
) -> None:
    """The stream alone, beside saves and beside restores, in turn."""
    decoding = Decoding(backend, 1, STREAM_TOKENS)

    def gaps(beside: Run) -> list[float]:
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            beside()
            decoding()
            seconds.append(time.perf_counter() - started)
        node.wait()
        turns.wait()
        return seconds

    phases: dict[str, Callable[[], list[float]]] = {
        "alone": lambda: gaps(lambda: None),
        "beside saves": lambda: gaps(node.save),
        "beside restores": lambda: gaps(node.restore),
        "beside restores of turns": lambda: gaps(turns.restore),
    }
    found = interleave(phases, rounds)
    samples = {name: [gap for part in parts for gap in part] for name, parts in found.items()}
    table = report.table(("stream", "p50", "p99", "max", "p99 / alone"), "gaps between tokens")
    for name, seconds in samples.items():
        shown = [ms(percentile(seconds, percent), 2) for percent in (50, 99, 100)]
        ratio = percentile(seconds, 99) / percentile(samples["alone"], 99)
        table.add(name, *shown, figure(ratio))


def tell_rates(report: Report, device: str, node: Traffic, turns: Traffic, rounds: int) -> None:
    """Nodes beside one copy of the same number of bytes, with nothing else in progress."""
    host = torch.zeros(node.num_bytes, dtype=torch.uint8, pin_memory=is_gpu(device))
    there = torch.zeros(node.num_bytes, dtype=torch.uint8, device=open_platform(device).device)
    runs: dict[str, Run] = {
        "one copy out": lambda: host.copy_(there, non_blocking=True),
        "save of a node": node.save,
        "one copy in": lambda: there.copy_(host, non_blocking=True),
        "restore of a node": node.restore,
        "restore of turns": turns.restore,
    }
    bases = {"save of a node": "one copy out", "restore of a node": "one copy in"}
    bases["restore of turns"] = "one copy in"

    def timed(run: Run) -> tuple[float, float]:
        """Seconds until it is queued, and until it has finished."""
        started = time.perf_counter()
        run()
        queued_s = time.perf_counter() - started
        node.wait()
        turns.wait()
        return queued_s, time.perf_counter() - started

    found = interleave({name: partial(timed, run) for name, run in runs.items()}, rounds)
    seconds = {name: median([arrived for _, arrived in parts]) for name, parts in found.items()}
    columns = ("what", "GB/s", "of the copy", "time to queue")
    table = report.table(columns, f"{node.num_bytes / 1e6:.0f} MB, nothing else under way")
    for name, parts in found.items():
        of_copy = share(seconds[bases[name]] / seconds[name]) if name in bases else NOTHING
        queued_s = median([queued for queued, _ in parts])
        table.add(name, figure(node.num_bytes / seconds[name] / 1e9), of_copy, ms(queued_s, 2))


# --- files, and the first token after a restart ---------------------------------------------------


def bench_restart(
    report: Report, shape: Shape, device: str, *, dtype: Dtype, tokens: int, rounds: int
) -> None:
    """First tokens of engines that start from the files, with these in the page cache and not. The
    limit is the minimum: reading the files, copying them to the device, and one decode step; or
    prefill, where that is faster.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model_dir = write_random_model(root / "model", shape, dtype, tokens + 4096)
        setup = EngineSetup(model_dir, device, dtype, tokens + 2048, root / "cache")
        text = text_of(tokens - TAIL_TOKENS)
        asyncio.run(keep(setup, text[: len(text) // 2]))  # compiles kernels
        for file in setup.files:
            file.unlink()
        prefill_s, num_prompt = asyncio.run(keep(setup, text))
        files = setup.files
        step_s = step_seconds(shape, device, dtype, num_prompt)
        runs: dict[str, Callable[[], tuple[float, ...]]] = {}
        for state in STATES:
            runs[f"ours, {state}"] = partial(restarted, setup, files, state, text)
            for count in (1, NUM_READERS):
                runs[f"{count}, {state}"] = partial(plain_read, files, device, count, state)
        samples = interleave(runs, rounds, num_warmups=0)
        num_bytes = sum(file.stat().st_size for file in files)
        title = (
            f"{num_prompt} tokens, {num_bytes / 2**30:.2f} GiB in {len(files)} files; prefill "
            f"{prefill_s * 1e3:.0f} ms, decode step {step_s * 1e3:.1f} ms"
        )
        limits = ("read + copy + step", "ratio", f"{NUM_READERS} readers", "their ratio")
        ours = ("files in", "first token", "restored", "restore", "new tokens")
        columns = (*ours, *limits, "of the better", "prefill / it")
        table = report.table(columns, title)
        for state in STATES:
            parts = zip(*samples[f"ours, {state}"], strict=True)
            first_s, restored, restore_s, new_s = (median(part) for part in parts)
            cells = [share(restored), *(ms(each, 0) for each in (restore_s, new_s))]
            better_s = prefill_s
            for count in (1, NUM_READERS):
                plain_s = median([seconds for [seconds] in samples[f"{count}, {state}"]])
                limit_s = plain_s + step_s
                better_s = min(better_s, limit_s)
                cells += [ms(limit_s, 0), figure(first_s / limit_s)]
            cells += [figure(first_s / better_s), figure(prefill_s / first_s, digits=1)]
            table.add(state, ms(first_s, 0), *cells)


async def keep(setup: EngineSetup, text: str) -> tuple[float, int]:
    """Seconds to the first token of a new prompt, and its number of tokens; its nodes
    are written.
    """
    async with engine_of(setup) as engine:
        answered = await ask(engine, user(text), 1)
        await wait_until_written(engine)
    return answered.first_s, answered.finish.usage.prompt_tokens


def restarted(
    setup: EngineSetup, files: Sequence[Path], state: str, text: str
) -> tuple[float, ...]:
    """Seconds to the first token of a new engine; the fraction of the prompt that was restored; and
    seconds of the restore and of the prefill of new tokens.
    """

    async def answer() -> Answered:
        async with engine_of(setup) as engine:
            prepare(files, state)
            return await ask(engine, user(text), 2)

    answered = asyncio.run(answer())
    finish = answered.finish
    restored = finish.usage.cached_tokens / finish.usage.prompt_tokens
    return answered.first_s, restored, finish.restore.restore_s, finish.timings.prefill_s


def step_seconds(shape: Shape, device: str, dtype: Dtype, context: int) -> float:
    """Median time of a decode step at this context, in seconds."""
    plan = plan_for(shape, [device], parallel=1, max_ctx_tokens=context + 256, dtype=dtype)
    backend = load_random(shape, plan)
    step = Decoding(backend, 1, context)
    with torch.inference_mode():
        seconds = median(measure({"": step}, NUM_STEPS)[""])
    backend.close()
    return seconds


def prepare(files: Sequence[Path], state: str) -> None:
    """Bring the files into the page cache, or drop them from it (`state` "disk"). The disk of a
    virtual machine may still cache them. Call it last: memory that has been free for long is
    slower.
    """
    for file in files:
        with file.open("rb") as raw:
            if state == "disk":
                os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while raw.read(1 << 24):
                    pass


def plain_read(files: Sequence[Path], device: str, num_readers: int, state: str) -> tuple[float]:
    """Seconds to read the files into allocated memory, and then copy it to the device."""
    place = open_platform(device).device
    sizes = [file.stat().st_size for file in files]
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=is_gpu(device)) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8, device=place) for size in sizes]
    synchronize()
    prepare(files, state)
    with ThreadPoolExecutor(num_readers) as pool:
        started = time.perf_counter()
        for _ in (map if num_readers == 1 else pool.map)(fill_from, files, hosts):
            pass
    for target, host in zip(targets, hosts, strict=True):
        if is_gpu(device):
            target.copy_(host, non_blocking=True)
        else:  # twice as fast as copying bytes with torch
            fill(target.numpy(), [0], [host.numpy()])
    synchronize()
    return (time.perf_counter() - started,)


def fill_from(file: Path, host: torch.Tensor) -> None:
    """Fill the tensor with the file."""
    memory: Any = host.numpy()
    region, done = memoryview(memory), 0
    with file.open("rb", buffering=0) as raw:
        while done < len(region):
            done += raw.readinto(region[done:]) or 0


# --- losses when killed ---------------------------------------------------------------------------

KILLED_DEVICE = "cpu:0"
KILLED_DTYPE: Dtype = "fp32"
NUM_ANSWER_TOKENS = 32
DEADLINE_S = 600.0

# A state of 150 MB, as many bytes as the rows of 2,300 tokens: the proportions of Qwen3.5-27B.
KILLED_SHAPE = SMALL["qwen3_5"] | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 512,
    "linear_num_key_heads": 24,
    "linear_num_value_heads": 48,
}
ALL, NEXT = "all written", "next"
KILLED_TOKENS = 160  # of a turn


def setup_in(root: Path, shape: Shape, num_tokens: int) -> EngineSetup:
    """An engine's setup over a model and a cache directory in `root`."""
    model_dir = root / "model"
    write_random_model(model_dir, shape, KILLED_DTYPE, num_tokens + 4096)
    return EngineSetup(model_dir, KILLED_DEVICE, KILLED_DTYPE, num_tokens, root / "cache")


def bench_killed(report: Report, *, delays: Sequence[float], rounds: int) -> None:
    """A chat's second turn is answered and its process is killed after each delay; a new process
    then gets the third turn. The loss is what it would have restored if everything had been
    written.
    """
    columns = ("kill -9 after", "found of the next turn's", "lost tokens", "written before, MB")
    table = report.table((*columns, "of", "left unfinished"))
    names = [*map(str, delays), ALL]
    runs = {name: partial(killed_after, name) for name in names}
    samples = interleave(runs, rounds, num_warmups=0)
    full = samples[ALL][0]
    for name in names:
        found = samples[name]
        table.add(
            name if name == ALL else f"{name} s",
            f"{min(sample['cached'] for sample in found):.0f} of {full['prompt']:.0f}",
            int(max(full["cached"] - sample["cached"] for sample in found)),
            figure(median([sample["bytes"] for sample in found]) / 1e6, digits=0),
            figure(full["bytes"] / 1e6, digits=0),
            int(max(sample["unfinished"] for sample in found)),
        )
    seconds = median([sample["seconds"] for sample in samples[ALL]])
    report.say(f"\nAll is written {seconds:.2f} s after the answer (median of {rounds}).")


def killed_after(delay: str) -> dict[str, float]:
    """One sample: bytes in the directory after the kill, and what the next process restored."""
    with tempfile.TemporaryDirectory() as root:
        with part_process(delay, root) as process:
            seconds = fields_after(process, "written")["seconds"] if delay == ALL else 0.0
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        files = [path for path in Path(root, "cache").rglob("*") if path.is_file()]
        unfinished = [path for path in files if path.suffix == ".tmp"]
        num_bytes = sum(path.stat().st_size for path in files) - sum(
            path.stat().st_size for path in unfinished
        )
        with part_process(NEXT, root) as process:
            found = fields_after(process, "found")
        left = [path for path in Path(root).rglob("*") if path.suffix == ".tmp"]
        assert not left, f"{len(left)} temporary files outlive the next start"
    return found | {"bytes": num_bytes, "unfinished": len(unfinished), "seconds": seconds}


def part_process(part: str, root: str) -> subprocess.Popen[str]:
    """A process that runs the part."""
    command = [sys.executable, "-m", "luceasync.bench.restore", part, root]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def fields_after(process: subprocess.Popen[str], word: str) -> dict[str, float]:
    """The fields that the process prints after that word."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            fields: dict[str, float] = json.loads(text.removeprefix(word))
            return fields
    raise SystemExit(f"the process ended before it had {word}")


def say(word: str, fields: Mapping[str, float]) -> None:
    print(word, json.dumps(fields), flush=True)


async def be_killed(setup: EngineSetup, root: Path, delay: str) -> None:
    """Two turns; the first one is written before the second. Then this process kills itself, which
    other load does not delay.
    """
    messages: Messages = []
    async with engine_of(setup) as engine:
        for number in range(2):
            messages += user(text_of(KILLED_TOKENS, f"{number}. "))
            answered = await ask(engine, messages, NUM_ANSWER_TOKENS // 2)
            answered_at = time.perf_counter()
            messages.append({"role": "assistant", "content": answered.text})
            (root / "chat.json").write_text(json.dumps(messages))
            if number == 0:
                await wait_until_written(engine)
        if delay == ALL:
            await wait_until_written(engine)
            say("written", {"seconds": time.perf_counter() - answered_at})
        else:
            await asyncio.sleep(float(delay))
        os.kill(os.getpid(), signal.SIGKILL)


async def ask_next(setup: EngineSetup, root: Path) -> None:
    """The third turn, by a process that starts from the files."""
    messages: Messages = json.loads((root / "chat.json").read_text())
    async with engine_of(setup) as engine:
        usage = (await ask(engine, [*messages, *user("And now?")], 1)).finish.usage
        say("found", {"cached": usage.cached_tokens, "prompt": usage.prompt_tokens})


def run_part(part: str, root: Path) -> None:
    """The work of the killed process, or of the next one."""
    setup = setup_in(root, KILLED_SHAPE, 2048)
    asyncio.run(ask_next(setup, root) if part == NEXT else be_killed(setup, root, part))


if __name__ == "__main__":
    run_part(sys.argv[1], Path(sys.argv[2]))
