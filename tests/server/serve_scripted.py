"""Serves a scripted engine until a signal; the shutdown tests run this as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time

import uvloop

from luceasync.errors import ModelError
from luceasync.server import serve as serve_module
from luceasync.server.app import create_app
from luceasync.server.serve import serve
from luceasync.server_config import ServerConfig
from tests.deltas import text_delta
from tests.server.scripted import ScriptedEngine, answer


async def main(options: dict[str, float]) -> None:
    """`load_s` (negative: loading fails), `answer_s`: seconds; `answer_bytes`;
    `graceful_timeout_s`; `verbose`: show the log; `hang_s`: how long a thread hangs that cannot be
    ended; `end_s`: how long the server waits for it.
    """
    serve_module.EXIT_S = options.get("end_s", serve_module.EXIT_S)
    if options.get("verbose"):
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    pause = asyncio.Event()
    text = "x" * int(options.get("answer_bytes", 1))
    engine = ScriptedEngine([text_delta(0, text, (1,)), pause, *answer("late")])
    config = ServerConfig(port=0, graceful_timeout_s=options["graceful_timeout_s"])

    async def load() -> None:
        engine.loading = True
        await asyncio.sleep(abs(options.get("load_s", 0)))
        if options.get("load_s", 0) < 0:
            raise ModelError("no weights here")
        engine.loading = False

    async def finish_answers() -> None:
        await engine.opened.wait()
        await asyncio.sleep(options.get("answer_s", 3600))
        pause.set()

    threading.Thread(target=time.sleep, args=[options.get("hang_s", 0)]).start()
    finishing = asyncio.create_task(finish_answers())
    app = create_app(engine, config)
    clean = await serve(app, config, on_bound=lambda url: print(url, flush=True), load=load)
    finishing.cancel()
    print("clean" if clean else "stuck", all(s.closed.is_set() for s in engine.streams), flush=True)
    if not clean:
        os._exit(0)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
