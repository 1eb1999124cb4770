"""Prompts go to a server, and what it says of them comes back: one over the network, or one in this
process that nobody else can reach.

Owns the words on the wire and how long is waited for a server that is busy. Knows no files.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
from rich.console import Console

from luceasync.config import Config, ServerConfig
from luceasync.errors import ConfigError, LuceasyncError

from .entries import Entry  # under whichever name this folder is imported

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0  # a long prompt on a CPU; nothing is sent before it is through
BUSY = (429, 503)
MOST_PAUSE_S = 30.0
POLL_S = 0.1
QUESTION = {"role": "user", "content": "Are you ready?"}
CHEAPER = "prefill_is_faster"  # the server has it, and rather computes so few tokens
SAMPLE = re.compile(r"^luceasync_prefix_cache_(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)

Verify = Literal["first", "all", "none"]


class Refused(LuceasyncError):
    """The server says no, or says nothing: its words."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer tells of its prompt's tokens; `miss_reason`: why no more were cached."""

    num_tokens: int
    num_cached: int
    miss_reason: str | None


@dataclass(frozen=True, slots=True)
class Counters:
    """What the server has counted of its prefix cache, since it started."""

    written_bytes: int = 0
    evicted_nodes: int = 0
    unwritten_nodes: int = 0

    def since(self, before: Counters) -> Counters:
        """What has been added; nodes that still have to be written are those of now."""
        return replace(
            self,
            written_bytes=self.written_bytes - before.written_bytes,
            evicted_nodes=self.evicted_nodes - before.evicted_nodes,
        )


