"""From a request to the choices that the engine thread takes: rendered, counted, guided.

Owns who renders and who guides. It takes long with long prompts and many choices, so other threads
do it; the event loop waits for nothing.
"""

from __future__ import annotations

import asyncio

from luceasync.engine.choices import prepare
from luceasync.engine.guidance import Guidance, is_guided, unguided
from luceasync.engine.prepared import Prepared
from luceasync.engine.prompts import Language, Prompts, Rendered
from luceasync.keeping.tenants import Tenants
from luceasync.request import Request


class Preparing:
    """Of one model's requests."""

    def __init__(self, language: Language, tenants: Tenants) -> None:
        self._language = language
        self._prompts = Prompts(language, tenants)
        self._guidance = Guidance(language)

    async def rendered(self, request: Request) -> Rendered:
        """The prompt as token ids. Raises RequestError."""
        return await asyncio.to_thread(self._prompts.render, request)

    async def choices(self, request: Request, stream_id: int) -> tuple[Rendered, list[Prepared]]:
        """The prompt, and as many choices as are asked for. Raises RequestError."""
        prompt, choices = await asyncio.to_thread(self._at_once, request, stream_id)
        if choices is None:
            new_guide = await self._guidance.of(request, prompt)
            choices = await asyncio.to_thread(
                prepare, self._language, request, prompt, stream_id, new_guide
            )
        return prompt, choices

    async def close(self) -> None:
        """Wait for whoever compiles what guides."""
        await self._guidance.close()

    def _at_once(self, request: Request, stream_id: int) -> tuple[Rendered, list[Prepared] | None]:
        """All of it in one go of one thread; no choices where something has to be compiled first,
        which is waited for elsewhere.
        """
        prompt = self._prompts.render(request)
        guided = is_guided(request)
        new_guide = self._guidance.known(request, prompt) if guided else unguided
        if new_guide is None:
            return prompt, None
        return prompt, prepare(self._language, request, prompt, stream_id, new_guide)
