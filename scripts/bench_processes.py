"""A model over two devices: both in one process, beside one of them in a process of its own.

    python scripts/bench_processes.py [--devices cuda:0,cuda:1] [--shapes qwen3.5-27b,qwen3-4b]
    python scripts/bench_processes.py --devices cpu:0,cpu:1 --shapes small --prompt-tokens 512

Random weights, the same layers on each device, in turns; above 1.00 two processes are the faster. A
hop goes from the first device to the second one in another process and back; chunks go one way.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from luceasync.bench import command
from luceasync.bench.device import synchronize
from luceasync.bench.figures import median, paired_ratio, percentile
from luceasync.bench.model import plan_for, prefill, random_prompt
from luceasync.bench.random_weights import know_it, write_model
from luceasync.bench.report import Report, figure, ms
from luceasync.bench.rounds import interleave
from luceasync.bench.shapes import SHAPES, Shape
from luceasync.bench.small import SMALL
from luceasync.errors import ChannelClosed
from luceasync.ipc.channel import Channel, Outgoing, Received
from luceasync.ipc.handshake import Statement, be_greeted, greet
from luceasync.ipc.launcher import LocalLauncher, LocalStarted, Program
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Message
from luceasync.ipc.wiring import come_home, open_rings
from luceasync.models.config import read_spec
from luceasync.models.precision import Dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.crossing import lend, put, put_soon
from luceasync.pipeline.devices import pinned_by
from luceasync.pipeline.fleet import Fleet
from luceasync.pipeline.plan import Plan, group_shards
from luceasync.pipeline.platform import Event, open_platform
from luceasync.ranking.logits import Wanted

ROOT = Path(__file__).parents[1]
CHILD = "--child"
PARALLEL = 4
NODE_BYTES = 64 << 20
HOP = ((PARALLEL, 1, 5120), torch.bfloat16)
CHUNK = ((1, 2048, 5120), torch.bfloat16)
CHUNK_BYTES = 2048 * 5120 * 2
RING_BYTES = (64 << 20, 64 << 20)
DEADLINE_S = 120.0
APART_S = 8e-3  # of hops between steps: half a step of a large model


class Hop(Message, frozen=True):
    """Take this activation to your device, and give it back."""


class Chunk(Message, frozen=True):
    """Take this to your device; say when it is there."""


class Done(Message, frozen=True):
    """The answer."""


def serve(device: str) -> None:
    """The other end of hops and chunks."""
    home = come_home((Hop, Chunk))
    be_greeted(home.channel, Statement(), DEADLINE_S)
    home.channel.register(pinned_by([device]))
    home.channel.keep_awake()
    place = open_platform(device).device
    with suppress(ChannelClosed):  # the measurement has ended
        answer_all(home.channel, place)
    home.close()


def answer_all(channel: LocalChannel[Hop | Chunk], place: torch.device) -> None:
    """Until the other end is gone. A chunk is answered when it is on the device; the next one is
    looked for meanwhile, as by a backend.
    """
    platform = open_platform(str(place) if place.index is not None else f"{place}:0")
    coming: deque[tuple[Event, Received[Any]]] = deque()

    def arrive() -> None:
        event, got = coming.popleft()
        event.synchronize()
        got.payload.free()
        channel.send(Done(), answers=got.number, deadline_s=DEADLINE_S)

    while True:
        while coming and not channel.poll(0.0):
            arrive()
        got = channel.receive(DEADLINE_S)
        assert got.payload is not None
        is_hop = isinstance(got.message, Hop)
        here = lend(got.payload, [HOP if is_hop else CHUNK])[0].to(place, non_blocking=True)
        if is_hop:
            room = channel.reserve(here.nbytes, DEADLINE_S)
            put(room, [here])
            got.payload.free()
            channel.send(Done(), room, answers=got.number, deadline_s=DEADLINE_S)
            continue
        with platform.on_device():
            coming.append((platform.record_event(), got))
        if len(coming) > 1:
            arrive()


def synchronize_on(place: torch.device) -> None:
    open_platform(str(place) if place.index is not None else f"{place}:0").synchronize()


def random_program(folder: Path, script: str) -> Path:
    """A luceasync-backend that draws its weights."""
    path = folder / "random-backend"
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -P "
        f'{ROOT / "scripts" / script} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def in_two(plan: Plan) -> Plan:
    """The plan with each device but the first in a process of its own."""
    devices = tuple(replace(each, process=i) for i, each in enumerate(plan.devices))
    groups = group_shards([device.process for device in devices])
    return replace(plan, devices=devices, groups=groups)


@contextmanager
def opened(
    folder: Path, plan: Plan, script: str = "random_backend.py"
) -> Iterator[LayerSplitBackend]:
    """The model over the processes of the plan, others of which run `script`."""
    spec = read_spec(folder)
    program = random_program(folder, script)
    programs = {each.process: program for each in plan.devices if not each.is_here}
    with ExitStack() as closing:
        fleet = Fleet(folder, spec, plan, programs, "shared", NODE_BYTES)
        closing.callback(fleet.close)
        backend = LayerSplitBackend.open(folder, spec, plan, open_remote=fleet.open_group)
        closing.callback(backend.close)
        yield backend


def decode_s(backend: LayerSplitBackend, num_lanes: int, position: int, num_steps: int) -> float:
    """Seconds a step, greedily, as the engine runs it."""
    lanes, tokens = list(range(num_lanes)), [1] * num_lanes
    begun = time.perf_counter()
    for step in range(num_steps):
        logits = backend.decode(lanes, [position + step] * num_lanes, tokens)
        tokens = logits.rank(Wanted()).candidates().best.tolist()
    return (time.perf_counter() - begun) / num_steps


def prefill_s(backend: LayerSplitBackend, num_tokens: int) -> float:
    prompt = random_prompt(num_tokens)
    synchronize()
    begun = time.perf_counter()
    prefill(backend, 0, prompt)
    return time.perf_counter() - begun


def compare(
    report: Report, name: str, shape: Shape, devices: Sequence[str], options: argparse.Namespace
) -> None:
    """One process and two, in turns."""
    dtype: Dtype = options.dtype
    plan = plan_for(
        shape,
        devices,
        parallel=PARALLEL,
        max_ctx_tokens=options.prompt_tokens + 256,
        dtype=dtype,
    )
    if plan.suits_one_thread:  # as the engine runs it
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there, ExitStack() as closing:
        folder = Path(there)
        write_model(folder, shape, dtype)
        backends = {
            "one": closing.enter_context(opened(folder, plan)),
            "two": closing.enter_context(opened(folder, in_two(plan))),
        }
        cases: dict[str, Callable[[LayerSplitBackend], float]] = {
            "decode, 1 lane": lambda b: decode_s(b, 1, options.context, options.steps),
            "decode, 4 lanes": lambda b: decode_s(b, PARALLEL, options.context, options.steps),
            f"prefill, {options.prompt_tokens} tokens": lambda b: prefill_s(
                b, options.prompt_tokens
            ),
        }
        columns = ("shape", "what", "one process", "two processes", "one / two", "more a step")
        table = report.table(columns, "one process and two")
        for backend in backends.values():
            for lane in range(PARALLEL):
                backend.prefill(lane, 0, random_prompt(options.context, lane), project=False)
        for what, run in cases.items():
            variants = {name: lambda b=b, run=run: run(b) for name, b in backends.items()}
            rounds = options.rounds if "decode" in what else max(3, options.rounds // 2)
            found = interleave(variants, rounds, num_warmups=2)
            one, two = (median(found[each]) for each in ("one", "two"))
            ratio = paired_ratio(found["one"], found["two"])
            table.add(name, what, ms(one, 3), ms(two, 3), figure(ratio, digits=3), ms(two - one, 3))


@contextmanager
def echo_end(device: str) -> Iterator[LocalStarted]:
    """A process that has the device, at the other end of a channel."""
    rings = open_rings("shared", RING_BYTES)
    assert rings is not None
    program = Program(
        Path(sys.executable),
        "echo",
        RING_BYTES,
        rings=rings,
        environment={"PYTHONPATH": str(ROOT)},
    )
    launcher = LocalLauncher(program, lambda line: print(line, file=sys.stderr))
    try:
        started = launcher.launch([__file__, CHILD, device], (Done,))
        greet(started.channel, Statement(), DEADLINE_S)
        yield started
    finally:
        launcher.close()
        rings.close()


def hop_of(started: LocalStarted, place: torch.device) -> Callable[[], float]:
    """Seconds of one hop there and back, from a device to a device."""
    channel = started.channel
    source = torch.randn(HOP[0]).to(place, HOP[1])

    def hop() -> float:
        begun = time.perf_counter()
        room = channel.reserve(source.nbytes, DEADLINE_S)
        put(room, [source])
        got = channel.call(Hop(), Done, room, deadline_s=DEADLINE_S)
        assert got.payload is not None
        back = lend(got.payload, [HOP])[0].to(place, non_blocking=True)
        synchronize_on(place)
        got.payload.free()
        seconds = time.perf_counter() - begun
        assert back.shape == source.shape
        return seconds

    return hop


def chunks_rate(started: LocalStarted, place: torch.device, count: int) -> float:
    """Bytes a second, from a device to a device, as chunks of a prompt go: one is written while
    one before it is sent and read.
    """
    channel = started.channel
    source = torch.randn(CHUNK[0], dtype=torch.float32).to(place, CHUNK[1])
    synchronize_on(place)
    numbers = []
    begun = time.perf_counter()
    unsent: list[tuple[Outgoing, Event | None]] = []
    for _ in range(count):
        room = channel.reserve(CHUNK_BYTES, DEADLINE_S)
        unsent.append((room, put_soon(room, source)))
        if len(unsent) > 1:
            numbers.append(send_chunk(channel, *unsent.pop(0)))
    numbers.append(send_chunk(channel, *unsent.pop(0)))
    for number in numbers:
        channel.answer(number, Done, DEADLINE_S)
    return count * CHUNK_BYTES / (time.perf_counter() - begun)


def send_chunk(channel: Channel[Any], room: Outgoing, is_there: Event | None) -> int:
    if is_there is not None:
        is_there.synchronize()
    return channel.send(Chunk(), room, deadline_s=DEADLINE_S)


def pinned_rate(place: torch.device, count: int) -> float:
    """Bytes a second of copies from the device to pinned memory: one half of a chunk's way."""
    source = torch.zeros(CHUNK_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target.copy_(source)
    begun = time.perf_counter()
    for _ in range(count):
        target.copy_(source)
    return count * CHUNK_BYTES / (time.perf_counter() - begun)


def compare_copies(report: Report, devices: Sequence[str], options: argparse.Namespace) -> None:
    """Hops and chunks between the first two devices, in two processes."""
    place = open_platform(devices[0]).device
    with echo_end(devices[1]) as started:
        started.channel.register(pinned_by([devices[0]]))
        started.channel.keep_awake()
        hop = hop_of(started, place)
        table = report.table(("when", "p50", "p99"), "a hop there and back, device to device")
        busy = torch.randn(2048, 2048, device=place)
        for when, apart_s in (("back to back", 0.0), ("between steps", APART_S)):
            found = []
            for _ in range(20 + options.hops):
                found.append(hop())
                until = time.perf_counter() + apart_s
                while time.perf_counter() < until:
                    busy @ busy  # a device that rests is slow to begin
                    synchronize_on(place)
            p50, p99 = (percentile(found[20:], each) * 1e6 for each in (50, 99))
            table.add(when, figure(p50, "us", 0), figure(p99, "us", 0))
        rates = interleave(
            {
                "chunks": lambda: chunks_rate(started, place, options.chunks),
                "pinned": lambda: pinned_rate(place, options.chunks),
            },
            options.rounds,
        )
        chunks = report.table(("what", "GB/s", "of a pinned copy"), "chunks of 20 MiB, one way")
        for name, values in rates.items():
            share = paired_ratio(values, rates["pinned"])
            chunks.add(name, figure(median(values) / 1e9, digits=1), figure(share))


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == [CHILD]:
        return serve(sys.argv[2])
    parser = command.parser(__doc__, rounds=7)
    parser.add_argument("--devices", type=command.names, default=["cuda:0", "cuda:1"])
    parser.add_argument("--shapes", type=command.names, default=["qwen3.5-27b", "qwen3-4b"])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--steps", type=int, default=16, help="of decoding, in one sample")
    parser.add_argument("--hops", type=int, default=300, help="0: neither hops nor chunks")
    parser.add_argument("--chunks", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    report = command.begin(options, options.devices)
    know_it()
    shapes = {**SHAPES, "small": SMALL["qwen3_5"]}
    with torch.inference_mode():
        if options.hops:
            compare_copies(report, options.devices, options)
        for name in options.shapes:
            compare(report, name, shapes[name], options.devices, options)
    return None


if __name__ == "__main__":
    main()
