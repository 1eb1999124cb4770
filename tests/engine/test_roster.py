"""Who has work to do, and which lane is the next to be given."""

from __future__ import annotations

import time
from types import SimpleNamespace

from luceasync.engine.scheduler import MAX_ASKED, TURN_PER_BEGINNING, Roster


class Choice:
    """A generation, as far as a roster looks at it."""

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
        self.lease = SimpleNamespace(awaited=awaited, has_arrived=False)
        self.prepared = SimpleNamespace(
            stream_id=id(self), request=SimpleNamespace(client=client, priority=priority)
        )

    is_restoring = property(lambda self: self.state == "restoring")
    is_prefilling = property(lambda self: self.state == "prefilling")
    is_decoding = property(lambda self: self.state == "decoding")
    last_token = property(lambda self: 7 if self.is_decoding else None)


def ready(choice: Choice) -> bool:
    """Whoever waits could begin."""
    return True


def seated(roster: Roster, state: str, client: str = "a") -> Choice:
    choice = Choice(state, client=client)
    roster.queue([choice])
    roster.seat(choice, roster.first_free_lane)
    return choice


def test_the_lowest_free_lane_is_given_first():
    roster = Roster(3)
    choices = [seated(roster, "decoding") for _ in range(3)]
    assert roster.first_free_lane is None
    for lane in (2, 0):
        roster.free(lane)
    assert roster.first_free_lane == 0
    assert roster.running == choices


def test_a_lane_is_not_free_when_its_choice_is_let_go():
    roster = Roster(1)
    roster.let_go(seated(roster, "decoding"))
    assert (roster.running, roster.first_free_lane) == ([], None)


def test_choices_are_found_by_what_they_do():
    roster = Roster(3)
    restoring, prefilling, decoding = (
        seated(roster, state) for state in ("restoring", "prefilling", "decoding")
    )
    assert roster.parted() == ([restoring], [prefilling], [decoding])
    assert repr(roster) == "0 waiting, 2 prefilling, 1 decoding, 0 lanes free"


def test_there_is_work_while_somebody_runs_who_waits_for_no_copies():
    roster = Roster(2)
    assert not roster.has_work
    restoring = seated(roster, "restoring")
    assert not roster.has_work
    restoring.lease.has_arrived = True
    assert roster.has_work


def test_who_waits_for_the_disk_is_no_work():
    roster = Roster(1)
    roster.queue([Choice(awaited=frozenset({b"node"}))])
    assert not roster.has_work
    roster.queue([Choice()])
    assert roster.has_work


def test_who_was_passed_over_is_work_again_when_nobody_runs():
    roster = Roster(1)
    running = seated(roster, "restoring")
    roster.queue([Choice()])
    assert roster.has_work
    roster.pass_over()
    assert not roster.has_work
    roster.let_go(running)
    assert roster.has_work


def test_a_lane_that_is_free_gives_those_who_were_passed_over_a_chance():
    roster = Roster(2)
    for _ in range(2):
        leaving = seated(roster, "restoring")
    roster.queue([Choice()])
    roster.pass_over()
    roster.let_go(leaving)
    assert not roster.has_work
    roster.free(1)
    assert roster.has_work


def test_a_client_without_lanes_comes_before_one_that_has_some():
    roster = Roster(3)
    seated(roster, "decoding")
    first, second, other = Choice(), Choice(), Choice(client="b")
    roster.queue([first, second, other])
    assert roster.in_turn() == [other, first, second]


def test_who_is_not_read_gets_no_step_and_no_lane():
    roster = Roster(2)
    running, waiting = seated(roster, "decoding"), Choice()
    roster.queue([waiting])
    for choice in (running, waiting):
        roster.read(id(choice), is_behind=True)
    assert not roster.has_work
    assert roster.parted() == ([], [], [])
    assert roster.in_turn() == []
    roster.read(id(running), is_behind=False)
    assert roster.has_work
    assert roster.parted() == ([], [], [running])


