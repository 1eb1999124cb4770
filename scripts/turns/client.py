"""A client that knows what every prompt could share with what was said before.

Owns the server under test, which it may restart before each request, and the counts. Knows no flow.
"""

from __future__ import annotations

import asyncio
import string
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.config import Config
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.prefix.node import common_prefix
from luceasync.request import ChatPrompt, EngineStatus, Request, Sampling
from luceasync.text.history import History
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: of `num_prompt_tokens`, `num_ideal` begin something that was said before."""

    answer: tuple[int, ...]
    num_prompt_tokens: int
    num_cached: int
    num_ideal: int
    miss_reason: str | None


class Client:
    """Asks one server after the other over the same directory. `restarts`: a new one for each
    request; all that is to be written is, before it ends.
    """

    def __init__(self, config: Config, *, restarts: bool) -> None:
        self._config = config
        self._restarts = restarts
        self._tokenizer = Tokenizer.load(config.model.model_dir)
        self._template = ChatTemplate.load(config.model.model_dir)
        self._history = History(self._tokenizer)
        self._seen: list[array[int]] = []
        self._engine: LocalEngine | None = None
        letters = {self._tokenizer.encode(letter)[0]: 100.0 for letter in string.ascii_lowercase}
        self._sampling = Sampling(logit_bias=letters)  # whatever the model is, it says text
        self.asked: list[Asked] = []

    async def ask(
        self,
        messages: Sequence[Message],
        num_tokens: int,
        tools: Sequence[Message] | None = None,
        **variables: Any,
    ) -> str:
        """The answer's text, of so many tokens."""
        engine = await self._server()
        request = self._request(messages, num_tokens, tools, variables)
        text, ids = self._prompt(request.prompt)
        stream = await engine.open(request)
        deltas = [delta async for delta in stream]
        finish = deltas[-1].finish
        assert finish is not None and finish.reason == "length", finish
        answer = tuple(token for delta in deltas for token in delta.token_ids)
        self.asked.append(
            Asked(
                answer,
                len(ids),
                finish.usage.cached_tokens,
                max((common_prefix(seen, ids) for seen in self._seen), default=0),
                finish.restore.miss_reason,
            )
        )
        self._history.remember(text, ids, answer)
        self._seen.append(ids + array("i", answer[:-1]))
        return "".join(delta.text for delta in deltas)

    async def leave(self, messages: Sequence[Message], num_tokens: int) -> None:
        """Ask, and go once the server has run so many tokens of the prompt."""
        engine = await self._server()
        request = self._request(messages, 8, None, {})
        _, ids = self._prompt(request.prompt)
        before = engine.status()
        stream = await engine.open(request)
        while _num_run(engine, before) < num_tokens:
            await asyncio.sleep(0.001)
            assert stream.num_open, "the prompt was through before that"
        await stream.aclose()
        while engine.status().num_running:
            await asyncio.sleep(0.001)
        await engine.flush()  # what it has done is counted then
        self._seen.append(ids[: _num_restored(engine, before) + _num_run(engine, before)])

    async def close(self) -> None:
        """End the server."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.flush()
            await engine.__aexit__(None, None, None)

    async def _server(self) -> LocalEngine:
        if self._restarts:
            await self.close()
        if self._engine is None:
            self._engine = build_engine(self._config)
            await self._engine.__aenter__()
            await self._engine.load()
        return self._engine

    def _request(
        self,
        messages: Sequence[Message],
        num_tokens: int,
        tools: Sequence[Message] | None,
        variables: dict[str, Any],
    ) -> Request:
        prompt = ChatPrompt(
            [dict(m) for m in messages], [dict(t) for t in tools] if tools else None, variables
        )
        return Request(prompt, self._sampling, max_tokens=num_tokens, ignore_eos=True)

    def _prompt(self, prompt: Any) -> tuple[str, array[int]]:
        """The text and the ids that the server makes of it."""
        text = self._template.render(prompt.messages, prompt.tools, **prompt.template_kwargs)
        return text, array("i", self._history.recall(text))


def _num_run(engine: LocalEngine, before: EngineStatus) -> int:
    """Tokens of prompts that were run since then."""
    return engine.status().prefilled_tokens_total - before.prefilled_tokens_total


def _num_restored(engine: LocalEngine, before: EngineStatus) -> int:
    """Tokens that were taken up since then."""
    after = engine.status()
    assert after.cache is not None and before.cache is not None
    new, old = after.cache.restored_tokens_total, before.cache.restored_tokens_total
    return sum(new.values()) - sum(old.values())
