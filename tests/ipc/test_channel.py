"""Two ends that differ in what must agree close the channel at the greeting, and say why."""

from __future__ import annotations

import threading

import pytest

from luceasync import __version__
from luceasync.errors import ChannelClosed, PeerMismatch
from luceasync.ipc.channel import PROTOCOL, Statement, be_greeted, difference, greet
from luceasync.ipc.packets import Welcome
from tests.ipc.ends import DEADLINE_S, Ends, Heard, Say

STATES = {"weights": "blake3 ab12", "dtype": "bf16", "layers": "5-34"}


def test_equal_statements_agree() -> None:
    assert difference(Statement(STATES), Statement(dict(STATES))) is None


DIFFERENT = [
    (Statement(STATES, protocol=PROTOCOL + 1), ("protocol", str(PROTOCOL), str(PROTOCOL + 1))),
    (Statement(STATES, version="9.9"), ("luceasync", __version__, "9.9")),
    (Statement(STATES | {"weights": "blake3 cd34"}), ("weights:", "blake3 ab12", "blake3 cd34")),
    (Statement(STATES | {"dtype": "fp32"}), ("dtype:", "bf16", "fp32")),
    (Statement(STATES | {"layers": "5-33"}), ("layers:", "5-34", "5-33")),
    (Statement(STATES | {"rope": "yarn"}), ("rope:", "not stated", "yarn")),
    (Statement({}), ("dtype:", "bf16", "not stated")),
]


@pytest.mark.parametrize(("theirs", "differing"), DIFFERENT)
def test_whoever_differs_is_refused_with_both_values_at_both_ends(
    ends: Ends, theirs: Statement, differing: tuple[str, str, str]
) -> None:
    what, here, there = differing
    told: list[str] = []

    def at_the_other_end() -> None:
        try:
            be_greeted(ends.there, theirs, DEADLINE_S)
        except PeerMismatch as error:
            told.append(str(error))

    thread = threading.Thread(target=at_the_other_end)
    thread.start()
    with pytest.raises(PeerMismatch) as caught:
        greet(ends.here, Statement(STATES), DEADLINE_S)
    thread.join()
    seen_there = f"{what} {there} here, {here} there"
    assert told == [f"the parent: {seen_there}"]
    assert str(caught.value) == f"the child: it refused us: {seen_there}"
    assert ends.here.closed and ends.there.closed


def test_a_difference_names_both_values() -> None:
    ours, theirs = Statement({"dtype": "bf16"}), Statement({"dtype": "fp32"})
    assert difference(ours, theirs) == "dtype: bf16 here, fp32 there"
    assert difference(theirs, ours) == "dtype: fp32 here, bf16 there"


def test_both_go_on_where_they_agree(ends: Ends) -> None:
    thread = threading.Thread(target=lambda: be_greeted(ends.there, Statement(STATES), DEADLINE_S))
    thread.start()
    greet(ends.here, Statement(STATES), DEADLINE_S)
    thread.join()
    ends.here.send(Say("so"), deadline_s=DEADLINE_S)
    assert ends.there.receive(DEADLINE_S).message == Say("so")


def test_a_welcome_is_checked_too(ends: Ends) -> None:
    """An end that agrees with everything is no peer yet."""
    thread = threading.Thread(target=lambda: welcome_anybody(ends))
    thread.start()
    with pytest.raises(PeerMismatch, match="dtype: bf16 here, int2 there"):
        greet(ends.here, Statement({"dtype": "bf16"}), DEADLINE_S)
    thread.join()


def welcome_anybody(ends: Ends) -> None:
    number = ends.there.receive(DEADLINE_S).number
    welcome = Welcome(PROTOCOL, Statement().version, {"dtype": "int2"})
    ends.there.send(welcome, answers=number, deadline_s=DEADLINE_S)


def test_whoever_does_not_begin_with_a_greeting_is_refused(ends: Ends) -> None:
    ends.here.send(Say(), deadline_s=DEADLINE_S)
    with pytest.raises(PeerMismatch, match="began with Say, not with a greeting"):
        be_greeted(ends.there, Statement(), DEADLINE_S)


def test_another_answer_to_a_greeting_is_refused(ends: Ends) -> None:
    def answer() -> None:
        number = ends.there.receive(DEADLINE_S).number
        ends.there.send(Heard(), answers=number, deadline_s=DEADLINE_S)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(PeerMismatch, match="answered a greeting with Heard"):
        greet(ends.here, Statement(), DEADLINE_S)
    thread.join()


def test_a_silent_end_is_not_waited_for(ends: Ends) -> None:
    with pytest.raises(ChannelClosed, match="silent"):
        greet(ends.here, Statement(), 0.05)
