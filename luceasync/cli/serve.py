"""The serve command: engine, app and server put together, and a progress bar while loading.

Owns what a person sees of a running server. Knows nothing of HTTP routes or tensors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from luceasync.cli.log import BesideHandler
from luceasync.config import Config
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.freed_memory import keep_large_blocks_apart
from luceasync.heap import freeze_heap
from luceasync.model_card import ModelCard
from luceasync.server.app import create_app
from luceasync.server.serve import serve


def run_server(config: Config) -> None:
    """Serve until a signal. Raises ConfigError."""
    keep_large_blocks_apart()
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(level=config.server.log_level.upper(), handlers=[BesideHandler(sys.stderr)])
    logging.getLogger("luceasync.hypercorn").setLevel(logging.WARNING)  # it tells the URL again
    with loading_bar(console) as bar:
        engine = build_engine(config, bar.advance)
        uvloop.run(_run(engine, config, console, bar))


async def _run(engine: LocalEngine, config: Config, console: Console, bar: LoadingBar) -> None:
    loaded = asyncio.Event()

    async def load() -> None:
        await engine.load()
        loaded.set()
        freeze_heap()
        bar.stop()
        for line in ready_lines(engine.card, engine.status().num_lanes):
            console.print(line, markup=False, soft_wrap=True)

    def on_bound(url: str) -> None:
        console.print(f"Listening on {url} (OpenAI API: {url}/v1)")
        bar.start()

    async with engine:
        trusted = config.cache.trust_cache_salt
        app = create_app(engine, config.server, trust_cache_salt=trusted)
        clean = await serve(app, config.server, on_bound=on_bound, load=load)
        if not loaded.is_set():
            _leave(bar)  # the thread that reads weights would be waited for, and there is no state
    if not clean:
        _leave(bar)  # a client neither reads nor leaves: waiting for it would never end


def _leave(bar: LoadingBar) -> NoReturn:
    """End the process without waiting for anybody."""
    bar.stop()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def ready_lines(card: ModelCard, num_lanes: int) -> list[str]:
    """What is served, and why its context is what it is."""
    names = " or ".join(card.names)
    lanes = "1 lane" if num_lanes == 1 else f"{num_lanes} lanes"
    return [
        f"Ready: {names}, {lanes} of {card.max_ctx_tokens} tokens of context",
        *(f"- {reason}" for reason in card.reasons),
    ]


class LoadingBar:
    """A bar of bytes on a terminal, nothing elsewhere; any thread may call `advance`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("Loading", total=None)

    def start(self) -> None:
        self._progress.start()
        self._progress.console.show_cursor(True)  # a signal may end the process: it must not stay

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        self._progress.update(self._task, completed=bytes_done, total=bytes_total)

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def loading_bar(console: Console) -> Iterator[LoadingBar]:
    """A bar that is gone when the block ends, however it ends."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar = LoadingBar(progress)
    try:
        yield bar
    finally:
        bar.stop()
