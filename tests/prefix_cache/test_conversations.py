"""Which of the prompts of one name are the conversation, and for how long that counts."""

from __future__ import annotations

from array import array

import pytest

from luceasync.prefix_cache.conversations import (
    CLAIM_S,
    MAX_LINES,
    MAX_MISSED_TURNS,
    MAX_NAMES,
    ConversationName,
    Conversations,
    ConversationTurn,
)

CHAT, OTHER = ConversationName(b"t", "client", "chat"), ConversationName(b"t", "client", "other")
MAIN = list(range(1000))
HELPER = list(range(5000, 6000))


class Talks(Conversations):
    """Turns of tokens, of which the end names what is kept."""

    def turn(self, tokens, *, name=CHAT, now_s=0.0) -> None:
        turn = ConversationTurn(name, len(tokens))
        self.end_turn(turn, array("i", [*tokens, 7, 7]), [end_of(tokens)], now_s)


def end_of(tokens) -> bytes:
    return b"%d-%d" % (tokens[0], len(tokens))


@pytest.fixture
def talks() -> Talks:
    return Talks()


def begun(talks: Talks) -> Talks:
    """The main line has gone on once."""
    talks.turn(MAIN[:100])
    talks.turn(MAIN[:200])
    return talks


def test_what_goes_on_is_claimed_and_what_is_asked_once_is_not(talks):
    talks.turn(MAIN[:100])
    assert talks.claims(0.0) == []
    talks.turn(HELPER[:50])
    talks.turn(MAIN[:200])
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_to_be_asked_the_same_again_is_not_to_go_on(talks):
    talks.turn(MAIN[:100])
    talks.turn(MAIN[:100])
    assert talks.claims(0.0) == []


def test_the_claim_moves_with_the_turns_and_newer_conversations_come_first(talks):
    begun(talks).turn(MAIN[:50], name=OTHER)
    talks.turn(MAIN[:60], name=OTHER)
    assert talks.claims(0.0) == [(end_of(MAIN[:60]),), (end_of(MAIN[:200]),)]
    talks.turn(MAIN[:300])
    assert talks.claims(0.0) == [(end_of(MAIN[:300]),), (end_of(MAIN[:60]),)]


def test_a_helper_that_goes_on_too_is_not_the_main_line(talks):
    begun(talks)
    for num_tokens in range(10, 100, 10):
        talks.turn(HELPER[:num_tokens])
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_until_the_main_one_was_left(talks):
    begun(talks)
    for num_tokens in range(10, 10 * (MAX_MISSED_TURNS + 4), 10):
        talks.turn(HELPER[:num_tokens])
    assert talks.claims(0.0) == [(end_of(HELPER[: 10 * (MAX_MISSED_TURNS + 3)]),)]
    talks.turn(MAIN[:300])
    assert talks.claims(0.0) == [(end_of(MAIN[:300]),)]


def test_titles_are_no_turns_that_it_misses(talks):
    begun(talks)
    for begin in range(2000, 2000 + 10 * MAX_MISSED_TURNS):
        talks.turn(range(begin, begin + 50))
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_whoever_says_the_last_turn_otherwise_goes_on_from_the_one_before(talks):
    begun(talks).turn([*MAIN[:150], *HELPER[:100]])
    assert talks.claims(0.0) == [(end_of(MAIN[:250]),)]


def test_who_stands_beside_it_spares_it_and_its_own_turns_do_not(talks):
    begun(talks)
    ends = (end_of(MAIN[:200]),)
    assert talks.line_of(CHAT, array("i", HELPER)) == (False, ends)
    assert talks.line_of(CHAT, array("i", MAIN[:99])) == (False, ends)
    assert talks.line_of(CHAT, array("i", MAIN[:300])) == (True, ())
    assert talks.line_of(OTHER, array("i", HELPER)) == (False, ())


@pytest.mark.parametrize(
    "other", [ConversationName(b"u", "client", "chat"), ConversationName(b"t", "another", "chat")]
)
def test_the_same_word_of_others_is_another_name(talks, other):
    talks.turn(MAIN[:100])
    talks.turn(MAIN[:200], name=other)
    assert talks.claims(0.0) == [] and not talks.line_of(other, array("i", HELPER))[1]


def test_a_claim_expires(talks):
    begun(talks)
    assert talks.claims(CLAIM_S) and not talks.claims(CLAIM_S + 1)


def test_it_expires_too_where_the_clock_was_set_back(talks):
    talks.turn(MAIN[:100], now_s=9e9)
    talks.turn(MAIN[:200], now_s=9e9)
    assert talks.claims(0.0) == []


def test_names_and_lines_are_bounded_and_the_main_line_stays(talks):
    begun(talks)
    for begin in range(2000, 2000 + 10 * MAX_LINES):
        talks.turn(range(begin, begin + 50), now_s=float(begin))
    assert len(talks._lines[CHAT]) == MAX_LINES and talks.claims(0.0)
    for number in range(MAX_NAMES):
        talks.turn(MAIN[:10], name=ConversationName(b"t", "client", str(number)))
    assert len(talks._lines) == MAX_NAMES and CHAT not in talks._lines