class Door:
    """One server. `patience_s`: how long an entry waits while it is told to come again."""

    def __init__(
        self, client: httpx.AsyncClient, *, cache_salt: str | None, patience_s: float
    ) -> None:
        self._client = client
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._patience_s = patience_s

    async def keep(self, entry: Entry) -> Told:
        """Have the prompt computed and kept. Raises Refused."""
        return await self._ask({**entry.body(), "max_tokens": 0, "keep_prefix": True})

    async def follow(self, entry: Entry) -> Told:
        """Ask what a client would ask next: the prompt itself where an answer is due, else
        something of a user. Raises Refused.
        """
        if entry.is_answered:
            return await self.keep(entry)
        messages = [*entry.messages, QUESTION]
        return await self._ask({**entry.body(), "messages": messages, "max_tokens": 1})

    async def counters(self) -> Counters:
        """Raises Refused."""
        response = await self._send("GET", "/metrics")
        samples = dict(SAMPLE.findall(_checked(response).text))

        def count(name: str) -> int:
            return int(float(samples.get(name, 0)))

        return Counters(
            written_bytes=count("written_bytes_total"),
            evicted_nodes=count('evicted_nodes_total{tier="disk"}'),
            unwritten_nodes=count("unwritten_nodes"),
        )

    async def written(self, timeout_s: float) -> Counters:
        """The counters once all that is on its way to the disk is there, or after `timeout_s`.
        Raises Refused.
        """
        deadline = time.monotonic() + timeout_s
        while (counters := await self.counters()).unwritten_nodes and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return counters

    async def fault(self) -> str:
        """What keeps prefixes from being written or read; empty: nothing. Raises Refused."""
        health = _checked(await self._send("GET", "/health")).json()
        return health["detail"] if health["status"] == "degraded" else ""

    async def _ask(self, fields: dict[str, Any]) -> Told:
        body = {**fields, **self._salt}
        response = _checked(await self._send("POST", "/v1/chat/completions", body))
        try:
            answer = response.json()
            usage = answer["usage"]
            return Told(
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                answer["luceasync"].get("miss_reason"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(f"{self._client.base_url} is no luceasync server: {error!r}") from None

    async def _send(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Again and again while the server is busy. Raises Refused where it cannot be reached."""
        deadline = time.monotonic() + self._patience_s
        pause_s = 1.0
        while True:
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                where = self._client.base_url
                raise Refused(f"{where}: {error or type(error).__name__}") from error
            wait_s = _retry_after_s(response, pause_s)
            if response.status_code not in BUSY or time.monotonic() + wait_s > deadline:
                return response
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)


@asynccontextmanager
async def open_server(
    url: str, api_key: str | None, cache_salt: str | None, patience_s: float
) -> AsyncIterator[Door]:
    """The door of the server at `url`. Raises ConfigError where it lets nobody in."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from None
    async with client:
        door = Door(client, cache_salt=cache_salt, patience_s=patience_s)
        try:
            await door.counters()
        except Refused as error:
            raise ConfigError(f"--url {url}: {error}") from None
        yield door


@asynccontextmanager
async def open_directory(
    config: Config, api_key: str | None, cache_salt: str | None
) -> AsyncIterator[Door]:
    """The door of an engine in this process that writes into the configured directory, for those
    who will send this key and salt. Raises ConfigError.
    """
    from luceasync.cli.serve import loading_bar
    from luceasync.engine.start import build_engine
    from luceasync.server.app import create_app

    server = ServerConfig(api_keys=(api_key,) if api_key else ())
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with loading_bar(Console(stderr=True)) as bar:
        bar.start()
        async with build_engine(config, bar.advance) as engine:
            await engine.load()
            bar.stop()
            app = create_app(engine, server, trust_cache_salt=cache_salt is not None)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as client:
                # It has loaded, and nobody else asks: an engine that says no now has failed.
                yield Door(client, cache_salt=cache_salt, patience_s=0.0)


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is one of success. Raises Refused with the server's words."""
    if response.is_success:
        return response
    try:
        words = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = "no words of it"
    raise Refused(f"status {response.status_code}: {words}")


def _retry_after_s(response: httpx.Response, otherwise_s: float) -> float:
    """Seconds that the server asks to wait; HTTP allows a date too, which is not looked at."""
    text = response.headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"[0-9]{1,6}", text) else otherwise_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry: `num_cached` of its `num_tokens` were there before; of a request
    that goes on from it `num_found` were found (None: nobody asked). `error` is empty if all is
    well.
    """

    entry: Entry
    elapsed_s: float
    num_tokens: int = 0
    num_cached: int = 0
    num_found: int | None = None
    error: str = ""

    @property
    def was_there(self) -> bool:
        """Whether nothing had to be computed."""
        return not self.error and self.num_cached == self.num_tokens

    @property
    def num_prefilled(self) -> int:
        return self.num_tokens - self.num_cached


async def warm(
    entries: Sequence[Entry],
    door: Door,
    tell: Callable[[Outcome], None],
    *,
    parallel: int,
    verify: Verify = "first",
    min_tokens: int = 0,
) -> None:
    """Have all entries kept, `parallel` at a time; `tell` hears of each when it is done. One of
    fewer than `min_tokens` tokens is not written, which is an error.
    """
    waiting = iter(enumerate(entries))

    async def work(waiting: Iterator[tuple[int, Entry]]) -> None:
        for index, entry in waiting:
            is_verified = verify == "all" or (verify == "first" and index == 0)
            tell(await keep(entry, door, is_verified=is_verified, min_tokens=min_tokens))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(parallel, len(entries))):
            tasks.create_task(work(waiting))


async def keep(entry: Entry, door: Door, *, is_verified: bool, min_tokens: int = 0) -> Outcome:
    """Have one entry kept, and see whether the next request finds it."""
    started_s = time.perf_counter()
    try:
        told = await door.keep(entry)
        elapsed_s = time.perf_counter() - started_s
        next_told = await door.follow(entry) if is_verified else None
    except Refused as error:
        return Outcome(entry, time.perf_counter() - started_s, error=str(error))
    # It may find more: an earlier run has asked the same.
    num_found = None if next_told is None else min(next_told.num_cached, told.num_tokens)
    error = _fault(told, next_told, min_tokens)
    return Outcome(entry, elapsed_s, told.num_tokens, told.num_cached, num_found, error)


def _fault(told: Told, next_told: Told | None, min_tokens: int) -> str:
    if told.num_tokens < min_tokens:
        return (
            f"{told.num_tokens} tokens are not written: --kv-cache-min-tokens is {min_tokens}; "
            "a shorter prompt needs a lower one"
        )
    if next_told is None or next_told.num_cached >= told.num_tokens:
        return ""
    if next_told.miss_reason == CHEAPER:
        return ""
    return (
        f"the next request found {next_told.num_cached} of {told.num_tokens} tokens "
        f"({next_told.miss_reason or 'no reason told'})"
    )
