"""What goes in comes out once, in order, whatever cannot be made out."""

from __future__ import annotations

import pytest

from luceasync.engine.streams import Outbox
from luceasync.request import Delta, Finish, Speculation, Timings, Usage


class Talker:
    """A generation, as far as it is told of."""

    def __init__(self, stream_id: int, *texts: str | None) -> None:
        self.prepared = self
        self.stream_id = stream_id
        self.texts = list(texts)

    @property
    def has_ended(self) -> bool:
        return self.texts == ["end"]

    def shown(self, speculation: Speculation | None = None, residence=None) -> Delta | None:
        text = self.texts.pop(0)
        if text == "unreadable":
            self.texts.insert(0, text)
            raise ZeroDivisionError("no text")
        finish = Finish("stop", Usage(1, 1), Timings(0, 0, 0, 1, 0), speculation=speculation)
        return None if text is None else Delta(0, (text,), finish=finish if text == "end" else None)


def said(emitted) -> list[tuple]:
    return [(stream_id, *delta.pieces) for stream_id, delta in emitted]


def test_text_is_made_out_when_it_is_taken():
    outbox, talker = Outbox(), Talker(1, "a")
    outbox.advanced(talker)
    assert outbox
    assert talker.texts == ["a"]
    assert said(outbox.take()) == [(1, "a")]
    assert not outbox
    assert outbox.take() == []


def test_who_holds_everything_back_says_nothing():
    outbox = Outbox()
    outbox.advanced(Talker(1, None))
    assert outbox.take() == []


def test_an_end_says_what_was_not_shown_and_is_told_before_who_goes_on():
    outbox, ending = Outbox(), Talker(1, "end")
    outbox.advanced(ending)
    outbox.advanced(Talker(2, "b"))
    assert not outbox.has_end
    outbox.ended(ending, Speculation(rounds=3))
    assert outbox.has_end
    (_, last), other = outbox.take()
    assert last.finish.speculation.rounds == 3
    assert said([other]) == [(2, "b")]


def test_what_was_made_out_before_a_failure_is_told_after_it():
    outbox = Outbox()
    for talker in (Talker(1, "a"), Talker(2, "unreadable"), Talker(3, "c"), Talker(4, "end")):
        outbox.advanced(talker)
    with pytest.raises(ZeroDivisionError):
        outbox.take()
    outbox.leave_unread()
    assert said(outbox.take()) == [(1, "a"), (4, "end")]
