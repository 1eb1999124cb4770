"""The servers that a conversation meets, one after the other: when they end, and how.

A kill sets the directory aside as it is at that moment, by hard links, and continues with the copy:
the next server sees nothing of what the old one does afterwards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx

from luceasync.cli.warm.client import WarmClient, open_directory
from luceasync.config import Config
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig

End = Literal["settled", "at once", "in order"]


class Servers:
    """Servers over one directory, if any. `ends_before(i)`: whether the one before the i-th request
    is killed first, once all is written.
    """

    def __init__(self, config: Config, ends_before: Callable[[int], bool]) -> None:
        self._config = config
        self._ends_before = ends_before
        self._engine: LocalEngine | None = None
        self._num_requests = 0
        self._num_dirs = 0
        self._end: End | None = None  # None: as `ends_before` says
        self.num_written_bytes = 0

    @property
    def model_dir(self) -> Path:
        """The model of all of them."""
        return self._config.model.model_dir

    @property
    def keeps(self) -> bool:
        """Whether they keep anything at all."""
        return self._config.cache.cache_dir is not None or self._config.cache.memory_bytes != 0

    @property
    def has_directory(self) -> bool:
        """Whether anything outlives one of them."""
        return self._config.cache.cache_dir is not None

    async def next(self) -> LocalEngine:
        """The server for the next request."""
        if self._end is not None or self._ends_before(self._num_requests):
            await self._stop()
        self._num_requests += 1
        if self._engine is None:
            self._engine = build_engine(self._config)
            await self._engine.__aenter__()
            await self._engine.load()
        return self._engine

    def ends(self, how: End) -> None:
        """End this one before the next request: `settled` is killed when all is written, `at once`
        is killed as it is, `in order` is told to end.

        A server that keeps nothing does not end: its ids of what was generated are the reference,
        and no directory would have them.
        """
        if self.keeps:
            self._end = how

    def kill(self) -> None:
        """Continue without anything that the server does from now on."""
        if self.has_directory:
            self._set_aside()
            self._end = "in order"

    async def warm(
        self, through: Callable[[WarmClient], Awaitable[None]], *, through_server: bool
    ) -> bool:
        """Have something kept by a server over HTTP, or into its directory while none runs; returns
        whether there is where to keep it.
        """
        if not through_server:
            if not self.has_directory:
                return False
            await self._stop()
            async with open_directory(self._config, None, None) as server:
                await through(server)
                self.num_written_bytes += (await server.written(60.0)).written_bytes
            return True
        if not self.keeps:
            return False
        app = create_app(await self.next(), ServerConfig())
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await through(WarmClient(client, cache_salt=None, patience_s=0.0))
        return True

    async def close(self) -> None:
        """End the last one."""
        await self._stop()

    async def _stop(self) -> None:
        engine, self._engine = self._engine, None
        how, self._end = self._end or "settled", None
        if engine is None:
            return
        if how == "settled":
            await engine.flush()
        if how != "in order" and self.has_directory:
            self._count(engine)
            self._set_aside()
            await engine.__aexit__(None, None, None)
        else:
            await engine.__aexit__(None, None, None)
            self._count(engine)
        await asyncio.sleep(0)

    def _count(self, engine: LocalEngine) -> None:
        cache = engine.status().cache
        assert cache is not None
        self.num_written_bytes += cache.written_bytes_total

    def _set_aside(self) -> None:
        """Give the next server a directory with what is there now."""
        old = self._config.cache.cache_dir
        assert old is not None
        self._num_dirs += 1
        new = old.parent / f"cache-{self._num_dirs}"
        for folder, _, names in os.walk(old):
            (new / Path(folder).relative_to(old)).mkdir(parents=True, mode=0o700)
            for name in names:
                _link(Path(folder) / name, new / Path(folder).relative_to(old) / name)
        self._config = replace(self._config, cache=replace(self._config.cache, cache_dir=new))


def _link(file: Path, link: Path) -> None:
    try:
        os.link(file, link)
    except FileNotFoundError:  # it was renamed meanwhile, or is gone: so it would be after a kill
        return
