"""Which choice gets a lane, which gives one up, what runs next, and what is evicted."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest

from luceasync.engine.scheduler import (
    MAX_ASKED,
    MIN_TURN_S,
    MIN_TURN_TOKENS,
    ROWS_PER_TURN_TOKEN,
    TURN_PER_PREFILL,
    OpenRequest,
    Scheduler,
    Seat,
    may_enter,
    order_by_turn,
    requests_to_evict,
    seat_to_preempt,
    seat_to_rotate,
)


class Choice:
    """A generation, as far as a scheduler looks at it."""

    is_unread = False
    num_in_turn = 1000
    num_prefilled = num_cached = 0
    prefill_s = 0.0
    left_at: float | None = None
    turn_s = 0.0

    def __init__(
        self,
        state: str = "waiting",
        awaited: frozenset = frozenset(),
        client: str = "a",
        priority: int = 0,
    ) -> None:
        self.state = state
        self.client = client
        self.lease = SimpleNamespace(awaited=awaited, has_arrived=False)
        self.prepared = SimpleNamespace(
            stream_id=id(self), request=SimpleNamespace(priority=priority)
        )

    is_restoring = property(lambda self: self.state == "restoring")
    is_decoding = property(lambda self: self.state == "decoding")
    last_token = property(lambda self: 7 if self.is_decoding else None)


def ready(choice: Choice) -> bool:
    """Every waiting choice could begin."""
    return True


def seated(scheduler: Scheduler, state: str, client: str = "a") -> Choice:
    choice = Choice(state, client=client)
    scheduler.enqueue([choice])
    scheduler.assign(choice, scheduler.first_free_lane)
    return choice


# --- lanes and work -----------------------------------------------------------------------------


def test_the_lowest_free_lane_is_given_first():
    scheduler = Scheduler(3)
    choices = [seated(scheduler, "decoding") for _ in range(3)]
    assert scheduler.first_free_lane is None
    for lane in (2, 0):
        scheduler.free(lane)
    assert scheduler.first_free_lane == 0
    assert scheduler.running == choices


def test_a_lane_is_not_free_when_its_choice_is_retired():
    scheduler = Scheduler(1)
    scheduler.retire(seated(scheduler, "decoding"))
    assert (scheduler.running, scheduler.first_free_lane) == ([], None)


def test_running_choices_are_partitioned_by_what_they_do():
    scheduler = Scheduler(3)
    restoring, prefilling, decoding = (
        seated(scheduler, state) for state in ("restoring", "prefilling", "decoding")
    )
    assert scheduler.partition() == ([restoring], [prefilling], [decoding])
    assert repr(scheduler) == "0 waiting, 2 prefilling, 1 decoding, 0 lanes free"


def test_a_restore_is_work_once_its_copies_have_arrived():
    scheduler = Scheduler(2)
    assert not scheduler.has_work
    restoring = seated(scheduler, "restoring")
    assert not scheduler.has_work
    restoring.lease.has_arrived = True
    assert scheduler.has_work


def test_a_choice_that_waits_for_the_disk_is_no_work():
    scheduler = Scheduler(1)
    scheduler.enqueue([Choice(awaited=frozenset({b"node"}))])
    assert not scheduler.has_work
    scheduler.enqueue([Choice()])
    assert scheduler.has_work


def test_a_choice_that_was_passed_over_is_work_again_when_nothing_runs():
    scheduler = Scheduler(1)
    running = seated(scheduler, "restoring")
    scheduler.enqueue([Choice()])
    assert scheduler.has_work
    scheduler.pass_over()
    assert not scheduler.has_work
    scheduler.retire(running)
    assert scheduler.has_work


def test_a_free_lane_gives_choices_that_were_passed_over_a_chance():
    scheduler = Scheduler(2)
    for _ in range(2):
        leaving = seated(scheduler, "restoring")
    scheduler.enqueue([Choice()])
    scheduler.pass_over()
    scheduler.retire(leaving)
    assert not scheduler.has_work
    scheduler.free(1)
    assert scheduler.has_work


def test_an_unread_choice_gets_no_step_and_no_lane():
    scheduler = Scheduler(2)
    running, waiting = seated(scheduler, "decoding"), Choice()
    scheduler.enqueue([waiting])
    for choice in (running, waiting):
        scheduler.set_unread(id(choice), is_unread=True)
    assert not scheduler.has_work
    assert scheduler.partition() == ([], [], [])
    assert scheduler.in_turn() == []
    scheduler.set_unread(id(running), is_unread=False)
    assert scheduler.has_work
    assert scheduler.partition() == ([], [], [running])


# --- which is next ------------------------------------------------------------------------------


def test_a_client_without_lanes_comes_before_one_that_has_some():
    scheduler = Scheduler(3)
    seated(scheduler, "decoding")
    first, second, other = Choice(), Choice(), Choice(client="b")
    scheduler.enqueue([first, second, other])
    assert scheduler.in_turn() == [other, first, second]


def test_priorities_order_the_requests_of_one_client_and_no_others():
    scheduler = Scheduler(1)
    late, other, soon, soonest = (
        Choice(client="a", priority=5),
        Choice(client="b"),
        Choice(client="a"),
        Choice(client="a", priority=-1),
    )
    scheduler.enqueue([late, other, soon, soonest])
    assert scheduler.in_turn() == [soonest, other, soon, late]


def order_of(waiting: str, running: str = "", last_turn: dict | None = None) -> str:
    order = order_by_turn(waiting, Counter(running), last_turn or {})
    assert sorted(order) == list(range(len(waiting)))
    return "".join(waiting[i] for i in order)


def test_clients_take_turns_for_free_lanes():
    assert order_of("aaaabbc") == "abcabaa"


def test_the_client_with_the_fewest_lanes_comes_first():
    assert order_of("aabc", running="aab") == "cbaa"


def test_of_two_with_as_many_the_one_whose_turn_was_longest_ago_comes_first():
    assert order_of("ab", last_turn={"a": 7, "b": 3}) == "ba"
    assert order_of("ab", last_turn={"a": 7}) == "ba"


def test_waiting_choices_of_one_client_keep_their_order():
    assert order_by_turn("aaba", {}, {}) == [0, 2, 1, 3]


# --- which gives a lane up ----------------------------------------------------------------------


def test_an_unread_choice_gives_its_lane_to_any_other_and_waits_first_of_its_client():
    scheduler = Scheduler(1)
    unread = seated(scheduler, "decoding")
    scheduler.set_unread(id(unread), is_unread=True)
    assert scheduler.to_preempt(ready) is None  # the queue is empty
    other = Choice()
    scheduler.enqueue([other])
    scheduler.pass_over()
    assert scheduler.has_work is False
    scheduler.set_unread(id(unread), is_unread=True)  # others may have a chance now
    assert scheduler.has_work
    assert scheduler.to_preempt(ready) is unread
    scheduler.requeue(unread)
    assert scheduler.waiting == [unread, other]
    scheduler.free(0)
    assert scheduler.in_turn() == [other]


def test_no_choice_is_preempted_while_a_lane_is_free_or_for_its_own_client():
    scheduler = Scheduler(2)
    seated(scheduler, "decoding")
    scheduler.enqueue([Choice(client="b")])
    assert scheduler.to_preempt(ready) is None
    full = Scheduler(2)
    for _ in range(2):
        last = seated(full, "decoding")
    full.enqueue([Choice()])
    assert full.to_preempt(ready) is None
    full.enqueue([Choice(client="b")])
    assert full.to_preempt(ready) is last


def test_a_lane_rotates_among_the_answers_that_a_client_has_begun():
    scheduler = Scheduler(1)
    first = seated(scheduler, "decoding")
    stands, young = Choice(), Choice()
    scheduler.enqueue([Choice(client="b"), young, stands])
    assert scheduler.to_preempt(ready) is None  # neither has been on a lane
    stands.left_at = -1e9
    assert scheduler.to_preempt(ready) is first
    scheduler.requeue(first)
    first.left_at = time.monotonic()
    scheduler.free(0)
    assert scheduler.in_turn()[0] is stands  # before a client that has no lane
    scheduler.assign(stands, 0)
    stands.state = "decoding"
    assert scheduler.to_preempt(ready) is None  # the first was paused only now
    first.left_at = -1e9
    assert scheduler.to_preempt(ready) is stands
    scheduler.withdraw(first)
    assert scheduler.in_turn()[0] is not first


def test_no_choice_is_preempted_for_one_that_cannot_begin_yet():
    scheduler = Scheduler(1)
    unread = seated(scheduler, "decoding")
    scheduler.set_unread(id(unread), is_unread=True)
    others = [Choice(client="b"), Choice(client="c")]
    scheduler.enqueue(others)
    assert scheduler.to_preempt(lambda choice: False) is None
    assert scheduler.to_preempt(lambda choice: choice is others[1]) is unread


def test_a_lane_rotates_to_no_answer_that_cannot_begin_yet():
    scheduler, stands = Scheduler(1), Choice()
    first = seated(scheduler, "decoding")
    stands.left_at = -1e9
    scheduler.enqueue([stands])
    assert scheduler.to_preempt(lambda choice: False) is None
    assert scheduler.to_preempt(ready) is first


def test_few_choices_are_asked_at_a_step_whether_they_could_begin():
    scheduler, asked = Scheduler(1), []
    scheduler.set_unread(id(seated(scheduler, "decoding")), is_unread=True)
    scheduler.enqueue([Choice(client=f"{n}") for n in range(1000)])
    assert scheduler.to_preempt(lambda choice: asked.append(choice) is not None) is None
    assert 0 < len(asked) <= MAX_ASKED


def test_on_a_slow_machine_a_turn_ends_by_time():
    scheduler, stands = Scheduler(1), Choice()
    first = seated(scheduler, "decoding")
    first.num_in_turn, first.prefill_s = 1, 1.0
    stands.left_at = -1e9
    scheduler.enqueue([stands])
    assert scheduler.to_preempt(ready) is None
    first.turn_s = TURN_PER_PREFILL
    assert scheduler.to_preempt(ready) is first


def seat(client: str, num_tokens: int = MIN_TURN_TOKENS, *, is_unread: bool = False) -> Seat:
    return Seat(client, is_unread, num_tokens)


def preempted(seats: list[Seat], waiting: str) -> int | None:
    return seat_to_preempt(seats, Counter(s.client for s in seats), set(waiting))


def test_the_last_of_the_client_with_most_is_preempted_until_lanes_are_shared():
    seats = [seat("a") for _ in range(4)]
    assert preempted(seats, "b") == 3
    seats[3] = seat("b")
    assert preempted(seats, "b") == 2
    seats[2] = seat("b")
    assert preempted(seats, "ab") is None


def test_a_client_keeps_its_only_lane_while_it_reads():
    assert preempted([seat("a")], "b") is None
    assert preempted([seat("a", is_unread=True)], "b") == 0


def test_an_unread_answer_makes_room_for_its_own_client_too():
    assert preempted([seat("a"), seat("a", is_unread=True), seat("a")], "a") == 1


def test_an_answer_gets_some_tokens_before_it_is_preempted():
    assert preempted([seat("a"), seat("a", MIN_TURN_TOKENS - 1)], "b") == 0
    assert preempted([seat("a", 1), seat("a", 1)], "b") is None


def test_no_seat_is_preempted_for_an_empty_queue():
    assert preempted([seat("a", is_unread=True)], "") is None


def test_the_longest_turn_makes_room_for_an_answer_of_its_own_client():
    seats = [seat("a"), seat("a", 2 * MIN_TURN_TOKENS), seat("b", 1000)]
    assert seat_to_rotate(seats, {"a"}) == 1
    assert seat_to_rotate(seats, {"c"}) is None
    assert seat_to_rotate([seat("a", MIN_TURN_TOKENS - 1)], {"a"}) is None


def test_a_turn_lasts_until_it_was_worth_its_prefill():
    num_rows = 1000 * ROWS_PER_TURN_TOKEN
    assert seat_to_rotate([Seat("a", False, 999, num_rows)], {"a"}) is None
    assert seat_to_rotate([Seat("a", False, 1000, num_rows)], {"a"}) == 0


def test_where_tokens_are_slow_a_turn_ends_after_a_time_that_was_worth_its_prefill():
    def turn(turn_s: float, prefill_s: float = 0.0) -> Seat:
        return Seat("a", False, 1, 10**6, turn_s, prefill_s)

    assert seat_to_rotate([turn(0.9 * MIN_TURN_S)], {"a"}) is None
    assert seat_to_rotate([turn(MIN_TURN_S)], {"a"}) == 0
    assert seat_to_rotate([turn(1.9, 1.0)], {"a"}) is None
    assert seat_to_rotate([turn(TURN_PER_PREFILL, 1.0)], {"a"}) == 0


# --- eviction and admission ---------------------------------------------------------------------


def requests(clients: str, running: str = "") -> list[OpenRequest]:
    waiting = [OpenRequest(len(running) + i, c, 1, is_waiting=True) for i, c in enumerate(clients)]
    return [*(OpenRequest(i, c, 1, is_waiting=False) for i, c in enumerate(running)), *waiting]


def test_the_client_that_holds_most_loses_what_came_last():
    assert requests_to_evict(requests("aaab"), 3) == [2]
    assert requests_to_evict(requests("aaab"), 4) == []


def test_a_client_cannot_evict_one_that_holds_less():
    assert requests_to_evict(requests("baaaa"), 4) == [4]
    assert requests_to_evict(requests("aabb"), 3) == [3]  # as many: the last that came


def test_a_request_with_a_lane_stays():
    assert requests_to_evict(requests("b", running="aaa"), 3) == [3]


def test_an_unread_request_goes_before_later_ones():
    unread = OpenRequest(0, "a", 1, is_waiting=True, is_unread=True)
    others = [OpenRequest(1, "a", 1, True), OpenRequest(2, "b", 1, True)]
    assert requests_to_evict([unread, *others], 2) == [0]


def test_all_choices_of_a_request_go_together():
    listed = [OpenRequest(0, "a", 3, True), OpenRequest(1, "a", 3, True)]
    assert requests_to_evict([*listed, OpenRequest(2, "b", 1, True)], 6) == [1]


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
def test_a_full_queue_accepts_a_client_that_would_hold_less_than_another(
    clients, client, num_choices, expected
):
    assert may_enter(Counter(clients), 4, client, num_choices) is expected


def test_an_accepted_request_is_not_evicted_at_once():
    for clients in ("aaaa", "aaab", "aabb", "abcd", "aabc"):
        for client in "abcde":
            evicted = requests_to_evict(requests(clients + client), 4)
            assert (evicted != [4]) == may_enter(Counter(clients), 4, client, 1)
