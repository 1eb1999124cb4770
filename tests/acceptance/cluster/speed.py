"""What crossing a link costs: hops, steps and prompts. Run as a program, it listens."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from luceasync.backend.listen import BackendListener
from luceasync.bench import ipc
from luceasync.bench.echo import RING_BYTES, Done, hop_of
from luceasync.bench.engines import EngineSetup, ask, write_random_model
from luceasync.bench.model import (
    plan_for,
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
)
from luceasync.bench.shapes import shape_of
from luceasync.config import PlacementConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.ipc.certificates import tls_context
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, LocalProcess, Program
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.discovery import BackendProgram
from luceasync.pipeline.remote.fleet import Fleet
from luceasync.request import TokenPrompt
from tests.acceptance.cluster.machine import PYTHON_PATH, machine_of
from tests.wire import Wire

PATIENCE_S = 60.0
CONTEXT = 256  # tokens before a step
LEAST_GAIN = 1.5
NUM_PINGS = 300
MOST_CORES = 7  # of a machine, for steps: the rest is the link's
LISTEN = "tests.acceptance.cluster.speed"


# --- hops -----------------------------------------------------------------------------------------


def check_hops(report: Report, options: argparse.Namespace) -> None:
    """Hops of an activation, and chunks of 20 MiB: through a socket, and over the link."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        program, answers = (_echo_program(Path(there), waits=waits) for waits in (True, False))
        words = [sys.executable, "-m", LISTEN, str(program), ""]
        machine = closing.enter_context(machine_of(words, None, options.machines))
        link = ("--connect", str(machine.address), "--name", "box2", "--tls", str(machine.box1))
        brings = ipc.backend_program(Path(there))
        started = {
            "a process of this machine": closing.enter_context(_echo_of(answers)),
            "over the link": closing.enter_context(_echo_of(_with_packages(brings), link)),
        }
        rates = {name: partial(ipc.chunk_rate, each, 10) for name, each in started.items()}
        acts = {name: hop_of(each) for name, each in started.items()}
        hops = interleave({n: partial(ipc.latencies, act, 500, 0.0) for n, act in acts.items()}, 5)
        chunks = interleave(rates, 5)
        table = report.table(("what", "a hop, p50", "p99", "chunks, GB/s"), "hops of 40 KB")
        for name, samples in hops.items():
            merged = [each for sample in samples for each in sample]
            rate = figure(median(chunks[name]) / 1e9, digits=2)
            table.add(name, us(percentile(merged, 50), 0), us(percentile(merged, 99), 0), rate)


def _echo_program(folder: Path, *, waits: bool) -> Path:
    """A program that answers hops; `waits`: once it is told what to be."""
    path = folder / f"echo-{waits}"
    code = "from luceasync.bench.echo import serve; serve()"
    if waits:
        code = f"from luceasync.backend.listen import wait_for_assignment as w; w(); {code}"
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(PYTHON_PATH)}\n"
        f"exec {shlex.quote(sys.executable)} -P -c {shlex.quote(code)}\n"
    )
    path.chmod(0o755)
    return path


@contextmanager
def _echo_of(program: Path, link: tuple[str, ...] = ()) -> Iterator[LocalProcess]:
    launcher = LocalLauncher(Program(program, "echo", RING_BYTES, arguments=link))
    try:
        started = launcher.launch((), (Done,))
        greet(started.channel, Statement(), PATIENCE_S)
        yield started
    finally:
        launcher.close()


# --- speed ----------------------------------------------------------------------------------------


def listen_with(program: str, cores: str, address: str, tls: str) -> None:
    """Listen with a backend of random weights, on these cores; a process of its own."""
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    register_random_format()
    host, port = address.rsplit(":", 1)
    context = tls_context(Path(tls), "--tls", is_server=True)
    BackendListener(socket.create_server((host, int(port))), context, [program]).serve()


def _backend_program(folder: Path) -> Path:
    """A luceasync-backend that can read models of random weights, with this process's packages."""
    return _with_packages(ipc.backend_program(folder))


def _with_packages(path: Path) -> Path:
    begin, exports, rest = path.read_text().partition("export PYTHONPATH=")
    path.write_text(f"{begin}{exports}{shlex.quote(PYTHON_PATH)}\n{rest.partition(chr(10))[2]}")
    return path


def _pinned(program: Path, cores: Sequence[int]) -> Path:
    """The program on these cores, as that of another machine is."""
    if not cores:
        return program
    command, pinned = program.read_text(), program.with_name("pinned-backend")
    pinned.write_text(command.replace("exec ", f"exec taskset -c {','.join(map(str, cores))} "))
    pinned.chmod(0o755)
    return pinned


