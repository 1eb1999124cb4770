"""A live server with the bundled model: event-loop lag while it generates, and what leaving costs.

    python scripts/bench_live.py [--streams 16] [--tokens 200]

Prints the lag of the event loop while streams are served to another process, and for every stage at
which a client may leave the time from its close to the lane or the place in the queue being free.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import uvloop

from luceasync.bench import command
from luceasync.bench.figures import percentile
from luceasync.bench.report import figure, ms
from luceasync.config import Config, EngineConfig, ServerConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server.http.listener import listen, run_hypercorn, url_of
from luceasync.status import EngineStatus

LAG_INTERVAL_S = 0.002
DEADLINE_S = 60.0
CLIENT = """
import asyncio, httpx, sys
url, num_streams, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = {"messages": [{"role": "user", "content": "What does json.dumps do?"}], "stream": True,
        "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
async def one(client):
    async with client.stream("POST", url, json=body) as response:
        return len([line async for line in response.aiter_lines() if line.startswith("data: {")])
async def main():
    async with httpx.AsyncClient(timeout=600) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(num_streams))))
print(asyncio.run(main()))
"""


async def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    report = command.begin(options)
    async with live_server() as (engine, url):
        await measure_lag(url, 2, 8)  # warm up
        lags, num_events, seconds = await measure_lag(url, options.streams, options.tokens)
        leaving = [
            (stage, stream, await measure_leaving(engine, url, stage, stream=stream))
            for stage in ("queue", "prefill", "decode")
            for stream in (True, False)
        ]
    lag = report.table(("streams", "events/s", "lag p50", "lag p99", "lag max"))
    shown = [ms(percentile(lags, percent)) for percent in (50, 99, 100)]
    lag.add(options.streams, figure(num_events / seconds, digits=1), *shown)
    table = report.table(("leaves in", "stream", "place free after"))
    for stage, stream, seconds in leaving:
        table.add(stage, str(stream), ms(seconds, 0))


@asynccontextmanager
async def live_server() -> AsyncIterator[tuple[LocalEngine, str]]:
    """Engine and server in this process, on a free port."""
    engine = build_engine(Config(engine=EngineConfig(parallel=4)))
    async with engine:
        await engine.load()
        app = create_app(engine, ServerConfig())
        listener, closed = listen(ServerConfig(port=0)), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_hypercorn(app, listener, closed))
            yield engine, url_of(listener)
            closed.set()


async def measure_lag(
    url: str, num_streams: int, num_tokens: int
) -> tuple[list[float], int, float]:
    """Lags in seconds, events that the client counted, seconds that it took."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL_S)
            lags.append(time.perf_counter() - started - LAG_INTERVAL_S)

    arguments = (f"{url}/v1/chat/completions", str(num_streams), str(num_tokens))
    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await client.communicate()
    seconds = time.perf_counter() - started
    watcher.cancel()
    return lags, int(out), seconds


async def measure_leaving(engine: LocalEngine, url: str, stage: str, *, stream: bool) -> float:
    """Seconds from a client's close until nothing of its request is left."""
    if stage == "queue":
        fillers = [await send(url, "Hello", stream=True) for _ in range(4)]
        await until(engine, lambda status: status.num_running == 4)
    leaving = await send(url, "json " * (3500 if stage == "prefill" else 1), stream=stream)
    if stage == "queue":
        await until(engine, lambda status: status.num_queued == 1)
    else:
        await until(engine, lambda status: status.num_running == 1)
        decoded = engine.status().decoded_tokens_total
        if stage == "decode":
            await until(engine, lambda status: status.decoded_tokens_total > decoded + 5)
    started = time.perf_counter()
    leaving.close()
    if stage == "queue":
        await until(engine, lambda status: status.num_queued == 0)
    else:
        await until(engine, lambda status: status.num_running == 0)
    seconds = time.perf_counter() - started
    if stage == "queue":
        for filler in fillers:
            filler.close()
    await until(engine, lambda status: status.num_running == status.num_queued == 0)
    return seconds


async def send(url: str, content: str, *, stream: bool) -> asyncio.StreamWriter:
    """Send a request that would run for long; the caller closes the connection."""
    split = urlsplit(url)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": content}],
            "stream": stream,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    _, writer = await asyncio.open_connection(split.hostname, split.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {split.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def until(engine: LocalEngine, is_so: Callable[[EngineStatus], bool]) -> None:
    """Wait until the engine's status is as wanted."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so(engine.status()):
            await asyncio.sleep(0.001)


if __name__ == "__main__":
    uvloop.run(main())
