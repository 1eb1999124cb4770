"""A model whose last layers are on another machine: its numbers, its speed, and cut links.

    python -m tests.acceptance.check_cluster [--parts numbers,hops,speed,cuts] [--shape small]

The other machine is a network namespace if this process may make one, and else a wire on loopback.
`numbers`: greedy float32 answers are those of one process. `hops`: what crossing costs. `speed`:
steps and prompts beside two processes of this machine, at a round trip of `--round-trip` ms; on 8
cores or more either machine has half of them, at most 7. `cuts`: the link is cut and mended, and
processes die, under load: each client must get an answer or an error, the stage must be away within
10 s, and back within 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
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
from luceasync.ipc.certificates import make_pair, tls_context
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import LocalLauncher, LocalProcess, Program
from luceasync.ipc.tcp import Address
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.discovery import BackendProgram
from luceasync.pipeline.remote.fleet import Fleet
from tests.acceptance import command
from tests.acceptance.hostile.server import ROOT, Server
from tests.wire import Wire

HERE, THERE, PORT = "10.213.57.1", "10.213.57.2", 7000
AWAY_S, BACK_S, PATIENCE_S = 10.0, 5.0, 60.0
STARTED_S = 20.0  # back after a new process has imported what it needs
QUESTIONS = ("What does os.getcwd do?", "How do I read a file line by line?", "What is a list?")
NUM_PINGS = 300
MOST_CORES = 7  # of a machine
LISTEN = "--listen-for-check"
# Where this process finds its packages, for processes that may inherit nothing else.
PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Machine:
    """ "box2": a listener in a process of its own, and the link to it."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        delay_s: float | None = 0.0,
        made: Path | None = None,
    ) -> None:
        """`words`: the command that listens, before its address; `delay_s` None: there is no wire;
        `made`: where certificates are.
        """
        self.folder, self._words, self._delay_s = folder, list(words), delay_s
        self.box1, self.box2 = (made or folder) / "box1.pem", (made or folder) / "box2.pem"
        if made is None:
            make_pair(folder, ["box1", "box2"])
        self._log = folder / "listener.log"
        self._closing = ExitStack()
        self.namespace = self._namespace()
        self._wire: Wire | None = None
        try:
            self.listener = self.start()
        except BaseException:
            self._closing.close()
            raise

    def start(self) -> subprocess.Popen[bytes]:
        """Start the listener, and wait until it listens."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        host, port = (THERE, PORT) if self.namespace else ("127.0.0.1", _free_port())
        started = subprocess.Popen(
            [*inside, *self._words, f"{host}:{port}", "--tls", str(self.box2)],
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            stderr=self._log.open("ab"),
        )
        if not self.namespace and self._wire is None and self._delay_s is not None:
            self._wire = Wire(port, self._delay_s)
            self._closing.callback(self._wire.close)
        self.address = Address(host, port if self._wire is None else self._wire.port)
        _until(
            lambda: started.poll() is not None or _connects(Address(host, port), inside),
            "the listener does not listen",
        )
        if started.poll() is not None:
            raise SystemExit(f"the listener has ended: {self._log.read_text()}")
        self.listener = started
        return started

    @property
    def url(self) -> str:
        return f"tls://{self.address}"

    def cut(self) -> None:
        """Nothing passes, and nobody is told."""
        if self.namespace:
            self._inside("link", "set", "box2", "down")
        elif self._wire is not None:
            self._wire.is_cut = True

    def mend(self) -> None:
        if self.namespace:
            self._inside("link", "set", "box2", "up")
        elif self._wire is not None:
            self._wire.mend()

    def signal_stage(self, number: int) -> None:
        """Send a signal to the process that runs layers, not to the one that waits."""
        told = re.findall(r"layers .* process (\d+)$", self._log.read_text(), re.MULTILINE)
        os.kill(int(told[-1]), number)

    def num_processes(self) -> int:
        """Of those that run layers or wait."""
        return len(psutil.Process(self.listener.pid).children(recursive=True))

    def close(self) -> None:
        self.mend()
        self.listener.terminate()
        self.listener.wait()
        self._closing.close()

    def _namespace(self) -> str:
        """A namespace with a link to it; empty: there can be none."""
        name = f"luceasync-{os.getpid()}"
        if os.geteuid() != 0 or self._delay_s or shutil.which("ip") is None:
            return ""
        made = subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL, check=False)
        if made.returncode:
            return ""
        self._closing.callback(subprocess.run, ["ip", "netns", "del", name])
        here = f"box1-{os.getpid()}"
        _ip("link", "add", here, "type", "veth", "peer", "name", "box2", "netns", name)
        _ip("addr", "add", f"{HERE}/24", "dev", here)
        _ip("link", "set", here, "up")
        for words in (("addr", "add", f"{THERE}/24", "dev", "box2"), ("link", "set", "lo", "up")):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "box2", "up")
        return name

    def _inside(self, *words: str) -> None:
        _ip("-n", self.namespace, *words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _connects(address: Address, inside: Sequence[str]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, 1.0):
        return True
    return False


def _until(is_so: Callable[[], bool], words: str, deadline_s: float = 120.0) -> float:
    """Wait until it is so; the seconds. Exits with a message if it does not come."""
    begun_s = time.monotonic()
    while not is_so():
        if time.monotonic() - begun_s > deadline_s:
            raise SystemExit(words)
        time.sleep(0.02)
    return time.monotonic() - begun_s


@contextmanager
def _machine(
    words: Sequence[str], delay_s: float | None = 0.0, made: Path | None = None
) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        machine = Machine(Path(folder), words, delay_s, made)
        try:
            yield machine
        finally:
            machine.close()


# --- servers --------------------------------------------------------------------------------------

LISTENS = [sys.executable, "-m", "luceasync.backend", "--offer", "hip:0=cpu:0", "--listen"]
FLAGS = ["--dtype", "fp32", "--draft", "none", "--parallel", "4", "--prefix-cache-memory", "64M"]


def _flags_for(machine: Machine) -> list[str]:
    placed = ["--target-devices", "cpu:0,box2/hip:0", "--target-shard-tls", str(machine.box1)]
    return [*FLAGS, *placed, "--target-shard-ipc-bin", f"hip@box2={machine.url}"]


def _ask(server: Server, question: str) -> tuple[str, float]:
    """The text, or what came instead, and the seconds."""
    begun_s = time.monotonic()
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
    try:
        status, content = server.post(json.dumps(body).encode())
    except OSError as error:
        return f"!{type(error).__name__}", time.monotonic() - begun_s
    if status != 200:
        return f"!{status}", time.monotonic() - begun_s
    text = json.loads(content)["choices"][0]["message"]["content"]
    return text, time.monotonic() - begun_s


def check_numbers(report: Report) -> bool:
    """Whether greedy answers are those of one process."""
    one = Server(ROOT, [*FLAGS, "--target-devices", "cpu:0,cpu:1"])
    expected = [_ask(one, question)[0] for question in QUESTIONS]
    one.process.terminate()
    one.process.wait()
    with _machine(LISTENS) as machine:
        server = Server(ROOT, _flags_for(machine))
        found = [_ask(server, question)[0] for question in QUESTIONS]
        server.process.terminate()
        server.process.wait()
        table = report.table(("link", "answers", "equal"), "answers over two machines, float32")
        num_equal = sum(a == b and a[0] != "!" for a, b in zip(expected, found, strict=True))
        table.add("namespaces" if machine.namespace else "loopback", len(found), num_equal)
    return num_equal == len(QUESTIONS)


@dataclass
class Clients:
    """Three clients that ask again and again."""

    server: Server
    expected: dict[str, str]
    ends: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    is_over: bool = False

    def run(self) -> None:
        threads = [threading.Thread(target=self._ask_on, args=(q,)) for q in QUESTIONS]
        for thread in threads:
            thread.start()
        self._threads = threads

    def _ask_on(self, question: str) -> None:
        while not self.is_over:
            text, seconds = _ask(self.server, question)
            end = (
                text
                if text.startswith("!")
                else ("right", "WRONG")[text != self.expected[question]]
            )
            self.ends[end.lstrip("!")] += 1
            self.longest_s = max(self.longest_s, seconds)
            time.sleep(0.05)

    def stop(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                self.ends["WITHOUT ANSWER"] += 1


def _is_ready(server: Server) -> bool:
    answer = json.loads(server.get("/ready"))
    return answer["ready"] is True


def check_cuts(report: Report, rounds: int) -> bool:
    """Whether every cut is survived."""
    columns = ("what", "away after s", "back after s", "longest answer s", "answers", "right?")
    is_right = True
    with _machine(LISTENS) as machine:
        server = Server(ROOT, _flags_for(machine))
        where = "namespaces" if machine.namespace else "loopback"
        table = report.table(columns, f"cut links under load, {where}")
        expected = {question: _ask(server, question)[0] for question in QUESTIONS}
        for deed in _deeds(machine) * rounds:
            row = _round(deed, machine, server, expected)
            table.add(*row)
            is_right &= row[-1] == "yes"
        server.process.terminate()
        server.process.wait()
        _until(lambda: machine.num_processes() <= 1, "a process there outlives the server")
    return is_right


@dataclass(frozen=True)
class Deed:
    """What is done; `mends` after `lasts_s`. `is_noticed`: the stage must go away."""

    name: str
    do: Callable[[], object]
    mends: Callable[[], object] = lambda: None
    lasts_s: float = 0.0
    is_noticed: bool = True
    back_within_s: float = BACK_S


def _deeds(machine: Machine) -> list[Deed]:
    def kill_listener() -> None:
        machine.listener.kill()
        machine.listener.wait()

    return [
        Deed("cut for 2 s", machine.cut, machine.mend, 2.0, is_noticed=False),
        Deed("cut for 8 s", machine.cut, machine.mend, 8.0),
        Deed("cut for 30 s", machine.cut, machine.mend, 30.0),
        Deed(
            "its process is killed",
            partial(machine.signal_stage, signal.SIGKILL),
            back_within_s=STARTED_S,
        ),
        Deed(
            "its process hangs",
            partial(machine.signal_stage, signal.SIGSTOP),
            back_within_s=STARTED_S,
        ),
        *(
            [
                Deed(
                    "the listener is killed, and started again",
                    kill_listener,
                    machine.start,
                    3.0,
                    back_within_s=STARTED_S,
                )
            ]
            if machine.namespace
            else []
        ),
    ]


def _round(
    deed: Deed, machine: Machine, server: Server, expected: dict[str, str]
) -> tuple[str, object, object, object, str, str]:
    clients = Clients(server, expected)
    clients.run()
    time.sleep(1.0)
    deed.do()
    done_s = time.monotonic()
    away_s: float | None = None
    if deed.is_noticed:
        away_s = _until(lambda: not _is_ready(server), f"{deed.name}: the stage is not away", 30.0)
    time.sleep(max(0.0, done_s + deed.lasts_s - time.monotonic()))
    deed.mends()
    back_s = _until(lambda: _is_ready(server), f"{deed.name}: the stage is not back", 60.0)
    time.sleep(1.0)
    clients.stop()
    answers = ", ".join(f"{count} {end}" for end, count in sorted(clients.ends.items()))
    is_right = not {"WRONG", "WITHOUT ANSWER"} & {*clients.ends} and clients.ends["right"] > 0
    is_right &= (away_s or 0.0) <= AWAY_S and back_s <= deed.back_within_s
    away = "-" if away_s is None else figure(away_s, digits=1)
    longest = figure(clients.longest_s, digits=1)
    return deed.name, away, figure(back_s, digits=1), longest, answers, "yes" if is_right else "NO"


# --- hops -----------------------------------------------------------------------------------------


def check_hops(report: Report, options: argparse.Namespace) -> None:
    """Hops of an activation, and chunks of 20 MiB: through a socket, and over the link."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as there, ExitStack() as closing:
        program, answers = (_echo_program(Path(there), waits=waits) for waits in (True, False))
        words = [sys.executable, "-m", "tests.acceptance.check_cluster", LISTEN, str(program)]
        machine = closing.enter_context(_machine(words, None, options.machines))
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
        words = [sys.executable, "-m", "tests.acceptance.check_cluster", LISTEN, str(program)]
        delay_s = options.round_trip / 2e3
        machine = closing.enter_context(_machine(words, delay_s, options.machines))
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


def main() -> None:
    """Run the parts and print what was seen."""
    if sys.argv[1:2] == [LISTEN]:
        program, address, _, tls = sys.argv[2:6]
        listen_with(program, address, tls)
        return
    parser = command.parser(__doc__, rounds=1)
    parser.add_argument("--parts", type=command.names, default=["numbers", "cuts"])
    parser.add_argument("--shape", default="small", help="default: small")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens; default: 2048")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--machines",
        type=Path,
        metavar="DIR",
        help="with the files of `luceasync pair box1 box2`, for speed; default: made",
    )
    parser.add_argument("--round-trip", type=float, default=0.2, help="ms; default: 0.2")
    options = parser.parse_args()
    report = command.open_report(options)
    is_right = True
    if "numbers" in options.parts:
        is_right &= check_numbers(report)
    if "speed" in options.parts:
        check_speed(report, options)
    if "hops" in options.parts:
        check_hops(report, options)
    if "cuts" in options.parts:
        is_right &= check_cuts(report, options.rounds)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
