"""A client that has prompts computed and kept: by a server over the network, or by an engine in
this process.

Owns the requests and the waits for a busy server. Independent of files.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console

from luceasync.cli.output import loading_bar
from luceasync.cli.warm.entries import Verify, WarmEntry
from luceasync.config import Config
from luceasync.errors import ConfigError, LuceasyncError
from luceasync.server_config import ServerConfig

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3600.0  # a long prompt on a CPU sends nothing before it is done
BUSY = (429, 503)
MOST_PAUSE_S = 30.0
POLL_S = 0.1
QUESTION = {"role": "user", "content": "Are you ready?"}
CHEAPER = "prefill_is_faster"  # cached, but computing so few tokens is faster
SAMPLE = re.compile(r"^luceasync_prefix_cache_(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


class WarmRefused(LuceasyncError):
    """The server refused a request or could not be reached."""


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Token counts of an answered prompt. `miss_reason` states why no more were cached."""

    num_tokens: int
    num_cached: int
    miss_reason: str | None


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's counters of its prefix cache since it started."""

    written_bytes: int = 0
    evicted_nodes: int = 0
    unwritten_nodes: int = 0

    def since(self, before: Counters) -> Counters:
        """The difference from `before`; `unwritten_nodes` is the current number."""
        return replace(
            self,
            written_bytes=self.written_bytes - before.written_bytes,
            evicted_nodes=self.evicted_nodes - before.evicted_nodes,
        )


