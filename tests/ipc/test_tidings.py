"""Each number is told once to who waits for it, and nobody waits for a process that has ended."""

from __future__ import annotations

from luceasync.ipc.heartbeat import MAX_EARLY, NUMBER_BYTES, Completions


def packet(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little")


def test_numbers_find_those_who_wait_for_them_in_any_order() -> None:
    completions, heard = Completions(), []
    for number in (1, 2):
        completions.expect(number, lambda told, number=number: heard.append((number, told)))
    assert completions.came(packet(2)) and completions.came(packet(3)) and completions.came(packet(1))
    completions.expect(3, lambda told: heard.append((3, told)))
    assert heard == [(2, True), (1, True), (3, True)]


def test_an_end_is_told_to_all_who_wait_then_or_later() -> None:
    completions, heard = Completions(), []
    completions.came(packet(9))
    completions.expect(1, heard.append)
    completions.end()
    completions.end()
    completions.expect(2, heard.append)
    completions.expect(9, heard.append)  # it was told before
    assert heard == [False, False, True]


def test_what_is_no_number_or_too_many_is_noticed() -> None:
    assert not Completions().came(b"1234")
    completions = Completions()
    came = [completions.came(packet(number)) for number in range(MAX_EARLY + 1)]
    assert came == [True] * MAX_EARLY + [False]
