"""What a conversation writes and runs, what a restart costs, and what saving costs others. CPU.

    python scripts/bench_cache.py [--part turns|branches|restart|stall] [--tokens 32768]

Random weights in float32; --tokens in ten turns; the loop is asked every millisecond how late it is
while a node of 1 GiB is saved and written. Restarts: see bench_restart.py. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from bench_restart import Machine, first_token, life, measure

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.engine.engine import LocalEngine
from luceasync.engine.outbox import Emitted
from luceasync.engine.pump import Pump
from luceasync.hoststore.memory import PlainMemory
from luceasync.hoststore.nodes import Span
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import make_plan
from luceasync.request import ChatPrompt, Finish, Request, Sampling
from luceasync.text.tokenizer import Tokenizer

NUM_TURNS = 10
NUM_BRANCHES = 5
NUM_ANSWER_TOKENS = 64
WRITE_DEADLINE_S = 120.0
STALL_TOKENS = 1100
SENTENCE = "The prefix of this conversation has been read before and need not be read again. "

COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": COMMON
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "rope_parameters": {
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "rope_type": "default",
        },
    },
}
WIDE = SHAPES["qwen3"] | {  # 1 MiB of keys and values for each token
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 256,
}


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("turns", "branches", "restart", "stall")
    parser.add_argument("--part", choices=parts)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    for part in [options.part] if options.part else parts:
        shapes = {"wide": WIDE} if part == "stall" else SHAPES
        for name, config in shapes.items():
            num_tokens = STALL_TOKENS if part == "stall" else options.tokens
            with tempfile.TemporaryDirectory() as root:
                machine = build(config, num_tokens, Path(root))
                print(f"\n{part}, {name}\n")
                asyncio.run(run(part, machine, num_tokens))
                machine.backend.close()


async def run(part: str, machine: Machine, num_tokens: int) -> None:
    if part == "restart":
        await measure(machine, num_tokens)
        return
    async with life(machine) as engine:
        if part == "turns":
            await converse(engine, machine, num_tokens)
        elif part == "branches":
            await branch(engine, machine, num_tokens)
        else:
            await stall(engine)


def build(config: dict[str, Any], num_tokens: int, root: Path) -> Machine:
    """Random weights of the shape."""
    spec = parse_spec(config)
    plan = make_plan(
        spec,
        find_devices(["cpu:0"]),
        dtype="fp32",
        weights=None,
        parallel=1,
        max_ctx_tokens=num_tokens + 2048,
        prefill_chunk_tokens=None,
    )
    memory = PlainMemory()
    source = RandomSource(torch.float32, torch.device("cpu"))
    return Machine(
        spec, plan, LayerSplitBackend.load(spec, plan, source, memory=memory), memory, root
    )


async def converse(engine: LocalEngine, machine: Machine, num_tokens: int) -> None:
    """Ten turns; each is to run what it adds, and to write that."""
    messages: list[dict[str, Any]] = []
    known = 0
    print("| turn | prompt | new | prefilled |")
    print("|---|---|---|---|")
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": text_of(num_tokens // NUM_TURNS - 80, turn)})
        finish, answer = await ask(engine, messages)
        num_prompt, num_run = finish.usage.prompt_tokens, finish.timings.num_prefilled
        print(f"| {turn + 1} | {num_prompt} | {num_prompt - known} | {num_run} |")
        known = num_prompt + finish.usage.completion_tokens - 1
        messages.append({"role": "assistant", "content": answer})
    await report(engine, machine, known, NUM_TURNS)


async def branch(engine: LocalEngine, machine: Machine, num_tokens: int) -> None:
    """One long system prompt with tools, and five tasks that go on from it."""
    system = {"role": "system", "content": "Tools: " + text_of(num_tokens // 2, 0)}
    num_new = 0
    print("| branch | prompt | cached | prefilled |")
    print("|---|---|---|---|")
    for number in range(NUM_BRANCHES):
        task = {"role": "user", "content": text_of(num_tokens // 2 // NUM_BRANCHES, number)}
        finish, _ = await ask(engine, [system, task])
        usage, num_run = finish.usage, finish.timings.num_prefilled
        print(f"| {number + 1} | {usage.prompt_tokens} | {usage.cached_tokens} | {num_run} |")
        num_new += num_run + usage.completion_tokens - 1
    await report(engine, machine, num_new, NUM_BRANCHES + 1)


async def report(engine: LocalEngine, machine: Machine, num_tokens: int, num_states: int) -> None:
    """What lies in the directory, beside what is needed for that many tokens and states."""
    await written(engine)
    files = list(machine.root.glob("bench/*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    rows, _ = machine.backend.nodes.sizes.of(Span(0, num_tokens, with_state=False))
    _, state = machine.backend.nodes.sizes.of(Span(0, 1, with_state=True))
    needed = rows + num_states * state
    print(
        f"\n{len(files)} files, {num_bytes / 2**20:.1f} MiB; keys and values {rows / 2**20:.1f} "
        f"MiB and {num_states} states of {state / 2**20:.2f} MiB are {needed / 2**20:.1f} MiB: "
        f"{num_bytes / needed:.3f}x"
    )


async def stall(engine: LocalEngine) -> None:
    """How late the loop is while nothing, a prefill, and a write of more than 1 GiB happens."""
    print("| while | seconds | loop late, p99 | p100 | a process that only sleeps, p100 |")
    print("|---|---|---|---|---|")
    async with watched("nothing happens"):
        await asyncio.sleep(2.0)
    async with watched("a prompt is run and its node saved"):
        await first_token(engine, text_of(STALL_TOKENS - 40, 0), 1)
    async with watched("the node is written"):
        await written(engine)
    for _ in range(3):
        async with watched("it is written again"):
            await write_again(engine)
    async with watched("the node is forgotten"):
        assert engine._pump is not None
        held = engine._pump.prefixes._index
        await engine._thread.call(  # type: ignore[union-attr]
            lambda pump: [held.forget(node.key, "memory") for node in list(held)] and [], 60.0
        )
        await asyncio.sleep(0.2)
    async with watched("it is read again"):
        await first_token(engine, text_of(STALL_TOKENS - 40, 0), 1)


async def write_again(engine: LocalEngine) -> None:
    """As if the disk had none of it."""
    assert engine._thread is not None

    def queue(pump: Pump) -> list[Emitted]:
        for node in pump.prefixes._index:
            pump.prefixes._to_disk._add(node, with_end=True)
        return []

    await engine._thread.call(queue, WRITE_DEADLINE_S)
    await written(engine)


@asynccontextmanager
async def watched(what: str) -> AsyncIterator[None]:
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
    late_s.sort()
    p99_s = late_s[int(0.99 * (len(late_s) - 1))]
    cells = [p99_s, late_s[-1], machine_s]
    print(f"| {what} | {elapsed_s:.2f} | {' | '.join(f'{s * 1e3:.1f} ms' for s in cells)} |")


async def written(engine: LocalEngine) -> None:
    """Wait until the disk has what it is to have."""
    assert engine._thread is not None
    assert engine._shelf is not None
    for _ in range(3):  # an outcome may be followed by another order
        await engine._thread.call(lambda pump: pump.step(), WRITE_DEADLINE_S)
        await engine._thread.call(
            lambda pump: pump.prefixes.hand_over(wait=True) or [], WRITE_DEADLINE_S
        )
        await engine._shelf.drain(WRITE_DEADLINE_S)


async def ask(engine: LocalEngine, messages: Sequence[dict[str, Any]]) -> tuple[Finish, str]:
    """An answer in letters, so that it can be sent back as text, and how it ended."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    bias = {tokenizer.encode(letter)[0]: 100.0 for letter in string.ascii_lowercase}
    stream = await engine.open(
        Request(
            ChatPrompt(list(messages)),
            sampling=Sampling(logit_bias=bias),
            max_tokens=NUM_ANSWER_TOKENS,
            ignore_eos=True,
        )
    )
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish is not None
    return deltas[-1].finish, "".join(delta.text for delta in deltas)


def text_of(num_tokens: int, number: int) -> str:
    """A text of about so many tokens that begins with a number of its own."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    per_sentence = len(tokenizer.encode(SENTENCE * 16)) / 16
    return f"{number}: " + SENTENCE * int(num_tokens / per_sentence)


if __name__ == "__main__":
    main()
