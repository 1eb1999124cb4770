"""A conversation that its client names outlives what stands beside it under the same name."""

from __future__ import annotations

import random

import pytest

from tests.prefix_cache.kept import VOCAB_SIZE, Bench

TURN_TOKENS, ANSWER_TOKENS, OPENER_TOKENS = 90, 10, 4
NUM_TURNS, NUM_TITLES, TITLE_TOKENS = 20, 30, 300
MEMORY_BYTES = 20_000  # the whole conversation takes half of it, the titles of a turn twice of it


class Client:
    """Sends prompts that end with what opens the answer, by a name or without one."""

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
def test_thirty_titles_a_turn_leave_it_what_it_goes_on_from(recurrent: bool):
    found = hits("chat", recurrent=recurrent)
    assert all(found[2:]), found  # before the second turn nobody knows that it goes on


@pytest.mark.slow
@pytest.mark.parametrize(("recurrent", "most"), [(True, NUM_TURNS - 3), (False, 1)])
def test_of_clients_that_name_nothing_the_titles_take_it(recurrent: bool, most: int):
    assert sum(hits("", recurrent=recurrent)) <= most


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_others_make_it_go_last_too(recurrent: bool):
    found = hits("chat", recurrent=recurrent, other="")
    assert all(found[2:]), found


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [True, False])
def test_where_it_takes_nearly_all_of_memory_titles_are_not_kept(recurrent: bool):
    found = hits("chat", recurrent=recurrent, memory_bytes=8_600)
    assert all(found[2:]), found
