"""The serve command: checks before torch is imported, then engine, app and server together.

Owns the output of a running server. Independent of HTTP routes and tensors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import psutil
import uvloop
from rich.console import Console

from luceasync.cli.ahead import begun_ahead, hash_triton, without_compiler
from luceasync.cli.output import LoadingBar, count_text, loading_bar
from luceasync.config import Config
from luceasync.disk_cache.directory import make_usable
from luceasync.errors import ModelError
from luceasync.models.files import ModelFiles
from luceasync.pipeline.shard_plan import check_devices, check_weights, named_devices
from luceasync.process_memory import freeze_heap, frozen_imports, keep_large_blocks_apart
from luceasync.request import ModelCard
from luceasync.server_config import ServerConfig
from luceasync.speculation.dflash.draft_config import (
    drafts_with_mtp,
    read_draft_spec,
    refuse_without_drafter,
)
from luceasync.speculation.dflash.draft_files import DraftFiles

if TYPE_CHECKING:
    from luceasync.engine.engine import LocalEngine

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
MAX_WAITING_LINES = 10_000  # further ones are dropped
CLOSE_TIMEOUT_S = 1.0
GATHER_S = 0.02  # log lines of this time are written at once

logger = logging.getLogger(__name__)

# These checks repeat those of each part, but before torch is imported, which takes seconds.


def check_plan(config: Config, model: ModelFiles | None = None) -> ModelFiles:
    """Check model, drafter and device names; `model` is that of the config. Raises ConfigError."""
    placement = config.placement
    devices = named_devices(placement.device, placement.devices)
    if placement.layer_split is not None:
        check_weights(placement.layer_split, max(1, len(devices)))
    if config.draft.device is not None:
        check_devices([config.draft.device], "--draft-device")
    model = model or ModelFiles(config.model.model_dir)
    spec = model.spec
    if config.drafter_dir is None:
        refuse_without_drafter(config.draft, has_mtp=drafts_with_mtp(config, model))
    else:
        read_draft_spec(config.drafter_dir, spec)
    return model


def check_load(config: Config) -> ModelFiles:
    """`check_plan`, followed by checks of what only a running model needs; creates the cache
    directory. Raises ConfigError.
    """
    model = ModelFiles(config.model.model_dir)
    if model.has_weights:  # before their headers are read
        _check_weight_files(model.path, model.weights.paths)
    check_plan(config, model)
    path = config.model.model_dir / "tokenizer.json"
    if model.gguf is None and not path.exists():
        raise ModelError(f"{path} does not exist; a model directory needs its tokenizer.json.")
    _check_weight_files(model.path, model.weights.paths)
    if (drafter_dir := config.drafter_dir) is not None:
        _check_weight_files(drafter_dir, DraftFiles(drafter_dir).weight_files)
    if config.cache.cache_dir is not None:
        make_usable(config.cache.cache_dir)
    return model


def _check_weight_files(model_dir: Path, paths: Sequence[Path]) -> None:
    """Raise ModelError if weight files are missing, most often after an interrupted copy."""
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{model_dir}: {len(missing)} of {len(paths)} weight files do not exist, "
            f"the first is {missing[0]}; expected all that its index lists"
        )


def check_serve(config: Config) -> ModelFiles:
    """`check_load`, followed by checks of the certificate and that the port is free. Raises
    ConfigError.
    """
    from luceasync.server.http.listener import listen, tls_context

    tls_context(config.server)
    model = check_load(config)
    listen(config.server).close()
    return model


class BackgroundLogHandler(logging.Handler):
    """Writes log lines to `out` in a thread: a suspended terminal, or a pipe that is not read, must
    not block the event loop, which logs a line per request. Lines are gathered for GATHER_S, so
    that the thread does not take the interpreter at the end of every request. `close` waits for the
    remaining lines, but only briefly.
    """

    def __init__(self, out: TextIO, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LOG_FORMAT))
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record))
        except Exception:  # as in the standard library's handlers: no log line ends a server
            self.handleError(record)

    def close(self) -> None:
        self._is_closing.set()
        self._put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        super().close()

    def _put(self, line: str | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return

    def _write_lines(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            self._is_closing.wait(GATHER_S)
            lines += [self._lines.get() for _ in range(self._lines.qsize())]
            try:
                self._out.write("".join(f"{line}\n" for line in lines if line is not None))
                self._out.flush()
            except (OSError, ValueError):  # the reader has closed the pipe
                return


def run_server(config: Config, model: ModelFiles) -> None:
    """Serve until a signal; `model` is that of the config. Raises ConfigError."""
    with begun_ahead(config, model):
        _run_server(config, model)


def _run_server(config: Config, model: ModelFiles) -> None:
    with frozen_imports(), without_compiler():
        hash_triton(config.placement)
        from luceasync.engine.start import build_engine

    keep_large_blocks_apart()
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(
        level=config.server.log_level.upper(), handlers=[BackgroundLogHandler(sys.stderr)]
    )
    logging.getLogger("luceasync.hypercorn").setLevel(logging.WARNING)  # it repeats the URL
    logging.getLogger("numba").setLevel(logging.WARNING)  # it logs each step of its compiler
    began_s = psutil.Process().create_time()
    logger.debug("start: imports and checks in %.2f s", time.time() - began_s)
    with loading_bar(console) as bar:
        engine = build_engine(config, bar.advance, model=model)
        logger.debug("start: planned %.2f s after the process began", time.time() - began_s)
        uvloop.run(_run(engine, config, console, bar))


async def _run(engine: LocalEngine, config: Config, console: Console, bar: LoadingBar) -> None:
    from luceasync.server.app import create_app
    from luceasync.server.serve import serve

    loaded = asyncio.Event()

    async def load() -> None:
        await engine.load()
        loaded.set()
        freeze_heap()
        began_s = psutil.Process().create_time()
        logger.debug("start: ready %.2f s after the process began", time.time() - began_s)
        bar.stop()
        for line in ready_lines(engine.card, engine.status().num_lanes):
            console.print(line, markup=False, soft_wrap=True)

    def on_bound(url: str) -> None:
        console.print(f"Listening on {url} (OpenAI API: {url}/v1)")
        if is_open_to_others(config.server):
            logger.warning(
                "Everybody who can reach %s may use this server: set an API key "
                "(LUCEASYNC_API_KEY or --api-key-file)",
                url,
            )
        bar.start()

    async with engine:
        trusted = config.cache.trust_cache_salt
        app = create_app(engine, config.server, trust_cache_salt=trusted)
        clean = await serve(app, config.server, on_bound=on_bound, load=load)
        if not loaded.is_set():
            _exit_now(bar)  # the thread that reads weights has no state to save
    if not clean:
        _exit_now(bar)  # a client neither reads nor disconnects: waiting would never end


def is_open_to_others(config: ServerConfig) -> bool:
    """Whether other machines can reach the server, and no key is required."""
    from luceasync.server.http.origins import listens_on_loopback

    return not config.api_keys and not listens_on_loopback(config.host)


def _exit_now(bar: LoadingBar) -> NoReturn:
    """End the process without waiting for threads or clients."""
    bar.stop()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def ready_lines(card: ModelCard, num_lanes: int) -> list[str]:
    """What is served, and the reasons for the size of its context."""
    names = " or ".join(card.names)
    lanes = count_text(num_lanes, "lane")
    return [
        f"Ready: {names}, {lanes} of {card.max_ctx_tokens} tokens of context",
        *(f"- {reason}" for reason in card.reasons),
        *([] if card.takes_chats else ["- no chat template: /v1/completions only, no chats"]),
    ]
