"""Samples of the bundled model's whole engine: how long tokens take, and what was said."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import Any

from against.lookup import either
from against.passes import Case

NUM_ANSWER_TOKENS = 96
WORDS = "list return the string of module x and dictionary what does json dumps do".split()


class Answers:
    """Samples of the bundled model's whole engine, with and without its drafter."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._engines = {
            name: self._runner.run(self._open(order["device"], draft))
            for name, draft in (("plain", "none"), ("drafter", None))
        }
        self._number = 0
        self.cases: dict[str, Case] = {
            "engine: a plain token": lambda: self._answer("plain"),
            "engine: a token with the drafter": lambda: self._answer("drafter"),
            "engine: first token, new prompt": self._new,
            "engine: first token, kept prompt": self._kept,
        }

    async def _open(self, device: str, draft: str | None) -> Any:
        config = importlib.import_module("luceasync.config")
        asked = config.Config(
            placement=config.PlacementConfig(devices=(device,)),
            draft=config.DraftConfig(draft_dir=draft),
            engine=config.EngineConfig(parallel=4),
            cache=config.CacheConfig(memory_bytes=1 << 30),
        )
        engine = either("engine.start:build_engine")(asked)
        await engine.__aenter__()
        await engine.load()
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            self._runner.run(engine.__aexit__(None, None, None))
        self._runner.close()

    def _answer(self, name: str) -> tuple[float, object]:
        times, said = self._ask(name, "What does json.dumps do?", NUM_ANSWER_TOKENS)
        return (times[-1] - times[1]) / (NUM_ANSWER_TOKENS - 1), said

    def _new(self) -> tuple[float, object]:
        self._number += 1
        times, said = self._ask("plain", self._text(), 1)
        return times[1] - times[0], said

    def _kept(self) -> tuple[float, object]:
        self._ask("plain", self._text(), 1)
        times, said = self._ask("plain", self._text(), 1)
        return times[1] - times[0], said

    def _text(self) -> str:
        """Of about 1000 tokens; its beginning is its own."""
        return f"{self._number} " + " ".join(WORDS[(i * 7) % len(WORDS)] for i in range(600))

    def _ask(self, name: str, text: str, num_tokens: int) -> tuple[list[float], list[int]]:
        return self._runner.run(self._asked(name, text, num_tokens))

    async def _asked(self, name: str, text: str, num_tokens: int) -> tuple[list[float], list[int]]:
        """When it was asked, when each part of the answer came, and its tokens."""
        request = importlib.import_module("luceasync.request")
        prompt: Any = [{"role": "user", "content": text}]
        if hasattr(request, "ChatPrompt"):
            prompt = request.ChatPrompt(prompt)
        sampling = request.Sampling(temperature=0.0)
        times, said = [time.perf_counter()], []
        asked = request.Request(prompt, sampling=sampling, max_tokens=num_tokens, ignore_eos=True)
        async for delta in await self._engines[name].open(asked):
            times.append(time.perf_counter())
            said += delta.token_ids
        return times, said
