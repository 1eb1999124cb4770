"""`luceasync bench ipc`: the cost of a hop between processes, and of splitting a model over two."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from luceasync.bench.device import synchronize
from luceasync.bench.echo import (
    CHUNK_BYTES,
    DEADLINE_S,
    Chunk,
    Done,
    bare_end,
    channel_end,
    hop_of,
    ping_of,
)
from luceasync.bench.model import (
    Decoding,
    plan_for,
    prefill,
    random_prompt,
    register_random_format,
    write_model,
)
from luceasync.bench.report import (
    Report,
    figure,
    interleave,
    median,
    ms,
    paired_ratio,
    percentile,
    us,
    wall,
)
from luceasync.bench.shapes import Shape
from luceasync.cyext.flatten import fill
from luceasync.ipc.launcher import LocalProcess
from luceasync.ipc.memory import SealedMemory
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan, stages_of
from luceasync.pipeline.remote.discovery import BackendProgram
from luceasync.pipeline.remote.fleet import Fleet

APART_S = 5e-3
NUM_COPIES = 10
NODE_BYTES = 64 << 20


# --- hops and chunks ------------------------------------------------------------------------------


def bench_hops(report: Report, *, transport: str, hops: int, chunks: int, rounds: int) -> None:
    """Hops of an activation (four lanes of 5120 in bf16, there and back) beside a bare ping-pong of
    64 bytes over a socket; then chunks of 20 MiB beside the copies that they consist of.
    """
    with bare_end() as bare, channel_end(transport) as started:
        compare_hops(report, started, bare, hops, rounds)
        compare_chunks(report, started, chunks, rounds)


def compare_hops(
    report: Report, started: LocalProcess, bare: socket.socket, hops: int, rounds: int
) -> None:
    """Hops in immediate succession, and with pauses."""
    columns = ("when", "bare p50", "bare p99", "hop p50", "hop p99", "hop / bare, p50")
    table = report.table(columns, "a hop")
    acts = {"bare": ping_of(bare), "hop": hop_of(started)}
    few = max(min(50, hops), hops // 10)
    for when, apart_s, num_hops in (("back to back", 0.0, hops), ("every 5 ms", APART_S, few)):
        variants = {name: partial(latencies, act, num_hops, apart_s) for name, act in acts.items()}
        found = interleave(variants, rounds)
        merged = {name: list(chain.from_iterable(samples)) for name, samples in found.items()}
        halves = {name: [median(each) for each in samples] for name, samples in found.items()}
        cells = [us(percentile(merged[name], p), 0) for name in acts for p in (50, 99)]
        table.add(when, *cells, figure(paired_ratio(halves["hop"], halves["bare"])))


def latencies(act: Callable[[], None], count: int, apart_s: float) -> list[float]:
    """Seconds of each of `count` runs that start at least `apart_s` apart."""
    found = []
    for _ in range(count):
        found.append(wall(act))
        if apart_s:
            time.sleep(max(0.0, apart_s - found[-1]))
    return found


def compare_chunks(report: Report, started: LocalProcess, chunks: int, rounds: int) -> None:
    """Chunks that are written while earlier ones are read. Their limit is the slower half, since
    each half has its own core.
    """
    memory = SealedMemory.create("bench", CHUNK_BYTES)
    own = memoryview(bytearray(os.urandom(CHUNK_BYTES)))
    shared = memory.view
    variants: dict[str, Callable[[], float]] = {
        "to shared memory": lambda: copy_rate(shared, own),
        "out of it": lambda: copy_rate(own, shared),
        "chunks": lambda: chunk_rate(started, chunks),
    }
    found = interleave(variants, rounds)
    shared.release()
    memory.close()
    halves = zip(found["to shared memory"], found["out of it"], strict=True)
    limit = [min(pair) for pair in halves]
    table = report.table(("what", "GB/s", "of the slower half"), "chunks of 20 MiB")
    for name, rates in found.items():
        of_limit = figure(paired_ratio(rates, limit))
        table.add(name, figure(median(rates) / 1e9, digits=1), of_limit)


def copy_rate(target: memoryview, source: memoryview) -> float:
    """Bytes per second that one thread copies, bypassing the caches."""
    started = time.perf_counter()
    for _ in range(NUM_COPIES):
        fill(target, [0], [source])
    return NUM_COPIES * CHUNK_BYTES / (time.perf_counter() - started)


def chunk_rate(started: LocalProcess, num_chunks: int) -> float:
    """Bytes per second of chunks, until the last one is answered."""
    channel = started.channel
    source = bytearray(os.urandom(CHUNK_BYTES))
    numbers = []
    begun = time.perf_counter()
    for _ in range(num_chunks):
        room = channel.reserve(CHUNK_BYTES, DEADLINE_S)
        fill(room.view, [0], [source])
        numbers.append(channel.send(Chunk(), room, deadline_s=DEADLINE_S))
    for number in numbers:
        channel.answer(number, Done, DEADLINE_S)
    return num_chunks * CHUNK_BYTES / (time.perf_counter() - begun)


# --- one process and two --------------------------------------------------------------------------


@torch.inference_mode()
def bench_processes(
    report: Report,
    name: str,
    shape: Shape,
    devices: Sequence[str],
    *,
    dtype: Dtype,
    context: int,
    prompt: int,
    lanes: Sequence[int],
    steps: int,
    rounds: int,
) -> None:
    """Decode and prefill of a model over two devices, alternating between one process for both and
    one process for each. Ratios above 1 mean that two processes are faster.
    """
    plan = plan_for(
        shape,
        devices,
        parallel=max(lanes),
        max_ctx_tokens=max(prompt, context + steps) + 256,
        dtype=dtype,
    )
    if plan.suits_one_thread:  # as in the engine
        torch.set_num_threads(1)
    register_random_format()
    columns = ("model", "what", "one process", "two processes", "one / two", "more a step")
    table = report.table(columns, f"one process and two, {','.join(devices)}")
    with tempfile.TemporaryDirectory() as there, ExitStack() as closing:
        folder = Path(there)
        write_model(folder, shape, dtype)
        backends = [closing.enter_context(opened(folder, each)) for each in (plan, in_two(plan))]
        for backend in backends:
            for lane in range(max(lanes)):
                backend.prefill(lane, 0, random_prompt(context, lane), project=False)
        cases: dict[str, Callable[[LayerSplitBackend], float]] = {
            f"decode, {count} lanes": partial(decode_s, count, context, steps) for count in lanes
        }
        cases[f"prefill, {prompt} tokens"] = partial(prefill_s, prompt)
        for what, run in cases.items():
            variants = {str(i): partial(run, backend) for i, backend in enumerate(backends)}
            found = interleave(variants, rounds, num_warmups=2)
            one, two = (median(found[each]) for each in "01")
            ratio = figure(paired_ratio(found["0"], found["1"]), digits=3)
            table.add(name, what, ms(one, 3), ms(two, 3), ratio, ms(two - one, 3))


def in_two(plan: Plan) -> Plan:
    """The plan with a separate process for each device except the first."""
    devices = tuple(replace(each, process=i) for i, each in enumerate(plan.devices))
    return replace(plan, devices=devices, stages=stages_of([d.process for d in devices]))


@contextmanager
def opened(folder: Path, plan: Plan) -> Iterator[LayerSplitBackend]:
    """The model in the processes of the plan."""
    program = backend_program(folder)
    programs = {each.process: BackendProgram(program) for each in plan.devices if not each.is_here}
    with ExitStack() as closing:
        fleet = Fleet(ModelFiles(folder), plan, programs, "shared", NODE_BYTES)
        closing.callback(fleet.close)
        backend = LayerSplitBackend.open(ModelFiles(folder), plan, open_remote=fleet.open_stage)
        closing.callback(backend.close)
        yield backend


def backend_program(folder: Path) -> Path:
    """A luceasync-backend of this environment that can read models of random weights."""
    path = folder / "luceasync-backend"
    code = (
        "from luceasync.backend.app import main; "
        "from luceasync.bench.model import register_random_format as register; register(); main()"
    )
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(Path(__file__).parents[2]))}\n"
        f'exec {shlex.quote(sys.executable)} -P -c {shlex.quote(code)} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def decode_s(num_lanes: int, position: int, num_steps: int, backend: LayerSplitBackend) -> float:
    """Seconds of a step."""
    decoding = Decoding(backend, num_lanes, position)
    return wall(lambda: decoding.steps(num_steps)) / num_steps


def prefill_s(num_tokens: int, backend: LayerSplitBackend) -> float:
    """Seconds of a prompt."""
    prompt = random_prompt(num_tokens)
    synchronize()
    return wall(lambda: prefill(backend, 0, prompt))
