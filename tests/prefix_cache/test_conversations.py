"""Which prompts of a name are its main line, how long that counts, and that it outlives titles."""

from __future__ import annotations

import random
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
from tests.prefix_cache.token_target import VOCAB_SIZE, Bench

CHAT, OTHER = ConversationName(b"t", "client", "chat"), ConversationName(b"t", "client", "other")
MAIN = list(range(1000))
HELPER = list(range(5000, 6000))


class Talks(Conversations):
    """Turns of tokens, whose ends name their nodes."""

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


def test_a_continued_prompt_is_claimed_and_a_single_one_is_not(talks):
    talks.turn(MAIN[:100])
    assert talks.claims(0.0) == []
    talks.turn(HELPER[:50])
    talks.turn(MAIN[:200])
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_repeating_a_prompt_does_not_continue_it(talks):
    talks.turn(MAIN[:100])
    talks.turn(MAIN[:100])
    assert talks.claims(0.0) == []


def test_the_claim_moves_with_the_turns_and_newer_conversations_come_first(talks):
    begun(talks).turn(MAIN[:50], name=OTHER)
    talks.turn(MAIN[:60], name=OTHER)
    assert talks.claims(0.0) == [(end_of(MAIN[:60]),), (end_of(MAIN[:200]),)]
    talks.turn(MAIN[:300])
    assert talks.claims(0.0) == [(end_of(MAIN[:300]),), (end_of(MAIN[:60]),)]


def test_a_second_line_that_goes_on_is_not_the_main_one(talks):
    begun(talks)
    for num_tokens in range(10, 100, 10):
        talks.turn(HELPER[:num_tokens])
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_it_becomes_the_main_one_once_that_was_left(talks):
    begun(talks)
    for num_tokens in range(10, 10 * (MAX_MISSED_TURNS + 4), 10):
        talks.turn(HELPER[:num_tokens])
    assert talks.claims(0.0) == [(end_of(HELPER[: 10 * (MAX_MISSED_TURNS + 3)]),)]
    talks.turn(MAIN[:300])
    assert talks.claims(0.0) == [(end_of(MAIN[:300]),)]


def test_titles_do_not_count_as_missed_turns(talks):
    begun(talks)
    for begin in range(2000, 2000 + 10 * MAX_MISSED_TURNS):
        talks.turn(range(begin, begin + 50))
    assert talks.claims(0.0) == [(end_of(MAIN[:200]),)]


def test_a_changed_last_turn_continues_the_one_before(talks):
    begun(talks).turn([*MAIN[:150], *HELPER[:100]])
    assert talks.claims(0.0) == [(end_of(MAIN[:250]),)]


def test_other_lines_spare_the_main_line_and_its_own_turns_do_not(talks):
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


def test_a_claim_expires_if_the_clock_was_set_back(talks):
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


TURN_TOKENS, ANSWER_TOKENS, OPENER_TOKENS = 90, 10, 4
NUM_TURNS, NUM_TITLES, TITLE_TOKENS = 20, 30, 300
MEMORY_BYTES = 20_000  # the whole conversation takes half of it, the titles of a turn twice of it


class Client:
    """Sends prompts that end with the opening of an answer, with a name or without."""

    def __init__(self, bench: Bench, word: str) -> None:
        self._bench, self._word = bench, word
        self._random = random.Random(1)

    def tokens(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(VOCAB_SIZE), k=num_tokens)

    def ask(self, prompt: list[int], *turns: int) -> tuple[list[int], int]:
        """The sequence with its answer, and how many tokens of the prompt were found."""
        end = len(prompt) - OPENER_TOKENS
        lease = self._bench.lease(prompt, *turns, end, conversation=self._word)
        num_found = self._bench.start(lease)
        self._bench.prefill(lease, begin=num_found)
        self._bench.end(lease, ANSWER_TOKENS)
        return [int(token) for token in lease.sequence], num_found


def hits(
    word: str, *, recurrent: bool, other: str | None = None, memory_bytes: int = MEMORY_BYTES
) -> list[bool]:
    """By turn of a conversation whether it was found again as far as it was run, beside titles."""
    bench = Bench(recurrent=recurrent, memory_bytes=memory_bytes, disk_bytes=None)
    main, titles = Client(bench, word), Client(bench, word if other is None else other)
    said, turns, found = [], [], []
    for _ in range(NUM_TURNS):
        before = len(said)
        said += main.tokens(TURN_TOKENS)
        turns.append(before)
        said, num_found = main.ask(said, *turns[1:])
        found.append(num_found >= before - 1)
        for _ in range(NUM_TITLES):
            titles.ask(titles.tokens(TITLE_TOKENS))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_thirty_titles_a_turn_leave_the_conversation_its_nodes(recurrent: bool):
    found = hits("chat", recurrent=recurrent)
    assert all(found[2:]), found  # before the second turn it is not known to go on


@pytest.mark.slow
@pytest.mark.parametrize(("recurrent", "most"), [(True, NUM_TURNS - 3), (False, 1)])
def test_without_names_titles_evict_the_conversation(recurrent: bool, most: int):
    assert sum(hits("", recurrent=recurrent)) <= most


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_other_clients_evict_the_conversation_last(recurrent: bool):
    found = hits("chat", recurrent=recurrent, other="")
    assert all(found[2:]), found


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_titles_are_not_saved_if_the_conversation_takes_nearly_all_of_memory(recurrent: bool):
    found = hits("chat", recurrent=recurrent, memory_bytes=8_600)
    assert all(found[2:]), found
