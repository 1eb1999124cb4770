"""Lanes and places go round between clients, whatever one of them asks for."""

from __future__ import annotations

from collections import Counter

import pytest

from luceasync.engine.scheduler import (
    MIN_TURN_S,
    MIN_TURN_TOKENS,
    ROWS_PER_TURN_TOKEN,
    TURN_PER_BEGINNING,
    Held,
    Seat,
    gives_way,
    goes_round,
    in_turn,
    may_enter,
    turned_out,
)


def order_of(waiting: str, running: str = "", last_turn: dict | None = None) -> str:
    order = in_turn(waiting, Counter(running), last_turn or {})
    assert sorted(order) == list(range(len(waiting)))
    return "".join(waiting[i] for i in order)


def test_clients_take_turns_for_free_lanes():
    assert order_of("aaaabbc") == "abcabaa"


def test_whoever_has_the_fewest_lanes_comes_first():
    assert order_of("aabc", running="aab") == "cbaa"


def test_of_two_with_as_many_the_one_whose_turn_was_longest_ago_comes_first():
    assert order_of("ab", last_turn={"a": 7, "b": 3}) == "ba"
    assert order_of("ab", last_turn={"a": 7}) == "ba"


def test_what_a_client_has_waiting_keeps_its_order():
    assert in_turn("aaba", {}, {}) == [0, 2, 1, 3]


def seat(client: str, num_tokens: int = MIN_TURN_TOKENS, *, is_unread: bool = False) -> Seat:
    return Seat(client, is_unread, num_tokens)


def way(seats: list[Seat], waiting: str) -> int | None:
    return gives_way(seats, Counter(s.client for s in seats), set(waiting))


def test_the_last_of_whoever_has_most_gives_way_until_lanes_are_shared():
    seats = [seat("a") for _ in range(4)]
    assert way(seats, "b") == 3
    seats[3] = seat("b")
    assert way(seats, "b") == 2
    seats[2] = seat("b")
    assert way(seats, "ab") is None


def test_a_client_keeps_its_only_lane_while_it_reads():
    assert way([seat("a")], "b") is None
    assert way([seat("a", is_unread=True)], "b") == 0


def test_what_is_not_read_makes_room_for_its_own_client_too():
    assert way([seat("a"), seat("a", is_unread=True), seat("a")], "a") == 1


def test_an_answer_gets_some_tokens_before_it_gives_way():
    assert way([seat("a"), seat("a", MIN_TURN_TOKENS - 1)], "b") == 0
    assert way([seat("a", 1), seat("a", 1)], "b") is None


def test_nobody_gives_way_to_nobody():
    assert way([seat("a", is_unread=True)], "") is None


def test_who_had_the_longest_turn_makes_room_for_an_answer_of_its_own_client():
    seats = [seat("a"), seat("a", 2 * MIN_TURN_TOKENS), seat("b", 1000)]
    assert goes_round(seats, {"a"}) == 1
    assert goes_round(seats, {"c"}) is None
    assert goes_round([seat("a", MIN_TURN_TOKENS - 1)], {"a"}) is None


def test_a_turn_is_worth_what_it_took_to_begin_it():
    num_rows = 1000 * ROWS_PER_TURN_TOKEN
    assert goes_round([Seat("a", False, 999, num_rows)], {"a"}) is None
    assert goes_round([Seat("a", False, 1000, num_rows)], {"a"}) == 0


def test_where_tokens_are_slow_a_turn_is_over_after_a_time_that_was_worth_its_beginning():
    def turn(turn_s: float, prefill_s: float = 0.0) -> Seat:
        return Seat("a", False, 1, 10**6, turn_s, prefill_s)

    assert goes_round([turn(0.9 * MIN_TURN_S)], {"a"}) is None
    assert goes_round([turn(MIN_TURN_S)], {"a"}) == 0
    assert goes_round([turn(1.9, 1.0)], {"a"}) is None
    assert goes_round([turn(TURN_PER_BEGINNING, 1.0)], {"a"}) == 0


def held(clients: str, running: str = "") -> list[Held]:
    waiting = [Held(len(running) + i, c, 1, is_waiting=True) for i, c in enumerate(clients)]
    return [*(Held(i, c, 1, is_waiting=False) for i, c in enumerate(running)), *waiting]


def test_whoever_holds_most_loses_what_came_last():
    assert turned_out(held("aaab"), 3) == [2]
    assert turned_out(held("aaab"), 4) == []


def test_a_client_cannot_push_out_one_that_holds_less():
    assert turned_out(held("baaaa"), 4) == [4]
    assert turned_out(held("aabb"), 3) == [3]  # as many: the last that came


def test_what_has_a_lane_stays():
    assert turned_out(held("b", running="aaa"), 3) == [3]


def test_what_nobody_reads_goes_before_what_waits():
    unread = Held(0, "a", 1, is_waiting=True, is_unread=True)
    assert turned_out([unread, Held(1, "a", 1, True), Held(2, "b", 1, True)], 2) == [0]


def test_all_choices_of_a_request_go_together():
    requests = [Held(0, "a", 3, True), Held(1, "a", 3, True), Held(2, "b", 1, True)]
    assert turned_out(requests, 6) == [1]


@pytest.mark.parametrize(
    ("clients", "client", "num_choices", "expected"),
    [
        ("aaa", "a", 1, True),  # there is a place
        ("aaaa", "a", 1, False),
        ("aaaa", "b", 1, True),
        ("aaaa", "b", 3, True),
        ("aaaa", "b", 4, False),  # it would hold as many as the one that is to lose some
        ("aabb", "a", 1, False),
        ("aabb", "c", 1, True),
        ("", "a", 5, False),  # more than there are at all
    ],
)
def test_a_full_queue_lets_in_whoever_would_hold_less_than_another(
    clients, client, num_choices, expected
):
    assert may_enter(Counter(clients), 4, client, num_choices) is expected


def test_who_was_let_in_stays_in():
    """What the door decides and what the queue decides agree."""
    for clients in ("aaaa", "aaab", "aabb", "abcd", "aabc"):
        for client in "abcde":
            if may_enter(Counter(clients), 4, client, 1):
                assert turned_out(held(clients + client), 4) != [4]
            else:
                assert turned_out(held(clients + client), 4) == [4]
