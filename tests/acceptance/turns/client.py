"""A client that knows how much of every prompt was seen before.

Owns the counts. Servers are a matter of `Servers`; what is said, of a flow.
"""

from __future__ import annotations

import asyncio
import string
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luceasync.cli.warm.client import WarmClient, keep
from luceasync.cli.warm.entries import WarmEntry
from luceasync.engine.engine import LocalEngine
from luceasync.prefix_tree.node import common_prefix
from luceasync.request import ChatPrompt, Delta, Finish, Request, Sampling, Stream
from luceasync.status import EngineStatus
from luceasync.text.history import History
from luceasync.text.shared_prefix import ReplayCheck
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance.turns.servers import End, Servers

Message = Mapping[str, Any]
NUM_LOGPROBS = 5
CONTINUED = ("0", "a")  # what a user may say next


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and how many tokens of an answer are wanted."""

    messages: Sequence[Message]
    num_tokens: int
    tools: Sequence[Message] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """An answered choice.

    Of `num_prompt_tokens`, `num_ideal` begin an earlier sequence; `num_new` tokens of prompt and
    answer had not been run. `logprobs`: of every token and of the likeliest others; `num_rounds`:
    of speculation. `returns`: a later prompt may begin with all of it.
    """

    answer: tuple[int, ...]
    num_rounds: int
    logprobs: tuple[float, ...]
    num_prompt_tokens: int
    num_cached: int
    num_ideal: int
    num_new: int
    returns: bool
    miss_reason: str | None

    @property
    def num_short(self) -> int:
        """Tokens that were run again."""
        return self.num_ideal - self.num_cached


@dataclass(slots=True, eq=False)
class _Opened:
    """A request under way; `num_shared` tokens of its prompt are cached already."""

    question: Question
    text: str
    ids: array[int]
    num_shared: int
    stream: Stream


class Client:
    """Asks one server after the other, as `servers` gives them."""

    def __init__(self, servers: Servers, letter_bias: float) -> None:
        self._servers = servers
        model_dir = servers.model_dir
        self._tokenizer = Tokenizer.load(model_dir)
        self._template = ChatTemplate.load(model_dir)
        self._history = History(self._tokenizer)
        self._seen: list[array[int]] = []
        letters = {self._tokenizer.encode(c)[0]: letter_bias for c in string.ascii_lowercase}
        self._sampling = Sampling(logit_bias=letters)  # whatever the model is, it says text
        self.asked: list[Asked] = []

    async def ask(
        self,
        messages: Sequence[Message],
        num_tokens: int,
        tools: Sequence[Message] | None = None,
        **variables: Any,
    ) -> str:
        """The text of an answer of this many tokens."""
        return (await self.ask_all([Question(messages, num_tokens, tools, variables)]))[0]

    async def ask_all(self, questions: Sequence[Question]) -> list[str]:
        """The first choice's text for each question; all are asked at once."""
        engine = await self._servers.next()
        opened: list[_Opened] = []
        for question in questions:
            request = self._request(question)
            text, ids = self._prompt(question)
            said = [*self._seen, *(o.ids for o in opened)]
            num_shared = max((common_prefix(one, ids) for one in said), default=0)
            stream = await engine.open(request)
            opened.append(_Opened(question, text, ids, num_shared, stream))
        answered = await asyncio.gather(*(_deltas_of(one.stream) for one in opened))
        return [self._count(*pair) for pair in zip(opened, answered, strict=True)]

    async def leave(self, messages: Sequence[Message], num_tokens: int) -> None:
        """Ask, and leave once the server has run this many tokens of the prompt, or all of it."""
        engine = await self._servers.next()
        question = Question(messages, 8)
        ids, before = self._prompt(question)[1], engine.status()
        stream = await self._run_until(engine, question, num_tokens)
        await stream.aclose()
        while engine.status().num_running:
            await asyncio.sleep(0.001)
        await engine.flush()  # what it has done is counted then
        self._seen.append(ids[: _num_restored(engine, before) + _num_run(engine, before)])

    async def kill(self, messages: Sequence[Message], num_tokens: int) -> None:
        """Ask, and have the server killed once it has run this many tokens of the prompt."""
        engine = await self._servers.next()
        question = Question(messages, 8)
        ids, before = self._prompt(question)[1], engine.status()
        stream = await self._run_until(engine, question, num_tokens)
        num_done = _num_restored(engine, before) + _num_run(engine, before)
        self._servers.kill()
        await stream.aclose()
        self._seen.append(ids[:num_done])

    async def warm(self, system: str, *, through_server: bool) -> None:
        """Have the beginning of chats with that system message kept, as `luceasync warm` does."""
        messages = [{"role": "system", "content": system}]
        entry = WarmEntry("a flow", messages)

        async def through(server: WarmClient) -> None:
            outcome = await keep(entry, server, is_verified=False)
            assert not outcome.error, outcome.error

        if not await self._servers.warm(through, through_server=through_server):
            return
        one, other = (
            self._prompt(Question([*messages, {"role": "user", "content": reply}], 1))[1]
            for reply in CONTINUED
        )
        self._seen.append(one[: common_prefix(one, other)])

    def end(self, how: End) -> None:
        """Have the server ended before the next question."""
        self._servers.ends(how)

    async def _run_until(self, engine: LocalEngine, question: Question, num_tokens: int) -> Stream:
        before = engine.status()
        stream = await engine.open(self._request(question))
        while stream.num_open and _num_run(engine, before) < num_tokens:
            await asyncio.sleep(0.001)
        return stream

    def _count(self, opened: _Opened, choices: Mapping[int, Sequence[Delta]]) -> str:
        """Count what the choices report of the cache, and remember them; returns the first text."""
        for index in sorted(choices):
            finish = choices[index][-1].finish
            assert finish is not None and finish.reason == "length", finish
            self._count_choice(opened, choices[index], finish, is_first=index == 0)
        return "".join(delta.words for delta in choices[0])

    def _count_choice(
        self, opened: _Opened, deltas: Sequence[Delta], finish: Finish, *, is_first: bool
    ) -> None:
        """Count one choice; of later ones the prompt is cached already."""
        question, ids = opened.question, opened.ids
        answer = tuple(token for delta in deltas for token in delta.token_ids)
        logprobs = [one for delta in deltas for one in delta.logprobs]
        num_ideal = opened.num_shared if is_first else len(ids)
        self.asked.append(
            Asked(
                answer,
                0 if finish.speculation is None else finish.speculation.rounds,
                tuple(v for one in logprobs for v in (one.logprob, *(t.logprob for t in one.top))),
                len(ids),
                finish.usage.cached_tokens,
                num_ideal,
                len(ids) - num_ideal + len(answer) - 1,
                self._returns(question, opened.text)(answer),
                finish.restore.miss_reason,
            )
        )
        self._history.remember(opened.text, ids, answer)
        self._seen.append(ids + array("i", answer[:-1]))

    def _returns(self, question: Question, text: str) -> ReplayCheck:
        said = question.messages, question.tools, question.variables
        return ReplayCheck.of(self._template, self._tokenizer, text, *said)

    def _request(self, question: Question) -> Request:
        tools = question.tools
        prompt = ChatPrompt(
            [dict(m) for m in question.messages],
            [dict(t) for t in tools] if tools else None,
            dict(question.variables),
        )
        return Request(
            prompt,
            self._sampling,
            max_tokens=question.num_tokens,
            ignore_eos=True,
            num_choices=question.num_choices,
            top_logprobs=NUM_LOGPROBS,
        )

    def _prompt(self, question: Question) -> tuple[str, array[int]]:
        """The text and ids that the server makes of it."""
        text = self._template.render(question.messages, question.tools, **question.variables)
        return text, array("i", self._history.recall(text))


async def _deltas_of(stream: Stream) -> dict[int, list[Delta]]:
    """All deltas, by choice."""
    deltas: dict[int, list[Delta]] = {}
    async for delta in stream:
        deltas.setdefault(delta.index, []).append(delta)
    return deltas


def _num_run(engine: LocalEngine, before: EngineStatus) -> int:
    """Prompt tokens run since then."""
    return engine.status().prefilled_tokens_total - before.prefilled_tokens_total


def _num_restored(engine: LocalEngine, before: EngineStatus) -> int:
    """Tokens restored since then."""
    after = engine.status()
    assert after.cache is not None and before.cache is not None
    new, old = after.cache.restored_tokens_total, before.cache.restored_tokens_total
    return sum(new.values()) - sum(old.values())