class WarmClient:
    """Requests to one server. `patience_s` is how long to retry while the server is busy."""

    def __init__(
        self, client: httpx.AsyncClient, *, cache_salt: str | None, patience_s: float
    ) -> None:
        self._client = client
        self._salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        self._patience_s = patience_s

    async def keep(self, entry: WarmEntry) -> PromptUsage:
        """Have the prompt computed and kept. Raises WarmRefused."""
        return await self._ask({**entry.body(), "max_tokens": 0, "keep_prefix": True})

    async def follow(self, entry: WarmEntry) -> PromptUsage:
        """Send what a client would send next: the prompt itself if an answer is due, otherwise the
        prompt with another user message. Raises WarmRefused.
        """
        if entry.is_answered:
            return await self.keep(entry)
        messages = [*entry.messages, QUESTION]
        return await self._ask({**entry.body(), "messages": messages, "max_tokens": 1})

    async def counters(self) -> Counters:
        """Read the server's metrics. Raises WarmRefused."""
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
        """Wait until all nodes are written, at most `timeout_s`, and return the counters. Raises
        WarmRefused.
        """
        deadline = time.monotonic() + timeout_s
        while (counters := await self.counters()).unwritten_nodes and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return counters

    async def fault(self) -> str:
        """The fault that keeps prefixes from being written or read; empty if there is none. Raises
        WarmRefused.
        """
        health = _checked(await self._send("GET", "/health")).json()
        return health["detail"] if health["status"] == "degraded" else ""

    async def _ask(self, fields: dict[str, Any]) -> PromptUsage:
        body = {**fields, **self._salt}
        response = _checked(await self._send("POST", "/v1/chat/completions", body))
        try:
            answer = response.json()
            usage = answer["usage"]
            return PromptUsage(
                usage["prompt_tokens"],
                usage["prompt_tokens_details"]["cached_tokens"],
                answer["luceasync"].get("miss_reason"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WarmRefused(
                f"{self._client.base_url} is no luceasync server: {error!r}"
            ) from None

    async def _send(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Send, and retry while the server is busy. Raises WarmRefused if it cannot be reached."""
        deadline = time.monotonic() + self._patience_s
        pause_s = 1.0
        while True:
            try:
                response = await self._client.request(method, path, json=body)
            except httpx.HTTPError as error:
                where = self._client.base_url
                raise WarmRefused(f"{where}: {error or type(error).__name__}") from error
            wait_s = _retry_after_s(response, pause_s)
            if response.status_code not in BUSY or time.monotonic() + wait_s > deadline:
                return response
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)


@asynccontextmanager
async def open_server(
    url: str, api_key: str | None, cache_salt: str | None, patience_s: float
) -> AsyncIterator[WarmClient]:
    """A client of the server at `url`. Raises ConfigError if the server does not answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from None
    async with client:
        server = WarmClient(client, cache_salt=cache_salt, patience_s=patience_s)
        try:
            await server.counters()
        except WarmRefused as error:
            raise ConfigError(f"--url {url}: {error}") from None
        yield server


@asynccontextmanager
async def open_directory(
    config: Config, api_key: str | None, cache_salt: str | None
) -> AsyncIterator[WarmClient]:
    """A client of an engine in this process that writes into the configured directory, for clients
    that will send this key and salt. Raises ConfigError.
    """
    from luceasync.engine.start import build_engine
    from luceasync.server.app import create_app

    server_config = ServerConfig(api_keys=(api_key,) if api_key else ())
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with loading_bar(Console(stderr=True)) as bar:
        bar.start()
        async with build_engine(config, bar.advance) as engine:
            await engine.load()
            bar.stop()
            app = create_app(engine, server_config, trust_cache_salt=cache_salt is not None)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as client:
                # It has loaded and has no other clients: an engine that refuses now has failed.
                yield WarmClient(client, cache_salt=cache_salt, patience_s=0.0)


def _checked(response: httpx.Response) -> httpx.Response:
    """The response if it is a success. Raises WarmRefused with the server's message."""
    if response.is_success:
        return response
    try:
        words = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = "no words of it"
    raise WarmRefused(f"status {response.status_code}: {words}")


def _retry_after_s(response: httpx.Response, otherwise_s: float) -> float:
    """The Retry-After header in seconds, otherwise `otherwise_s`. A date, which HTTP also allows,
    is ignored.
    """
    text = response.headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"[0-9]{1,6}", text) else otherwise_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one entry.

    `num_cached` of its `num_tokens` tokens were cached before; a request that continues it found
    `num_found` (None: not verified). `error` is empty on success.
    """

    entry: WarmEntry
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
    entries: Sequence[WarmEntry],
    server: WarmClient,
    tell: Callable[[Outcome], None],
    *,
    parallel: int,
    verify: Verify = "first",
    min_tokens: int = 0,
) -> None:
    """Have all entries kept, `parallel` at a time, and pass each outcome to `tell`.

    A prompt shorter than `min_tokens` is not written, which counts as an error.
    """
    waiting = iter(enumerate(entries))

    async def work(waiting: Iterator[tuple[int, WarmEntry]]) -> None:
        for index, entry in waiting:
            is_verified = verify == "all" or (verify == "first" and index == 0)
            tell(await keep(entry, server, is_verified=is_verified, min_tokens=min_tokens))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(parallel, len(entries))):
            tasks.create_task(work(waiting))


async def keep(
    entry: WarmEntry, server: WarmClient, *, is_verified: bool, min_tokens: int = 0
) -> Outcome:
    """Have one entry kept and, if `is_verified`, check that the next request finds it."""
    started_s = time.perf_counter()
    try:
        usage = await server.keep(entry)
        elapsed_s = time.perf_counter() - started_s
        next_usage = await server.follow(entry) if is_verified else None
    except WarmRefused as error:
        return Outcome(entry, time.perf_counter() - started_s, error=str(error))
    # It may find more if an earlier run sent the same request.
    num_found = None if next_usage is None else min(next_usage.num_cached, usage.num_tokens)
    fault = _fault(usage, next_usage, min_tokens)
    return Outcome(entry, elapsed_s, usage.num_tokens, usage.num_cached, num_found, fault)


def _fault(usage: PromptUsage, next_usage: PromptUsage | None, min_tokens: int) -> str:
    if usage.num_tokens < min_tokens:
        return (
            f"{usage.num_tokens} tokens are not written: --kv-cache-min-tokens is {min_tokens}; "
            "a shorter prompt needs a lower one"
        )
    if next_usage is None or next_usage.num_cached >= usage.num_tokens:
        return ""
    if next_usage.miss_reason == CHEAPER:
        return ""
    return (
        f"the next request found {next_usage.num_cached} of {usage.num_tokens} tokens "
        f"({next_usage.miss_reason or 'no reason given'})"
    )
