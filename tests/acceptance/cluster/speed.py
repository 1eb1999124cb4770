"""What crossing a link costs: hops, steps and prompts. Run as a program, it listens."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from luceasync.backend.listen import BackendListener
from luceasync.bench import ipc
from luceasync.bench.echo import RING_BYTES, Done, hop_of
from luceasync.bench.model import (
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
)
from luceasync.bench.shapes import shape_of
from luceasync.ipc.certificates import tls_context
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, LocalProcess, Program
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.discovery import BackendProgram
from luceasync.pipeline.remote.fleet import Fleet
from tests.acceptance.cluster.machine import PYTHON_PATH, machine_of
from tests.wire import Wire

PATIENCE_S = 60.0
NUM_PINGS = 300
MOST_CORES = 7  # of a machine
LISTEN = "tests.acceptance.cluster.speed"


# --- hops -----------------------------------------------------------------------------------------


def check_hops(report: Report, options: argparse.Namespace) -> None:
    """Hops of an activation, and chunks of 20 MiB: through a socket, and over the link."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        program, answers = (_echo_program(Path(there), waits=waits) for waits in (True, False))
        words = [sys.executable, "-m", LISTEN, str(program)]
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


def listen_with(program: str, address: str, tls: str) -> None:
    """Listen with a backend of random weights; a process of its own."""
    if (cores := _cores(1)) is not None:
        os.sched_setaffinity(0, cores)
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


def _cores(machine: int) -> set[int] | None:
    """Half of the cores; None: there are too few to share."""
    cores = sorted(os.sched_getaffinity(0))
    half = min(len(cores) // 2, MOST_CORES)
    return None if half < 4 else {*cores[machine * half : (machine + 1) * half]}


@torch.inference_mode()
def check_speed(report: Report, options: argparse.Namespace) -> None:
    """Steps and prompts of one process, two of this machine, and two machines, in turns."""
    shape, prompt = shape_of(options.shape), options.prompt
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        folder = Path(there)
        register_random_format()
        names = ("cpu:0", "cpu:1")
        plan = plan_for(shape, names, parallel=1, max_ctx_tokens=prompt + 512, dtype="fp32")
        write_model(folder, shape, "fp32")
        program = _backend_program(folder)
        words = [sys.executable, "-m", LISTEN, str(program)]
        delay_s = options.round_trip / 2e3
        machine = closing.enter_context(machine_of(words, delay_s, options.machines))
        if (cores := _cores(0)) is not None:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        remote = _on_machine(ipc.in_two(plan))
        arguments = ("--connect", str(machine.address), "--name", "box2", "--tls")
        links = BackendProgram(program, (*arguments, str(machine.box1)), machine.address)
        variants = {
            "one process": closing.enter_context(_opened(folder, plan, {})),
            "two processes": closing.enter_context(
                _opened(folder, ipc.in_two(plan), {1: BackendProgram(program)})
            ),
            "two machines": closing.enter_context(_opened(folder, remote, {1: links})),
        }
        _measure(report, options, variants, _round_trip_s(delay_s))


def _measure(
    report: Report,
    options: argparse.Namespace,
    variants: dict[str, LayerSplitBackend],
    round_trip_s: float,
) -> None:
    columns = ("what", *variants, "two processes / two machines", "one / two machines")
    title = f"{options.shape}, float32, a round trip of {us(round_trip_s, 0).text} on the wire"
    table, begun_s = report.table(columns, title), time.perf_counter()
    for name, backend in variants.items():
        backend.prefill(0, 0, random_prompt(256), project=False)
        print(f"{name}: ready after {time.perf_counter() - begun_s:.1f} s", file=sys.stderr)
    cases: dict[str, Callable[[LayerSplitBackend], float]] = {
        "a step": partial(ipc.decode_s, 1, 256, options.steps),
        f"a prompt of {options.prompt} tokens": partial(_prompt_s, options.prompt),
    }
    for what, run in cases.items():
        found = interleave(
            {name: partial(run, backend) for name, backend in variants.items()},
            options.rounds,
            num_warmups=1,
        )
        one, two, machines = found.values()
        table.add(
            what,
            *(ms(median(each), 2) for each in found.values()),
            figure(paired_ratio(two, machines), digits=3),
            figure(paired_ratio(one, machines), digits=3),
        )


def _prompt_s(num_tokens: int, backend: LayerSplitBackend) -> float:
    prompt = random_prompt(num_tokens)
    begun_s = time.perf_counter()
    prefill(backend, 0, prompt)
    backend.synchronize()
    return time.perf_counter() - begun_s


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
    listen_with(sys.argv[1], sys.argv[2], sys.argv[4])
