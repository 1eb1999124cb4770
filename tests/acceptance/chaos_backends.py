"""Backends of a real server die, hang and lie at every moment; every client gets a right answer.

    python -m tests.acceptance.chaos_backends [--rounds 200] [--only kill:decode,...] [--forks]

Each round does one misdeed at one moment to one of three backends while three clients wait. Each
must get the right text, its beginning and an error, or a refusal; later answers must be right. In
the end no process, descriptor, thread or mapping may be left.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from luceasync.bench.report import Report, figure, percentile
from tests.acceptance import command
from tests.acceptance.chaos.backend import Wish
from tests.acceptance.chaos.clients import CLOSED, WHOLE, Client, ask_all
from tests.acceptance.chaos.house import House, until

QUESTIONS = (
    "What does os.getcwd do?",
    "How do I read a file line by line?",
    "What is a dictionary?",
)
MAX_TOKENS = 16
TRANSPORTS = ("shared", "stream")
DEEDS = {
    "kill": ("load", "prefill", "decode", "save", "adopt"),
    "stop": ("load", "prefill", "decode", "save", "adopt"),
    "half": ("prefill", "decode", "save", "adopt"),
    "oversize": ("prefill", "decode", "save", "adopt"),
    "slow": ("prefill", "decode", "adopt"),
    "version": ("greeting",),
    "parent": ("import", "load", "prefill", "decode", "save", "adopt"),
}
AT_A_START = ("greeting", "import", "load")
NUMBERS = {"decode": 7}  # in the middle of an answer
NUM_ENDS = 2  # of a turn's rounds that end the server: the next one takes long to start


@dataclass
class Seen:
    """Rounds of one misdeed at one moment: how answers ended, and how long clients waited."""

    ends: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    waited_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


class Rounds:
    """All rounds, on one server after the other. `is_forking`: backends are forks."""

    def __init__(self, *, is_forking: bool = False) -> None:
        self._is_forking = is_forking
        self.seen: defaultdict[tuple[str, str, str], Seen] = defaultdict(Seen)
        self.ended_s: list[float] = []
        self._house: House | None = None
        self._texts: dict[str, str] = {}
        self._transport = ""
        self._number = 0

    def one(self, deed: str, moment: str, transport: str) -> None:
        """Run a round."""
        if transport != self._transport:
            self.close()
        self._transport = transport
        house = self._open_house()
        self._number += 1
        salt = f"salt {self._number}"
        layers = house.layers[self._number % len(house.layers)]
        seen = self.seen[deed, moment, self._transport]
        if deed == "parent":
            self._check_kept(house)
        if moment == "adopt":
            self._check(ask_all(house.port, QUESTIONS, salt, MAX_TOKENS), deed, is_calm=True)
        wish = Wish(deed, moment, NUMBERS.get(moment, 1))
        wish.write(house.wish_path(layers))
        if moment in AT_A_START:
            os.kill(house.pid_of(layers), signal.SIGKILL)
        begun = time.perf_counter()
        clients = ask_all(house.port, QUESTIONS, salt, MAX_TOKENS)
        told = [client.told for client in clients if client.told is not None]
        seen.ends.update(each.end for each in told)
        seen.waited_s += [each.ended_s - begun for each in told]
        seen.num_rounds += 1
        if deed == "parent":
            until(lambda: not house.is_alive, f"{deed} at {moment}: the server lives")
            self._check(clients, deed, is_calm=False)
            self.ended_s.append(house.end())
            self._house = None
            return
        self._check(clients, deed, is_calm=False)
        until(lambda: not house.wish_path(layers).exists(), f"{deed} at {moment} was never done")
        seen.back_s.append(house.wait_until_ready())
        self._check(ask_all(house.port, QUESTIONS, salt, MAX_TOKENS), deed, is_calm=True)

    def abandon(self) -> None:
        """End the last server without checks."""
        if self._house is not None:
            self._house.server.process.kill()

    def close(self) -> None:
        """End the last server."""
        if self._house is not None:
            self._check_kept(self._house)
            self.ended_s.append(self._house.end())
            self._house = None

    def _open_house(self) -> House:
        """The current server, or a new one on which nothing was done yet."""
        if self._house is None:
            self._house = House(self._transport, is_forking=self._is_forking)
            clients = ask_all(self._house.port, QUESTIONS, "calm", MAX_TOKENS)
            texts = {client.question: _whole(client) for client in clients}
            if self._texts and texts != self._texts:
                raise SystemExit(f"another server says {texts}, not {self._texts}")
            self._texts = texts
            self._kept = self._house.calm()
        return self._house

    def _check(self, clients: Sequence[Client], deed: str, *, is_calm: bool) -> None:
        """Check every answer. `is_calm`: nothing was done to a backend."""
        for client in clients:
            told, right = client.told, self._texts[client.question]
            assert told is not None
            is_right = told.text == right if told.end == WHOLE else right.startswith(told.text)
            may_be = {WHOLE} if is_calm else {WHOLE, "503", "error event"}
            if deed == "parent" and not is_calm:
                may_be = {WHOLE, CLOSED, "503", "error event"}
            if not is_right or told.end not in may_be:
                raise SystemExit(f"after {deed} {client.question!r} was told {told}, not {right!r}")

    def _check_kept(self, house: House) -> None:
        """Whether the server leaked nothing."""
        until(
            lambda: house.kept().is_no_more_than(self._kept),
            f"a server began with {self._kept} and has",
            house.kept,
        )


def _whole(client: Client) -> str:
    told = client.told
    if told is None or told.end != WHOLE:
        raise SystemExit(f"undisturbed, {client.question!r} was told {told}")
    return told.text


def schedule(only: Sequence[str], num_rounds: int) -> list[tuple[str, str, str]]:
    """All misdeeds at all their moments over one transport, then over the other. Of those that end
    the server, each cycle has the next NUM_ENDS, last, since they need a new server.
    """
    pairs = [(deed, moment) for deed, moments in DEEDS.items() for moment in moments]
    chosen = [pair for pair in pairs if not only or ":".join(pair) in only]
    ends = itertools.cycle([pair for pair in chosen if pair[0] == "parent"])
    others = [pair for pair in chosen if pair[0] != "parent"]
    num_ends = min(NUM_ENDS, len(chosen) - len(others))
    found: list[tuple[str, str, str]] = []
    for transport in itertools.cycle(TRANSPORTS):
        if len(found) >= num_rounds:
            return found[:num_rounds]
        turn = [*others, *itertools.islice(ends, num_ends)]
        found += [(*pair, transport) for pair in turn]
    raise AssertionError("a cycle has no end")


def run(
    report: Report, only: Sequence[str], num_rounds: int, limit_s: float, *, is_forking: bool
) -> None:
    """Run the rounds that begin in time, and print what was seen."""
    rounds = Rounds(is_forking=is_forking)
    begun = time.perf_counter()
    num_done = 0
    try:
        for deed, moment, transport in schedule(only, num_rounds):
            passed_s = time.perf_counter() - begun
            if passed_s > limit_s:
                break
            rounds.one(deed, moment, transport)
            num_done += 1
            print(f"{num_done}: {deed} at {moment}, from {passed_s:.0f} s on", flush=True)
        rounds.close()
    finally:
        rounds.abandon()
    columns = ("what", "when", "payloads", "rounds", "answers", "slowest answer", "back, slowest")
    table = report.table(columns)
    for (deed, moment, transport), seen in sorted(rounds.seen.items()):
        answers = ", ".join(f"{count} {end}" for end, count in sorted(seen.ends.items()))
        slowest, back = max(seen.waited_s), max(seen.back_s, default=0.0)
        table.add(
            deed, moment, transport, seen.num_rounds, answers,
            figure(slowest, "s", 1), figure(back, "s", 1),
        )  # fmt: skip
    ended = figure(percentile(rounds.ended_s, 100), "s", 1)
    report.say(
        f"\n{num_done} rounds: every client was answered, later answers were right, and nothing "
        f"was left of {len(rounds.ended_s)} servers {ended.text} after their end."
    )


def main() -> None:
    """Run the rounds and print."""
    parser = command.parser(__doc__, rounds=200)
    parser.add_argument("--only", type=command.names, default=[], metavar="DEED:MOMENT,...")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no round begins later")
    parser.add_argument("--forks", action="store_true", help="backends import torch once for all")
    options = parser.parse_args()
    report = Report({"cores": os.cpu_count()}, options.json)
    run(report, options.only, options.rounds, options.limit_s, is_forking=options.forks)


if __name__ == "__main__":
    main()
