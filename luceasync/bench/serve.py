"""`luceasync bench serve`: the cost of the server, without a model and with the bundled one."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from luceasync.bench.report import NOTHING, Report, figure, median, ms, percentile, us
from luceasync.bench.servers import run_clients
from luceasync.config import Config, EngineConfig
from luceasync.engine.start import build_engine
from luceasync.request import Delta, Finish, ModelCard, Request, TextPiece, Timings, Usage
from luceasync.server.app import create_app
from luceasync.server.http.listener import listen, run_hypercorn, url_of
from luceasync.server_config import ServerConfig
from luceasync.status import EngineStatus

LAG_INTERVAL_S = 0.002
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


# --- the server alone -----------------------------------------------------------------------------


def bench_overhead(report: Report, *, streams: Sequence[int], tokens: int, rate: float) -> None:
    """The cost per streamed token in the server, from the engine's thread to the client's socket.

    An engine without a model generates one token per stream and step, as fast as they are sent and
    at `rate` steps per second; the clients run in another process.
    """
    columns = ("streams", "steps", "loop CPU", "wall", "latency p50", "latency p99")
    table = report.table(columns, "server overhead per streamed token")
    for num_streams in streams:
        for period_s in (0.0, 1 / rate):
            pace = f"{rate:g}/s" if period_s else "as fast as sent"
            found = uvloop.run(serve_once(num_streams, tokens, period_s))
            cells = [us(seconds, 0) for seconds in found]
            if period_s:
                cells[1] = NOTHING  # mostly waiting
            table.add(num_streams, pace, *cells)


class QueuedStream:
    """One answer: the deltas that the event loop has received but not yet sent."""

    num_prompt_tokens = 1

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._finished = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._finished:
            raise StopAsyncIteration
        delta = await self.queue.get()
        self._finished = delta.finish is not None
        return delta

    async def aclose(self) -> None:
        self._finished = True


class PacedEngine:
    """Starts when `num_streams` are open; every `period_s`, each gets a token that carries its
    time.

    With `period_s` 0, the next step follows as soon as the event loop has sent the previous one.
    """

    card = ModelCard("none", 0, 4096, 0, "none")

    def __init__(self, num_streams: int, num_tokens: int, period_s: float) -> None:
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._period_s = period_s
        self._streams: list[QueuedStream] = []
        self.loop_cpu_s = 0.0
        self.wall_s = 0.0

    def status(self) -> EngineStatus:
        return EngineStatus(True, "ready", self._num_streams, len(self._streams), 0, 0, 0, 0)

    def check_ready(self) -> None:
        """Do nothing: it is always ready."""

    async def open(self, request: Request) -> QueuedStream:
        stream = QueuedStream()
        self._streams.append(stream)
        if len(self._streams) == self._num_streams:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._produce, args=(loop,), daemon=True).start()
        return stream

    def _produce(self, loop: asyncio.AbstractEventLoop) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), self._on_loop(loop, time.thread_time)
        for step in range(self._num_tokens):
            due_s = begin_s + step * self._period_s
            time.sleep(max(0.0, due_s - time.perf_counter()))
            finish = self._finish() if step == self._num_tokens - 1 else None
            text = f"{time.perf_counter():.7f}"
            delta = Delta(0, (TextPiece(text),), (step,), finish=finish)
            loop.call_soon_threadsafe(self._deliver, delta)
            if not self._period_s:
                while any(stream.queue.qsize() for stream in self._streams):
                    time.sleep(20e-6)
        self.wall_s = time.perf_counter() - begin_s
        self.loop_cpu_s = self._on_loop(loop, time.thread_time) - begin_cpu_s

    def _deliver(self, delta: Delta) -> None:
        for stream in self._streams:
            stream.queue.put_nowait(delta)

    def _finish(self) -> Finish:
        return Finish("length", Usage(1, self._num_tokens), Timings(0, 0, 1, 1, self._num_tokens))

    @staticmethod
    def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], float]) -> float:
        async def run() -> float:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), loop).result()


async def serve_once(num_streams: int, num_tokens: int, period_s: float) -> tuple[float, ...]:
    """Serve one run. Returns seconds: loop CPU and wall time per token, latency p50 and p99."""
    engine: Any = PacedEngine(num_streams, num_tokens, period_s)  # has only what one route uses
    listener, closed = listen(ServerConfig(port=0)), asyncio.Event()
    port = listener.getsockname()[1]
    ours, theirs = multiprocessing.Pipe()
    clients = multiprocessing.get_context("spawn").Process(
        target=run_clients, args=(port, num_streams, theirs)
    )
    async with asyncio.TaskGroup() as tasks:
        app = create_app(engine, ServerConfig())
        tasks.create_task(run_hypercorn(app, listener, closed))
        clients.start()
        latencies_s = await asyncio.to_thread(ours.recv)
        closed.set()
    clients.join(10)
    num_sent = num_streams * num_tokens
    if len(latencies_s) != num_sent:
        raise SystemExit(f"{len(latencies_s)} tokens arrived, {num_sent} were made")
    seconds = (engine.loop_cpu_s / num_sent, engine.wall_s / num_sent)
    return (*seconds, median(latencies_s), percentile(latencies_s, 99))


# --- with the bundled model -----------------------------------------------------------------------


def bench_live(report: Report, *, streams: int, tokens: int) -> None:
    """Event loop lag while an engine in this process serves streams to another process."""
    lags, num_events, seconds = uvloop.run(run_live(streams, tokens))
    table = report.table(("streams", "events/s", "lag p50", "lag p99", "lag max"), "event loop")
    shown = [ms(percentile(lags, percent)) for percent in (50, 99, 100)]
    table.add(streams, figure(num_events / seconds, digits=1), *shown)


async def run_live(streams: int, tokens: int) -> tuple[list[float], int, float]:
    """Start a server, warm it up, and measure it."""
    async with live_server() as url:
        await measure_lag(url, 2, 8)
        return await measure_lag(url, streams, tokens)


@asynccontextmanager
async def live_server() -> AsyncIterator[str]:
    """URL of a server of the bundled model in this process."""
    engine = build_engine(Config(engine=EngineConfig(parallel=4)))
    async with engine:
        await engine.load()
        app = create_app(engine, ServerConfig())
        listener, closed = listen(ServerConfig(port=0)), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_hypercorn(app, listener, closed))
            yield url_of(listener)
            closed.set()


async def measure_lag(
    url: str, num_streams: int, num_tokens: int
) -> tuple[list[float], int, float]:
    """Lags in seconds, the number of events that the client received, and the seconds
    that it took.
    """
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
