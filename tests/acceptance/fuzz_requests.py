"""Requests with two fields at their extremes: no 5xx, and the next answer is the usual one.

    python -m tests.acceptance.fuzz_requests [--server | --routes] [--requests 20000] [--seed 0]

Asks an engine in this process, or with `--server` a server; `--routes` asks all other routes.
`--kvflash 448` and `--model FILE.gguf` set lanes and weights of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from luceasync.config import (
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
)
from luceasync.engine.start import build_engine
from luceasync.request import ANY_NAME
from luceasync.server.app import create_app
from tests.acceptance.hostile.extremes import asked_plainly, pairs, text_of, wrong_in
from tests.acceptance.hostile.routes import ROUTES
from tests.acceptance.hostile.routes import pairs as route_pairs
from tests.acceptance.hostile.routes import wrong_in as wrong_in_any
from tests.acceptance.hostile.server import CHAT, Server

MAX_CTX_TOKENS = 256
PLAIN_EVERY = 10  # refusals; after every other answer the plain request is asked at once
NUM_TOLD = 20
TOLD_EVERY = 500
TOLD_CHARS = 300

Ask = Callable[[bytes], Awaitable[tuple[int, bytes]]]


async def fuzz(ask: Ask, bodies: Iterable[bytes]) -> tuple[Counter[int], list[str]]:
    """Statuses, and errors with the request before each."""
    usual = text_of((await ask(asked_plainly()))[1])
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    for number, body in enumerate(bodies):
        status, answer = await ask(body)
        statuses[status] += 1
        found = wrong_in(status, answer)
        if status == 200 or number % PLAIN_EVERY == 0:
            after, said = await ask(asked_plainly())
            if after != 200 or text_of(said) != usual:
                found = f"{found or ''} the next request got {after} {said[:100]!r}"
        if found:
            wrong.append(f"{found}: {body[:TOLD_CHARS].decode()}")
            print(wrong[-1], flush=True)
        if (number + 1) % TOLD_EVERY == 0:
            print(f"{number + 1} requests: {len(wrong)} wrong", file=sys.stderr, flush=True)
    return statuses, wrong


async def in_process(
    bodies: Iterable[bytes], model: Path = BUNDLED_MODEL_DIR, pool_tokens: int | None = None
) -> tuple[Counter[int], list[str]]:
    """The whole app and a real engine, without sockets. A lane's context is twice its pool."""
    config = Config(
        model=ModelConfig(model_dir=model),
        engine=EngineConfig(max_ctx_tokens=2 * pool_tokens if pool_tokens else MAX_CTX_TOKENS),
        cache=CacheConfig(memory_bytes=1 << 26),
        kvflash=KvFlashConfig(pool_tokens=pool_tokens),
    )
    async with build_engine(config) as engine:
        await engine.load()
        app = create_app(engine, config.server)
        return await fuzz(lambda body: post(app, body), bodies)


async def of_all_routes(num: int, seed: int) -> tuple[Counter[int], list[str]]:
    """As many requests of each route; after every answer the plain chat request is asked."""
    config = Config(
        model=ModelConfig(names=("any", ANY_NAME)),
        engine=EngineConfig(max_ctx_tokens=MAX_CTX_TOKENS),
        cache=CacheConfig(memory_bytes=0),
    )
    statuses, wrong = Counter[int](), list[str]()
    async with build_engine(config) as engine:
        await engine.load()
        app = create_app(engine, config.server)
        usual = text_of((await post(app, asked_plainly()))[1])
        for path, asked in ROUTES.items():
            of_route = Counter[int]()
            for body in route_pairs(asked, num // len(ROUTES), seed):
                status, answer = await post(app, body, path)
                of_route[status] += 1
                found = wrong_in_any(status, answer)
                if status == 200 and text_of((await post(app, asked_plainly()))[1]) != usual:
                    found = "the next request is answered otherwise"
                if found:
                    told = body[:TOLD_CHARS].decode()
                    wrong.append(f"{path}: {found}: {told}")
                    print(wrong[-1], answer[:TOLD_CHARS], flush=True)
            print(f"{path}: {dict(sorted(of_route.items()))}", flush=True)
            statuses += of_route
    return statuses, wrong


async def post(app: ASGIApp, body: bytes, path: str = CHAT) -> tuple[int, bytes]:
    """Status and body of the app's answer to a POST, to the chat route by default."""
    said: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    got: list[Message] = []

    async def receive() -> Message:
        if said:
            return said.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        got.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": headers, "root_path": "", "scheme": "http",
        "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception as error:  # Starlette raises again what it has answered with 500
        print(f"raised: {error!r}", file=sys.stderr)
    return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


async def through_a_server(bodies: Iterable[bytes]) -> tuple[Counter[int], list[str]]:
    server = Server(flags=("--max-ctx", str(MAX_CTX_TOKENS), "--log-level", "warning"))
    try:
        return await fuzz(lambda body: asyncio.to_thread(server.post, body), bodies)
    finally:
        server.process.kill()
        server.process.wait()
        for line in server.told[:NUM_TOLD]:
            print(f"told: {line.decode(errors='replace').rstrip()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--routes", action="store_true")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--kvflash", type=int, metavar="TOKENS", help="of a lane on the device")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.routes:
        driven = of_all_routes(arguments.requests or 3000, arguments.seed)
    else:
        num = arguments.requests or (2000 if arguments.server else 20_000)
        bodies = pairs(num, arguments.seed)
        if arguments.server:
            driven = through_a_server(bodies)
        else:
            driven = in_process(bodies, arguments.model, arguments.kvflash)
    statuses, wrong = asyncio.run(driven)
    seconds = time.perf_counter() - begin
    print(f"{statuses.total()} requests in {seconds:.0f} s: {dict(sorted(statuses.items()))}")
    print(f"{len(wrong)} were answered wrongly")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
