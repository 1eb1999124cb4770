"""A ring in shared memory reserves and frees places exactly as the plain ledger and watermark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luceasync.cyext.rings import RingReader, RingWriter
from luceasync.ipc.shared import ALIGN_BYTES, RingLedger, Watermark

BEGIN, END, WORD, FIRST = 4096, 4096 + 20 * ALIGN_BYTES, 64, 9
SIZES = st.integers(1, END - BEGIN - ALIGN_BYTES)


class Lie(Exception):
    """An invalid value from the other end."""


class Hooks:
    def fail(self, words: str) -> None:
        raise Lie(words)


def make() -> tuple[bytearray, RingWriter, RingReader]:
    memory = bytearray(END + ALIGN_BYTES)
    view = memoryview(memory)
    writer = RingWriter(view, BEGIN, END, WORD, FIRST, Lie)
    reader = RingReader(view, BEGIN, END, WORD, FIRST, Lie, BEGIN, END, memory, tuple)
    return memory, writer, reader


@given(st.lists(st.one_of(SIZES, st.integers(-8, -1)), max_size=60))
def test_places_are_those_of_the_ledger_and_bytes_arrive(steps: list[int]) -> None:
    """A positive number sends so many bytes; a negative one frees that held payload."""
    _, writer, reader = make()
    ledger, mark, held = RingLedger(END - BEGIN, FIRST), Watermark(FIRST), []
    for step in steps:
        if step < 0:
            if held:
                payload, sequence = held.pop(step % len(held))
                payload.free()
                ledger.free_until(mark.done(sequence))
            continue
        expected, room = ledger.reserve(step), writer.reserve(step)
        if expected is None or room is None:
            assert expected is room is None
            continue
        assert (room.begin - BEGIN, room.num_bytes, room.sequence) == expected
        content = bytes([room.sequence % 256]) * step
        room.view[:] = content
        told = writer.commit(room)
        payload = reader.accept(told.begin, told.num_bytes, told.sequence, Hooks())
        mark.came(told.sequence)
        held.append((payload, told.sequence))
        assert payload.view(step) == content
    for payload, sequence in held:
        target = bytearray(payload.num_bytes)
        payload.into(memoryview(target))
        assert set(target) == {sequence % 256}


def test_more_payloads_than_a_queue_first_holds_are_freed_in_order() -> None:
    view = memoryview(bytearray(BEGIN + 200 * 2 * ALIGN_BYTES))
    writer = RingWriter(view, BEGIN, len(view), WORD, FIRST, Lie)
    reader = RingReader(view, BEGIN, len(view), WORD, FIRST, Lie, BEGIN, len(view), view, tuple)
    for _ in range(3):
        rooms = [writer.commit(room) for _ in range(200) if (room := writer.reserve(8))]
        assert len(rooms) == 200 and writer.reserve(8) is None
        for room in rooms:
            reader.accept(room.begin, 8, room.sequence, Hooks()).free()


@pytest.mark.parametrize(
    ("begin", "num_bytes", "sequence", "words"),
    [
        (BEGIN, 8, FIRST, "outside of"),
        (END, 8, FIRST, "outside of"),
        (BEGIN + 256, END - BEGIN, FIRST, "outside of"),
        (BEGIN + 257, 8, FIRST, "not at a multiple"),
        (BEGIN + 512, 8, FIRST, "where payload 0 lies"),
        (BEGIN + 256, 8, FIRST - 1, "again"),
    ],
)
def test_impossible_payloads_are_not_accepted(
    begin: int, num_bytes: int, sequence: int, words: str
):
    _, writer, reader = make()
    room = writer.reserve(8)
    assert room is not None
    writer.commit(room)
    with pytest.raises(Lie, match=words):
        reader.accept(begin, num_bytes, sequence, Hooks())


def test_a_payload_overwritten_while_it_is_read_is_reported() -> None:
    memory, writer, reader = make()
    room = writer.reserve(8)
    assert room is not None
    payload = reader.accept(writer.commit(room).begin, 8, FIRST, Hooks())
    memory[BEGIN : BEGIN + 8] = bytes(8)
    with pytest.raises(Lie, match="written while it was read"):
        payload.into(memoryview(bytearray(8)))


def test_a_reader_may_not_claim_what_was_not_sent() -> None:
    memory, writer, _ = make()
    memory[WORD : WORD + 8] = (FIRST + 1).to_bytes(8, "little")
    with pytest.raises(Lie, match="was not sent"):
        writer.reserve(8)


@pytest.mark.parametrize("ring", [(BEGIN, END + 4096, WORD), (BEGIN, END, END + 256), (4, END, 64)])
def test_a_ring_lies_in_its_memory(ring: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a ring at"):
        RingWriter(memoryview(bytearray(END + 8)), *ring, FIRST, Lie)


def test_what_was_closed_is_not_touched() -> None:
    memory, writer, reader = make()
    room = writer.reserve(8)
    assert room is not None
    payload = reader.accept(writer.commit(room).begin, 8, FIRST, Hooks())
    writer.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        writer.reserve(8)
    with pytest.raises(Lie, match="closed"):
        payload.view(8)
    payload.free()
    del writer, reader, payload, room
    memory.extend(b"nobody holds it")
