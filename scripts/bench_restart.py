"""Time to the first token after a restart with a kept prefix, beside what it cannot be faster than.

    python scripts/bench_restart.py [--shape qwen3.5-27b] [--device cuda:0] [--tokens 32768]

Random weights. A prompt is prefilled and kept; then engines that know nothing start over the same
directory and are asked again. Beside them: the same bytes read, by one thread or as many as ours,
and copied to the device, and one decode step. With files in the page cache, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_gpu import SHAPES

from luceasync.config import BUNDLED_MODEL_DIR, EngineConfig
from luceasync.cyext.flatten import fill
from luceasync.engine.cache_directory import Cabinet
from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.engine import LocalEngine
from luceasync.engine.limits import held_bytes_of, warm_bytes_of
from luceasync.engine.prompts import Language
from luceasync.engine.pump import Pump
from luceasync.engine.thread import Loaded
from luceasync.hoststore.arena import Arena, WarmMemory
from luceasync.hoststore.memory import HostMemory
from luceasync.keeping.disk_orders import DiskOrders
from luceasync.keeping.memory_nodes import MemoryNodes, NoFeatures
from luceasync.keeping.node_index import Limits
from luceasync.keeping.prefixes import Prefixes
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.models.spec import ModelSpec
from luceasync.nodefiles.disk import NUM_READERS, DiskTier
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices, host_memory
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.request import ChatPrompt, Finish, ModelCard, Request
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

NUM_RUNS = 6
MEMORY_BYTES = 12 << 30
LIMITS = Limits(MEMORY_BYTES, disk_bytes=1 << 40)
SENTENCE = "The prefix of this conversation has been read before and need not be read again. "


@dataclass(frozen=True)
class Machine:
    """What outlives a restart here: the weights, lanes and pinned memory. The rest starts anew."""

    spec: ModelSpec
    plan: Plan
    backend: LayerSplitBackend
    memory: HostMemory
    root: Path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3.5-27b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=32768)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        machine = build(args.shape, args.device, args.tokens, Path(root))
        asyncio.run(measure(machine, args.tokens))
        machine.backend.close()


def build(shape: str, device: str, num_tokens: int, root: Path) -> Machine:
    """Load random weights of the shape."""
    spec = parse_spec(SHAPES[shape])
    plan = make_plan(
        spec,
        find_devices([device]),
        dtype="bf16",
        weights=None,
        parallel=2,
        max_ctx_tokens=num_tokens + 1024,
        prefill_chunk_tokens=None,
    )
    memory = host_memory([device], MEMORY_BYTES)
    backend = LayerSplitBackend.load(
        spec, plan, RandomSource(torch.bfloat16, torch.device(device)), memory=memory
    )
    return Machine(spec, plan, backend, memory, root)


@asynccontextmanager
async def life(machine: Machine) -> AsyncIterator[LocalEngine]:
    """An engine that knows of nothing but the weights and the directory."""
    plan = machine.plan
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    card = ModelCard("bench", 0, plan.max_ctx_tokens, machine.spec.num_parameters, "bench")
    template = ChatTemplate.load(BUNDLED_MODEL_DIR)
    language = Language(card, tokenizer, template, machine.spec.vocab_size, plan.parallel)
    memory = memory_of(machine)
    held: list[Prefixes] = []

    def load(shelf: DiskOrders) -> Loaded:
        prefixes = Prefixes(
            MemoryNodes(machine.backend.nodes, NoFeatures(), machine.spec.vocab_size),
            shelf,
            LIMITS,
            recurrent=machine.spec.delta is not None,
            chunk_tokens=plan.prefill_chunk_tokens,
        )
        held.append(prefixes)
        decoding = PlainDecoding(machine.backend)
        chunk_tokens = plan.prefill_chunk_tokens
        pump = Pump(
            machine.backend,
            decoding,
            prefixes,
            num_lanes=plan.parallel,
            chunk_tokens=chunk_tokens,
            synchronize=open_platform(plan.shards[-1].device).synchronize,
        )
        return Loaded(pump, lambda: None)

    def open_disk() -> DiskTier:
        return DiskTier(machine.root, "bench", machine.spec.end_kinds, allocate=memory.allocate)

    cabinet = Cabinet(open_disk, tuple(shard.begin for shard in plan.shards))
    async with LocalEngine(language, load, EngineConfig(), cabinet) as engine:
        await engine.load()
        yield engine
    for node in held[0]._index:
        machine.backend.nodes.drop(node.key)


def memory_of(machine: Machine) -> HostMemory:
    """Memory for nodes as a server has it when its weights are read: what is prepared meanwhile is
    there.
    """
    if isinstance(machine.memory, Arena):
        return machine.memory
    warm_bytes = warm_bytes_of(LIMITS, held_bytes_of(machine.root))
    devices = [shard.device for shard in machine.plan.shards]
    memory = host_memory(devices, MEMORY_BYTES, warm_bytes=warm_bytes)
    assert not isinstance(memory, WarmMemory) or memory.wait(60)
    return memory


async def first_token(engine: LocalEngine, text: str, max_tokens: int) -> tuple[float, Finish]:
    """Seconds from the request to its first token, and how it ended."""
    message = {"role": "user", "content": text}
    started = time.perf_counter()
    stream = await engine.open(
        Request(ChatPrompt([message]), max_tokens=max_tokens, ignore_eos=True)
    )
    seconds = 0.0
    async for delta in stream:
        if delta.token_ids and not seconds:
            seconds = time.perf_counter() - started
        if delta.finish is not None:
            return seconds, delta.finish
    raise AssertionError("a stream ends with a finish")


async def measure(machine: Machine, num_tokens: int) -> None:
    """The runs, interleaved."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    per_sentence = len(tokenizer.encode(SENTENCE * 64)) / 64
    text = SENTENCE * int((num_tokens - 64) / per_sentence)
    async with life(machine) as engine:
        await first_token(engine, text[: len(text) // 2], 2)  # kernels are compiled
    for file in machine.root.glob("bench/*.safetensors"):
        file.unlink()
    async with life(machine) as engine:
        prefill_s, finish = await first_token(engine, text, 1)
        num_prompt_tokens = finish.usage.prompt_tokens
    files = sorted(machine.root.glob("bench/*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    rows: dict[str, list[tuple[float, ...]]] = {"page cache": [], "disk": []}
    for turn in range(NUM_RUNS):
        for state, runs in rows.items():
            runs.append(await one_run(machine, files, state, text, turn))
    step_s = decode_step(machine, num_prompt_tokens)
    print(
        f"{num_prompt_tokens} tokens, {num_bytes / 2**30:.2f} GiB in {len(files)} files; ", end=""
    )
    print(f"prefill {prefill_s * 1e3:.0f} ms, decode step {step_s * 1e3:.1f} ms\n")
    report(rows, prefill_s, step_s)


async def one_run(
    machine: Machine, files: list[Path], state: str, text: str, turn: int
) -> tuple[float, ...]:
    """Seconds to our first token, of its restore and of its new tokens, and of the limits by one
    reader and by as many as ours. Their order turns: a disk may be slower once much was read.
    """
    spent: dict[int, tuple[float, ...]] = {}
    for place in range(3):
        num_readers = (0, 1, NUM_READERS)[(place + turn) % 3]
        prepare(files, "page cache")
        if num_readers:
            spent[num_readers] = (plain(files, machine, num_readers, state),)
            continue
        async with life(machine) as engine:
            prepare(files, state)
            seconds, finish = await first_token(engine, text, 2)
        assert finish.usage.cached_tokens > finish.usage.prompt_tokens - 8, finish
        spent[0] = (seconds, finish.restore.restore_s, finish.timings.prefill_s)
    return (*spent[0], *spent[1], *spent[NUM_READERS])


def report(rows: dict[str, list[tuple[float, ...]]], prefill_s: float, step_s: float) -> None:
    """Print the medians."""
    readers = f"{NUM_READERS} readers"
    print("| files in | first token | restore | new tokens | read + copy + step | ratio ", end="")
    print(f"| {readers} + copy + step | ratio | prefill / it |")
    print("|---|---|---|---|---|---|---|---|---|")
    for state, runs in rows.items():
        ours, restore, new, *limits = (statistics.median(c) for c in zip(*runs, strict=True))
        cells = [state, *(f"{s * 1e3:.0f} ms" for s in (ours, restore, new))]
        for limit in (limit + step_s for limit in limits):
            cells += [f"{limit * 1e3:.0f} ms", f"{ours / limit:.2f}"]
        print(f"| {' | '.join(cells)} | {prefill_s / ours:.1f} |")


def prepare(files: list[Path], state: str) -> None:
    """Make the files' pages be, or not be, in the page cache; a virtual machine's disk may keep
    them where we cannot tell. To be called last: memory that has been free for long is slower.
    """
    for file in files:
        with file.open("rb") as raw:
            if state == "disk":
                os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while raw.read(1 << 24):
                    pass


def plain(files: list[Path], machine: Machine, num_readers: int, state: str) -> float:
    """Seconds to read the files into memory that is there, and then copy it to the device."""
    device = open_platform(machine.plan.shards[0].device).device
    sizes = [file.stat().st_size for file in files]
    on_gpu = device.type == "cuda"
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for size in sizes]
    targets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    synchronize(device)
    prepare(files, state)
    with ThreadPoolExecutor(num_readers) as pool:
        started = time.perf_counter()
        for _ in (map if num_readers == 1 else pool.map)(read, files, hosts):
            pass
    for target, host in zip(targets, hosts, strict=True):
        if on_gpu:
            target.copy_(host, non_blocking=True)
        else:  # twice as fast as torch copies bytes
            fill(target.numpy(), [0], [host.numpy()])
    synchronize(device)
    return time.perf_counter() - started


def read(file: Path, host: torch.Tensor) -> None:
    """Fill the tensor with the file."""
    region, done = memoryview(host.numpy()), 0
    with file.open("rb", buffering=0) as raw:
        while done < len(region):
            done += raw.readinto(region[done:])


def decode_step(machine: Machine, position: int) -> float:
    """Seconds of a decode step at the end of the prompt; what the lane holds does not matter."""
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        logits = machine.backend.decode([0], [position], [1])
        int(logits.argmax(-1))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
