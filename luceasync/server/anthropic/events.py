"""The events of one answer, and the plain answer as a fold of the same events.

Owns which event says what, and when: pieces of one type make a block. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Iterator

from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    Delta,
    Finish,
    Piece,
    ReasoningPiece,
    Stream,
    TextPiece,
)
from luceasync.server.anthropic.shapes import (
    Answer,
    AnswerBlock,
    BlockDelta,
    BlockPart,
    BlockStart,
    BlockStop,
    Ending,
    Event,
    InputDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from luceasync.server.work import luceasync_of, timings_of

SIGNATURE = "luceasync"  # some clients drop reasoning that has none


class AnswerEvents:
    """Turns the deltas of one Stream into events, in the order in which they have to be sent."""

    def __init__(self, model: str, num_prompt_tokens: int) -> None:
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._id = f"msg_{random.getrandbits(96):024x}"
        self._num_blocks = 0
        self._open: AnswerBlock | None = None  # the block to which what follows may belong
        self._has_called = False

    async def events(self, stream: Stream) -> AsyncGenerator[Event, None]:
        """All of them. Raises what `stream` raises."""
        has_begun = False
        async for delta in stream:
            if not has_begun:
                has_begun = True
                yield MessageStart(Answer(self._id, self._model, [], self._usage_at_start()))
                yield Ping()
            for event in self._events_of(delta):
                yield event

    def _events_of(self, delta: Delta) -> Iterator[Event]:
        for piece in delta.pieces:
            yield from self._said(piece)
        if delta.finish is not None:
            yield from self._close()
            yield self._message_delta(delta.finish)
            yield MessageStop()

    def _said(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case TextPiece(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._begin(TextBlock(""))
                yield self._delta(TextDelta(text))
            case ReasoningPiece(text):
                if not isinstance(self._open, ThinkingBlock):
                    yield from self._begin(ThinkingBlock("", ""))
                yield self._delta(ThinkingDelta(text))
            case CallPiece(_, call_id, name):
                self._has_called = True
                yield from self._begin(ToolUseBlock(call_id, name, {}))
            case ArgumentsPiece(_, text):
                yield self._delta(InputDelta(text))

    def _begin(self, block: AnswerBlock) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self._num_blocks += 1
        yield BlockStart(self._num_blocks - 1, block)

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if isinstance(self._open, ThinkingBlock):
            yield self._delta(SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._num_blocks - 1)

    def _delta(self, part: BlockPart) -> Event:
        return BlockDelta(self._num_blocks - 1, part)

    def _message_delta(self, finish: Finish) -> MessageDelta:
        finishes = {0: finish}
        return MessageDelta(
            Ending(self._stop_reason(finish), finish.stop),
            _usage(finish),
            timings_of(finishes),
            luceasync_of(finishes),
        )

    def _stop_reason(self, finish: Finish) -> str:
        if finish.reason == "length":
            return "max_tokens"
        if finish.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._has_called else "end_turn"

    def _usage_at_start(self) -> Usage:
        """What was cached is told at the end: nobody has looked yet when the prompt is counted."""
        return Usage(self._num_prompt_tokens, 0)


class AnswerFold:
    """The plain answer that says what the events of one answer say, taken one by one."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._parts: list[str] = []

    def take(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case MessageStart(answer):
                self._answer = answer
            case BlockStart(_, block):
                self.answer.content.append(block)
                self._parts = []
            case BlockDelta(_, SignatureDelta(signature)):
                block = self.answer.content[-1]
                assert isinstance(block, ThinkingBlock), "others have no signature"
                block.signature = signature
            case BlockDelta(_, part):
                self._parts.append(_text_of(part))
            case BlockStop():
                self._close("".join(self._parts))
            case MessageDelta(ending, usage, timings, luceasync):
                self.answer.usage = usage
                self.answer.stop_reason = ending.stop_reason
                self.answer.stop_sequence = ending.stop_sequence
                self.answer.timings, self.answer.luceasync = timings, luceasync

    @property
    def answer(self) -> Answer:
        """The answer so far; whole after the last event."""
        assert self._answer is not None, "an answer begins with message_start"
        return self._answer

    def _close(self, said: str) -> None:
        match self.answer.content[-1]:
            case TextBlock() as block:
                block.text = said
            case ThinkingBlock() as block:
                block.thinking = said
            case ToolUseBlock() as block:
                block.input = _arguments(said)


def _text_of(part: BlockPart) -> str:
    match part:
        case TextDelta(text) | ThinkingDelta(text) | InputDelta(text):
            return text
        case SignatureDelta():
            return ""


def _arguments(said: str) -> object:
    """The object; an unfinished one is the text that it is, which no client takes for arguments."""
    try:
        return json.loads(said)
    except ValueError:
        return {"unfinished_arguments": said}


def _usage(finish: Finish) -> Usage:
    cached = finish.usage.cached_tokens
    num_run = finish.usage.prompt_tokens - cached
    return Usage(num_run, finish.usage.completion_tokens, cached)
