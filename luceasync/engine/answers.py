"""The answers under way: each delta goes to its stream, each answer into its tenant's history.

Owns the streams by id and what their choices have said. Used from the event loop only; knows
neither lanes nor how many answers there may be.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from luceasync.engine.prompts import Rendered
from luceasync.engine.stream import LocalStream
from luceasync.request import Delta, Finish


@dataclass(frozen=True, slots=True)
class _Answer:
    """A stream, and what its choices have said so far, by index."""

    stream: LocalStream
    prompt: Rendered
    client: str
    said: dict[int, array[int]] = field(default_factory=dict)


class Answers:
    """All answers that have not ended."""

    def __init__(self, beside: Callable[[Callable[[], object]], object]) -> None:
        """`beside` has something done in another thread, and does not wait for it."""
        self._beside = beside
        self._answers: dict[int, _Answer] = {}
        self._ended: list[tuple[Rendered, array[int]]] = []  # prompts, and what was said to them

    def __repr__(self) -> str:
        return f"Answers({len(self._answers)} open)"

    def open(
        self,
        stream_id: int,
        prompt: Rendered,
        num_choices: int,
        cancel: Callable[[], None],
        read: Callable[[bool], None] = lambda is_behind: None,
        client: str = "",
    ) -> LocalStream:
        """The stream of a new answer to `client`; `cancel`, `read`: see LocalStream."""
        stream = LocalStream(len(prompt.ids), num_choices, cancel, read)
        self._answers[stream_id] = _Answer(stream, prompt, client)
        return stream

    def deliver(self, deltas: Iterable[tuple[int, Delta]]) -> list[tuple[str, Finish]]:
        """Hand (stream id, delta) pairs to their streams; how the choices ended that did, and
        whose they were. These are to be remembered, once the streams' readers had their turn.
        """
        ended = []
        for stream_id, delta in deltas:
            answer = self._answers[stream_id]
            answer.stream.push(delta)
            if delta.index not in answer.said:  # to be known at its end: now nobody waits for it
                self._beside(partial(answer.prompt.answer_returns, delta.token_ids))
            said = answer.said.setdefault(delta.index, array("i"))
            said.extend(delta.token_ids)
            if delta.finish is None:
                continue
            self._ended.append((answer.prompt, said))
            ended.append((answer.client, delta.finish))
            if answer.stream.num_open == 0:
                del self._answers[stream_id]
        return ended

    def remember(self) -> None:
        """Later prompts may begin with the answers that have ended: takes milliseconds where they
        are long.
        """
        ended, self._ended = self._ended, []
        for prompt, said in ended:
            if prompt.text is not None:
                prompt.tenant.history.remember(prompt.text, prompt.ids, said)


def in_other_thread(call: Callable[[], object]) -> None:
    """Have it done there, once what the event loop has to do now is done."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.run_in_executor, None, call)
