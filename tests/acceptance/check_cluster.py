"""A model whose last layers are on another machine: its numbers, its speed, and cut links.

    python -m tests.acceptance.check_cluster [--parts numbers,hops,speed,prompts,losses,cuts]

Each client must get a right answer or an error while the link is cut or a process dies; the stage
must be away within 10 s, and back within 5 s. The machine is a network namespace where that can be.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from luceasync.bench.report import Cell, Report, figure
from tests.acceptance import command
from tests.acceptance.cluster.machine import Machine, machine_of, until
from tests.acceptance.cluster.packets import Weather
from tests.acceptance.cluster.speed import check_hops, check_prompts, check_speed
from tests.acceptance.hostile.server import ROOT, Server

AWAY_S, BACK_S, PATIENCE_S = 10.0, 5.0, 60.0
STARTED_S = 10.0  # back after a new listener, whose first process has to import what it needs
QUESTIONS = ("What does os.getcwd do?", "How do I read a file line by line?", "What is a list?")


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
    with machine_of(LISTENS) as machine:
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
    with machine_of(LISTENS) as machine:
        title = f"cut links under load, {'namespaces' if machine.namespace else 'loopback'}"
        return _survives(report, title, machine, _deeds(machine) * rounds)


def check_losses(report: Report, rounds: int) -> bool:
    """Whether lost and late packets are, and connections of which only one end is left."""
    with machine_of(LISTENS, is_lossy=True) as machine:
        if not machine.namespace:
            raise SystemExit("lost packets need root, and network namespaces")
        return _survives(
            report, "lost and late packets under load", machine, _losses(machine) * rounds
        )


def _survives(report: Report, title: str, machine: Machine, deeds: Sequence[Deed]) -> bool:
    columns = ("what", "away after s", "back after s", "longest answer s", "answers", "right?")
    table, is_right = report.table(columns, title), True
    server = Server(ROOT, _flags_for(machine))
    expected = {question: _ask(server, question)[0] for question in QUESTIONS}
    for deed in deeds:
        row = _round(deed, machine, server, expected)
        table.add(*row)
        is_right &= row[-1] == "yes"
    server.process.terminate()
    server.process.wait()
    until(lambda: machine.num_processes() <= 1, "a process there outlives the server")
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
        Deed("its process is killed", partial(machine.signal_stage, signal.SIGKILL)),
        Deed("its process hangs", partial(machine.signal_stage, signal.SIGSTOP)),
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


def _losses(machine: Machine) -> list[Deed]:
    """A link of 10 ms each way that loses packets; then it is clear again."""

    def become(loss: tuple[float, float], delay_s: float = 0.01) -> Callable[[], None]:
        return partial(machine.set_weather, Weather(loss, delay_s))

    def lose_power() -> None:
        """No end of any connection is told."""
        machine.cut()
        machine.kill()

    def start_again() -> None:
        machine.mend()
        machine.start()

    clear = become((0.0, 0.0), 0.0)
    return [
        Deed("10 ms late", become((0.0, 0.0)), clear, 8.0, is_noticed=False),
        Deed("2 % lost, 10 ms late", become((0.02, 0.02)), clear, 10.0, is_noticed=False),
        Deed("10 % lost, 50 ms late", become((0.1, 0.1), 0.05), clear, 15.0, is_noticed=False),
        Deed("40 % lost, 50 ms late", become((0.4, 0.4), 0.05), clear, 20.0, is_noticed=False),
        Deed("nothing comes back for 8 s", become((0.0, 1.0)), clear, 8.0),
        Deed("nothing arrives for 8 s", become((1.0, 0.0)), clear, 8.0),
        Deed("no power there for 12 s", lose_power, start_again, 12.0, back_within_s=STARTED_S),
    ]


def _round(
    deed: Deed, machine: Machine, server: Server, expected: dict[str, str]
) -> tuple[str, Cell | str, Cell, Cell, str, str]:
    clients = Clients(server, expected)
    clients.run()
    time.sleep(1.0)
    deed.do()
    done_s = time.monotonic()
    away_s: float | None = None
    if deed.is_noticed:
        away_s = until(lambda: not _is_ready(server), f"{deed.name}: the stage is not away", 30.0)
    time.sleep(max(0.0, done_s + deed.lasts_s - time.monotonic()))
    deed.mends()
    back_s = until(lambda: _is_ready(server), f"{deed.name}: the stage is not back", 60.0)
    time.sleep(1.0)
    clients.stop()
    answers = ", ".join(f"{count} {end}" for end, count in sorted(clients.ends.items()))
    is_right = not {"WRONG", "WITHOUT ANSWER"} & {*clients.ends} and clients.ends["right"] > 0
    is_right &= (away_s or 0.0) <= AWAY_S and back_s <= deed.back_within_s
    away = "-" if away_s is None else figure(away_s, digits=1)
    longest = figure(clients.longest_s, digits=1)
    return deed.name, away, figure(back_s, digits=1), longest, answers, "yes" if is_right else "NO"


def main() -> None:
    """Run the parts and print what was seen."""
    parser = command.parser(__doc__, rounds=1)
    parser.add_argument("--parts", type=command.names, default=["numbers", "cuts"])
    parser.add_argument("--shape", default="small", help="default: small")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens; default: 16384")
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
    if "prompts" in options.parts:
        is_right &= check_prompts(report, options)
    if "hops" in options.parts:
        check_hops(report, options)
    if "losses" in options.parts:
        is_right &= check_losses(report, options.rounds)
    if "cuts" in options.parts:
        is_right &= check_cuts(report, options.rounds)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
