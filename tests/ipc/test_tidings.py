"""Each number is told once to who waits for it, and nobody waits for a process that has ended."""

from __future__ import annotations

from luceasync.ipc.heartbeat import MAX_EARLY, NUMBER_BYTES, Tidings


def packet(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little")


def test_numbers_find_those_who_wait_for_them_in_any_order() -> None:
    tidings, heard = Tidings(), []
    for number in (1, 2):
        tidings.expect(number, lambda told, number=number: heard.append((number, told)))
    assert tidings.came(packet(2)) and tidings.came(packet(3)) and tidings.came(packet(1))
    tidings.expect(3, lambda told: heard.append((3, told)))
    assert heard == [(2, True), (1, True), (3, True)]


def test_an_end_is_told_to_all_who_wait_then_or_later() -> None:
    tidings, heard = Tidings(), []
    tidings.came(packet(9))
    tidings.expect(1, heard.append)
    tidings.end()
    tidings.end()
    tidings.expect(2, heard.append)
    tidings.expect(9, heard.append)  # it was told before
    assert heard == [False, False, True]


def test_what_is_no_number_or_too_many_is_noticed() -> None:
    assert not Tidings().came(b"1234")
    tidings = Tidings()
    came = [tidings.came(packet(number)) for number in range(MAX_EARLY + 1)]
    assert came == [True] * MAX_EARLY + [False]