def test_who_is_not_read_gives_its_lane_to_whoever_waits_and_waits_first_of_its_client():
    roster = Roster(1)
    unread = seated(roster, "decoding")
    roster.read(id(unread), is_behind=True)
    assert roster.gives_way(ready) is None  # nobody waits
    other = Choice()
    roster.queue([other])
    roster.pass_over()
    assert roster.has_work is False
    roster.read(id(unread), is_behind=True)  # since somebody may have a chance now
    assert roster.has_work
    assert roster.gives_way(ready) is unread
    roster.wait_again(unread)
    assert roster.waiting == [unread, other]
    roster.free(0)
    assert roster.in_turn() == [other]


def test_nobody_gives_way_while_a_lane_is_free_or_to_its_own_client():
    roster = Roster(2)
    seated(roster, "decoding")
    roster.queue([Choice(client="b")])
    assert roster.gives_way(ready) is None
    full = Roster(2)
    for _ in range(2):
        last = seated(full, "decoding")
    full.queue([Choice()])
    assert full.gives_way(ready) is None
    full.queue([Choice(client="b")])
    assert full.gives_way(ready) is last


def test_a_lane_goes_round_among_the_answers_that_a_client_has_begun():
    roster = Roster(1)
    first = seated(roster, "decoding")
    stands, young = Choice(), Choice()
    roster.queue([Choice(client="b"), young, stands])
    assert roster.gives_way(ready) is None  # neither has been on a lane
    stands.left_at = -1e9
    assert roster.gives_way(ready) is first
    roster.wait_again(first)
    first.left_at = time.monotonic()
    roster.free(0)
    assert roster.in_turn()[0] is stands  # whoever else has none
    roster.seat(stands, 0)
    stands.state = "decoding"
    assert roster.gives_way(ready) is None  # the first has only begun to stand
    first.left_at = -1e9
    assert roster.gives_way(ready) is stands
    roster.give_up(first)
    assert roster.in_turn()[0] is not first


def test_nobody_leaves_a_lane_to_one_that_cannot_begin_yet():
    roster = Roster(1)
    unread = seated(roster, "decoding")
    roster.read(id(unread), is_behind=True)
    others = [Choice(client="b"), Choice(client="c")]
    roster.queue(others)
    assert roster.gives_way(lambda choice: False) is None
    assert roster.gives_way(lambda choice: choice is others[1]) is unread


def test_a_lane_goes_to_no_other_answer_of_its_client_that_cannot_begin_yet():
    roster, stands = Roster(1), Choice()
    first = seated(roster, "decoding")
    stands.left_at = -1e9
    roster.queue([stands])
    assert roster.gives_way(lambda choice: False) is None
    assert roster.gives_way(ready) is first


def test_few_are_asked_at_a_step_whether_they_could_begin():
    roster, asked = Roster(1), []
    roster.read(id(seated(roster, "decoding")), is_behind=True)
    roster.queue([Choice(client=f"{n}") for n in range(1000)])
    assert roster.gives_way(lambda choice: asked.append(choice) is not None) is None
    assert 0 < len(asked) <= MAX_ASKED


def test_on_a_slow_machine_a_turn_ends_by_time():
    roster, stands = Roster(1), Choice()
    first = seated(roster, "decoding")
    first.num_in_turn, first.prefill_s = 1, 1.0
    stands.left_at = -1e9
    roster.queue([stands])
    assert roster.gives_way(ready) is None
    first.turn_s = TURN_PER_BEGINNING
    assert roster.gives_way(ready) is first


def test_of_its_own_requests_a_client_says_which_comes_first_and_nothing_of_others():
    roster = Roster(1)
    late, other, soon, soonest = (
        Choice(client="a", priority=5),
        Choice(client="b"),
        Choice(client="a"),
        Choice(client="a", priority=-1),
    )
    roster.queue([late, other, soon, soonest])
    assert roster.in_turn() == [soonest, other, soon, late]
