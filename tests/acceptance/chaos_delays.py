"""How soon a backend's death is noticed, and its clients are told. CPU, a real server.

    python -m tests.acceptance.chaos_delays [--rounds 200] [--json PATH]

In each round a stream runs through three backends, one of which is killed in the middle of the
answer. Noticed: until /ready, polled, fails. Told: until the stream has its error event. Back:
until /ready succeeds again.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from dataclasses import dataclass

from luceasync.bench.report import Report, ms, percentile
from tests.acceptance import command
from tests.acceptance.chaos.clients import BROKEN, Client, wait_for
from tests.acceptance.chaos.house import House

QUESTION = "What does os.getcwd do?"
MAX_TOKENS = 1000
LATEST_S = 0.3  # after the first token
TRANSPORTS = ("shared", "stream")
STEADY_S = 10.0  # one that lives for so long is started again at once


@dataclass(frozen=True)
class Death:
    """Seconds after the kill."""

    noticed_s: float
    told_s: float
    back_s: float


class Watcher(threading.Thread):
    """Polls /ready over one connection until it fails."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.noticed_s = 0.0
        self._port = port

    def run(self) -> None:
        """Poll."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self.noticed_s:
            connection.request("GET", "/ready")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                self.noticed_s = time.perf_counter()
            time.sleep(0.002)
        connection.close()


def one_death(house: House, layers: str, salt: str) -> Death:
    """Kill the backend of these layers during an answer."""
    client = Client(house.port, QUESTION, salt, MAX_TOKENS, is_streamed=True, goes_on=True)
    watcher = Watcher(house.port)
    pid = house.pid_of(layers)
    client.start()
    if not client.has_begun.wait(60):
        raise SystemExit("no token has come")
    watcher.start()
    time.sleep(random.uniform(0.02, LATEST_S))
    killed_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    wait_for([client])
    watcher.join(60)
    told = client.told
    if told is None or told.end != BROKEN or "SIGKILL" not in told.words:
        raise SystemExit(f"the client was told {told}")
    house.wait_until_ready()
    back_s = time.perf_counter() - killed_s
    return Death(watcher.noticed_s - killed_s, told.ended_s - killed_s, back_s)


def run(report: Report, num_rounds: int, limit_s: float) -> None:
    """Run the rounds that begin in time, over each transport."""
    table = report.table(
        ("payloads", "kills", *(f"{what}, {p}" for what in ("noticed", "told", "back") for p in
                                ("p50", "p99")))
    )  # fmt: skip
    for transport in TRANSPORTS:
        house, deaths = House(transport), []
        begun, killed = time.monotonic(), dict.fromkeys(house.layers, 0.0)
        try:
            for number in range(num_rounds // len(TRANSPORTS)):
                if time.monotonic() - begun > limit_s / len(TRANSPORTS):
                    break
                layers = house.layers[number % len(house.layers)]
                time.sleep(max(0.0, killed[layers] + STEADY_S - time.monotonic()))
                deaths.append(one_death(house, layers, f"salt {number}"))
                killed[layers] = time.monotonic()
            house.end()
        finally:
            house.server.process.kill()
        columns = zip(*((d.noticed_s, d.told_s, d.back_s) for d in deaths), strict=True)
        figures = [ms(percentile(column, p)) for column in columns for p in (50, 99)]
        table.add(transport, len(deaths), *figures)


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=200)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no round begins later")
    options = parser.parse_args()
    run(Report({"cores": os.cpu_count()}, options.json), options.rounds, options.limit_s)


if __name__ == "__main__":
    main()