def _cores(machine: int, least: int) -> list[int]:
    """Half of the cores; none if they are fewer than `least`."""
    cores = sorted(os.sched_getaffinity(0))
    half = min(len(cores) // 2, MOST_CORES)
    return cores[machine * half : (machine + 1) * half] if half >= least else []


@torch.inference_mode()
def check_speed(report: Report, options: argparse.Namespace) -> None:
    """Steps of one process, two of this machine, and two machines, in turns."""
    names, delay_s = ("cpu:0", "cpu:1"), options.round_trip / 2e3
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        folder, shape = Path(there), shape_of(options.shape)
        register_random_format()
        plan = plan_for(shape, names, parallel=1, max_ctx_tokens=2 * CONTEXT, dtype="fp32")
        write_model(folder, shape, "fp32")
        program, cores = _backend_program(folder), [_cores(machine, 1) for machine in (0, 1)]
        words = [sys.executable, "-m", LISTEN, str(program), ",".join(map(str, cores[1]))]
        machine = closing.enter_context(machine_of(words, delay_s, options.machines))
        if cores[0]:
            os.sched_setaffinity(0, cores[0])
            closing.callback(os.sched_setaffinity, 0, {*cores[0], *cores[1]})
            torch.set_num_threads(len(cores[0]))
        arguments = ("--connect", str(machine.address), "--name", "box2", "--tls")
        link = BackendProgram(program, (*arguments, str(machine.box1)), machine.address)
        two = ipc.in_two(plan)
        opened = {
            "one process": closing.enter_context(_opened(folder, plan, {})),
            "two processes": closing.enter_context(
                _opened(folder, two, {1: BackendProgram(_pinned(program, cores[1]))})
            ),
            "two machines": closing.enter_context(_opened(folder, _on_machine(two), {1: link})),
        }
        for backend in opened.values():
            backend.prefill(0, 0, random_prompt(CONTEXT), project=False)
        run = partial(ipc.decode_s, 1, CONTEXT, options.steps)
        variants = {name: partial(run, backend) for name, backend in opened.items()}
        taken = interleave(variants, options.rounds, num_warmups=1)
    one, processes, machines = taken.values()
    columns = ("what", *opened, "two processes / two machines", "one / two machines")
    wire = us(_round_trip_s(delay_s), 0).text
    title = f"{options.shape}, float32, a round trip of {wire} on the wire"
    report.table(columns, title).add(
        "a step",
        *(ms(median(each), 2) for each in taken.values()),
        figure(paired_ratio(processes, machines), digits=3),
        figure(paired_ratio(one, machines), digits=3),
    )


def check_prompts(report: Report, options: argparse.Namespace) -> bool:
    """The first token after a long prompt, of an engine on one machine and of one on two that have
    as many cores each, in turns. Whether two are faster by LEAST_GAIN.
    """
    return asyncio.run(_check_prompts(report, options))


async def _check_prompts(report: Report, options: argparse.Namespace) -> bool:
    num_tokens = options.prompt
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        folder = Path(there)
        model = write_random_model(
            folder / "model", shape_of(options.shape), "fp32", num_tokens + 512
        )
        program, cores = _backend_program(folder), [_cores(machine, 1) for machine in (0, 1)]
        words = [sys.executable, "-m", LISTEN, str(program), ",".join(map(str, cores[1]))]
        machine = closing.enter_context(machine_of(words, 0.0, options.machines))
        os.sched_setaffinity(0, cores[0])
        closing.callback(os.sched_setaffinity, 0, {*cores[0], *cores[1]})
        torch.set_num_threads(len(cores[0]))
        one = EngineSetup(model, "cpu:0", "fp32", num_tokens + 512).config
        placed = PlacementConfig(
            devices=("cpu:0", "box2/cpu:0"),
            layer_split=(1.0, 1.0),
            ipc_bins=(f"cpu@box2={machine.url}",),
            ipc_tls=machine.box1,
        )
        configs = {"one machine": one, "two machines": replace(one, placement=placed)}
        taken: dict[str, list[float]] = {name: [] for name in configs}
        async with AsyncExitStack() as open_engines:
            engines: dict[str, LocalEngine] = {}
            for name, config in configs.items():
                engines[name] = await open_engines.enter_async_context(build_engine(config))
                await engines[name].load()
            for number in range(options.rounds):
                for name in [*engines][:: 1 if number % 2 else -1]:  # there and back
                    prompt = TokenPrompt(tuple(random_prompt(num_tokens, number)))
                    taken[name].append((await ask(engines[name], prompt, 1)).first_s)
    alone, both = taken.values()
    gain = paired_ratio(alone, both)
    columns = ("tokens", "cores of each", *configs, "one / two")
    table = report.table(columns, f"the first token of a long prompt, {options.shape}, float32")
    times = (ms(median(each), 0) for each in (alone, both))
    table.add(num_tokens, len(cores[0]), *times, figure(gain, digits=3))
    return gain >= LEAST_GAIN


def _on_machine(plan: Plan) -> Plan:
    """The plan whose second device is on "box2"."""
    (first, last), (head, tail) = plan.devices, plan.shards
    devices = first, replace(last, name=f"box2/{last.name}")
    return replace(plan, devices=devices, shards=(head, replace(tail, device=devices[1].name)))


@contextmanager
def _opened(
    folder: Path, plan: Plan, programs: dict[int, BackendProgram]
) -> Iterator[LayerSplitBackend]:
    with ExitStack() as closing:
        fleet = Fleet(ModelFiles(folder), plan, programs, "auto", ipc.NODE_BYTES)
        closing.callback(fleet.close)
        backend = LayerSplitBackend.open(ModelFiles(folder), plan, open_remote=fleet.open_stage)
        closing.callback(backend.close)
        yield backend


def _round_trip_s(delay_s: float) -> float:
    """Of a byte over TCP and a wire of this delay."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as closing:
        wire = Wire(server.getsockname()[1], delay_s)
        closing.callback(wire.close)
        here = closing.enter_context(socket.create_connection(("127.0.0.1", wire.port)))
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = closing.enter_context(server.accept()[0])
        taken_s = []
        for _ in range(NUM_PINGS):
            begun_s = time.perf_counter()
            here.send(b".")
            there.send(there.recv(1))
            here.recv(1)
            taken_s.append(time.perf_counter() - begun_s)
        return median(taken_s)


if __name__ == "__main__":
    listen_with(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[5])
