"""A prompt in the model's tokens, and the tenant that sent it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from luceasync.text.answer.pieces import Before, PieceMaker, PlainText
from luceasync.text.call_memory import CallMemory
from luceasync.text.history import History
from luceasync.text.replay_check import ReplayCheck


@dataclass(frozen=True, slots=True)
class Tenant:
    """Clients that share cached prefixes, and what was said to them.

    `key`: 32 bytes, the hash key of their nodes.
    """

    key: bytes = field(repr=False)
    history: History
    calls: CallMemory = field(default_factory=CallMemory, repr=False)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt of one request as token ids.

    `text`: the rendered text, under which the answer is remembered; None if the prompt came as
    ids or is only to be cached. `boundaries`: where turns end. `answer_returns(generated_ids)`:
    whether a later prompt may begin with this one and that answer. `tools_end`: where prompts with
    the same tools and another system message diverge. `new_pieces`: makes the parser of an answer.
    `before`: what comes before the text of an answer. `marks`: number of tokens before each cache
    mark of the client.
    """

    tenant: Tenant
    text: str | None
    ids: array[int]
    boundaries: tuple[int, ...]
    answer_returns: Callable[[Sequence[int]], bool] = field(default_factory=ReplayCheck)
    tools_end: int | None = None
    new_pieces: Callable[[], PieceMaker] = PlainText
    before: Before = "nothing"
    marks: tuple[int, ...] = ()
