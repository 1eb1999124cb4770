"""Messages cross a channel in order, every wait ends, and invalid packets close it."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from luceasync.errors import ChannelClosed
from luceasync.ipc.local import (
    BRIEF_SPIN_S,
    MAX_ASIDE,
    MAX_CREDIT,
    MAX_SPIN_S,
    PROBE_EVERY,
    SPARE_CORES,
    Deadline,
    WaitPolicy,
)
from luceasync.ipc.packets import MAX_PACKET_BYTES, PayloadSpan, Ping, Pong
from tests.ipc.ends import (
    DEADLINE_S,
    SESSION,
    SOON_S,
    Ends,
    Heard,
    Say,
    make_ends,
    packet,
    send_bytes,
    take_bytes,
)


def test_a_call_is_answered(ends: Ends) -> None:
    number = ends.here.send(Say("hello there"), deadline_s=DEADLINE_S)
    asked = ends.there.receive(DEADLINE_S)
    assert (asked.message, asked.number, asked.payload) == (Say("hello there"), number, None)
    ends.there.send(Heard(2), answers=asked.number, deadline_s=DEADLINE_S)
    assert ends.here.answer(number, Heard, DEADLINE_S).message == Heard(2)


def test_a_channel_that_is_kept_awake_receives_the_same(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luceasync.ipc.local.SPARE_CORES", 1)
    for channel in (ends.here, ends.there):
        channel.keep_awake()
    for _ in range(3):
        number = ends.here.send(Say(), deadline_s=DEADLINE_S)
        assert not ends.here.poll(0)
        asked = ends.there.receive(DEADLINE_S)
        ends.there.send(Heard(), answers=asked.number, deadline_s=DEADLINE_S)
        assert ends.here.answer(number, Heard, DEADLINE_S).message == Heard()
    with pytest.raises(ChannelClosed, match=r"silent for 0\.05 s"):
        ends.here.receive(SOON_S)


def test_answers_find_their_questions_and_other_messages_wait(ends: Ends) -> None:
    numbers = [ends.here.send(Say(), deadline_s=DEADLINE_S) for _ in range(2)]
    asked = [ends.there.receive(DEADLINE_S).number for _ in range(2)]
    ends.there.send(Say("by the way"), deadline_s=DEADLINE_S)
    for number in reversed(asked):
        ends.there.send(Heard(number), answers=number, deadline_s=DEADLINE_S)
    for number in numbers:
        assert ends.here.answer(number, Heard, DEADLINE_S).message == Heard(number)
    assert ends.here.receive(DEADLINE_S).message == Say("by the way")
    assert not ends.here.poll(0)


def test_payloads_arrive_whole_in_both_directions(ends: Ends) -> None:
    for size in (1, 255, 256, 40_000, 3):
        for sender, receiver in ((ends.here, ends.there), (ends.there, ends.here)):
            content = os.urandom(size)
            send_bytes(sender, content)
            assert take_bytes(receiver, size) == content


def test_a_payload_is_read_where_it_lies_until_it_is_freed(ends: Ends) -> None:
    for content in (b"first", b"second", b"third!"):
        send_bytes(ends.here, content)
    payloads = [ends.there.receive(DEADLINE_S).payload for _ in range(3)]
    last, first, second = payloads[2], payloads[0], payloads[1]
    assert last is not None and first is not None and second is not None
    assert bytes(last.view(6)) == b"third!"
    last.free()
    assert bytes(first.view(5)) == b"first"
    second.free()  # unread
    first.free()
    first.free()
    send_bytes(ends.here, b"fourth")
    assert take_bytes(ends.there, 6) == b"fourth"


def test_a_payload_of_another_size_than_computed_closes_the_channel(ends: Ends) -> None:
    send_bytes(ends.here, b"12345")
    payload = ends.there.receive(DEADLINE_S).payload
    assert payload is not None
    target = bytearray(6)
    with pytest.raises(ChannelClosed, match="5 bytes arrived; 6 were expected"):
        payload.into(memoryview(target))
    assert target == bytes(6)
    with pytest.raises(ChannelClosed, match="5 bytes arrived; 6 were expected"):
        ends.there.receive(DEADLINE_S)
    with pytest.raises(ChannelClosed, match="it is gone"):
        ends.here.receive(DEADLINE_S)


def test_both_may_send_more_than_the_sockets_hold_at_once(ends: Ends) -> None:
    content, num_payloads = os.urandom(60_000), 40
    there: list[bytes] = []

    def at_the_other_end() -> None:
        for _ in range(num_payloads):
            send_bytes(ends.there, content)
            there.append(take_bytes(ends.there, len(content)))

    thread = threading.Thread(target=at_the_other_end)
    thread.start()
    here = []
    for _ in range(num_payloads):
        send_bytes(ends.here, content)
        here.append(take_bytes(ends.here, len(content)))
    thread.join()
    assert here == there == [content] * num_payloads


def test_a_long_write_receives_what_the_other_end_writes_meanwhile(ends: Ends) -> None:
    """Both send all of theirs before they read anything: no end may wait for the other one."""

    def send_then_read(channel) -> None:
        for _ in range(400):
            channel.send(Say("x" * 1000), deadline_s=DEADLINE_S)
        for _ in range(400):
            channel.receive(DEADLINE_S)

    thread = threading.Thread(target=send_then_read, args=(ends.there,))
    thread.start()
    send_then_read(ends.here)
    thread.join()


@pytest.mark.parametrize("wait", ["receive", "answer", "ping"])
def test_a_silent_end_closes_the_channel_at_the_deadline(ends: Ends, wait: str) -> None:
    started = time.monotonic()
    with pytest.raises(ChannelClosed, match=r"the child: silent for 0\.05 s"):
        if wait == "receive":
            ends.here.receive(SOON_S)
        elif wait == "answer":
            ends.here.call(Say(), Heard, deadline_s=SOON_S)
        else:
            ends.here.ping(SOON_S)
    assert time.monotonic() - started >= SOON_S
    with pytest.raises(ChannelClosed, match="silent"):
        ends.here.send(Say(), deadline_s=DEADLINE_S)


def test_asking_whether_something_came_closes_nothing(ends: Ends) -> None:
    assert not ends.here.poll(SOON_S)
    ends.there.send(Say(), deadline_s=DEADLINE_S)
    assert ends.here.poll(SOON_S)
    assert ends.here.receive(0).message == Say()


def test_an_end_that_reads_nothing_closes_the_channel_at_the_deadline(ends: Ends) -> None:
    with pytest.raises(ChannelClosed, match=r"waited 0\.05 s for it to (take|read)"):
        for _ in range(10_000):
            send_bytes_soon(ends, bytes(30_000))


def send_bytes_soon(ends: Ends, content: bytes) -> None:
    room = ends.here.reserve(len(content), SOON_S)
    ends.here.send(Say(), room, deadline_s=SOON_S)


def test_an_end_that_waits_gives_signs_of_life(ends: Ends) -> None:
    thread = threading.Thread(target=lambda: ends.there.receive(DEADLINE_S))
    thread.start()
    ends.here.ping(DEADLINE_S)
    ends.here.ping(DEADLINE_S)
    ends.here.send(Say(), deadline_s=DEADLINE_S)
    thread.join()


def test_an_end_that_closes_is_seen_after_what_it_said(ends: Ends) -> None:
    ends.there.send(Say("last"), deadline_s=DEADLINE_S)
    ends.there.close()
    assert ends.here.receive(DEADLINE_S).message == Say("last")
    with pytest.raises(ChannelClosed, match="it is gone"):
        ends.here.receive(DEADLINE_S)


def test_a_process_that_ends_is_seen_though_its_socket_lives_on() -> None:
    died_fd = os.eventfd(0)
    ends = make_ends("shared", died_fd)
    ends.there.send(Say("last"), deadline_s=DEADLINE_S)
    os.eventfd_write(died_fd, 1)
    assert ends.here.receive(DEADLINE_S).message == Say("last")
    with pytest.raises(ChannelClosed, match="its process has ended"):
        ends.here.receive(DEADLINE_S)
    ends.close()
    os.close(died_fd)


def test_a_closed_channel_says_why_for_ever(ends: Ends) -> None:
    ends.here.close("enough")
    ends.here.close("again")
    assert ends.here.closed == "the child: enough"
    for act in (lambda: ends.here.receive(1), lambda: ends.here.reserve(1, 1)):
        with pytest.raises(ChannelClosed, match="the child: enough"):
            act()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b"\x91", "truncated"),
        (packet(Say(), number=2), "packet 2 arrived; 1 was expected"),
        (packet(Say())[:-2], "truncated"),
        (bytes(MAX_PACKET_BYTES + 1), f"a packet of {MAX_PACKET_BYTES + 1} bytes; the limit"),
        (packet(Ping(), payload=PayloadSpan(69_888, 10, SESSION)), "payload"),
    ],
)
def test_a_packet_that_cannot_be_believed_closes_the_channel(
    ends: Ends, packet: bytes, words: str
) -> None:
    ends.control_there.send(packet)
    with pytest.raises(ChannelClosed, match=words):
        ends.here.receive(DEADLINE_S)
    assert ends.here.closed is not None


def test_an_answer_of_another_kind_closes_the_channel(ends: Ends) -> None:
    number = ends.here.send(Say(), deadline_s=DEADLINE_S)
    ends.there.send(Say(), answers=number, deadline_s=DEADLINE_S)
    with pytest.raises(ChannelClosed, match="packet 1 with Say; Heard was expected"):
        ends.here.answer(number, Heard, DEADLINE_S)


def test_pings_that_cannot_be_answered_close_the_channel(ends: Ends) -> None:
    ends.control_there.setblocking(False)
    with pytest.raises((ChannelClosed, BlockingIOError)):
        for number in range(1, 100_000):
            ends.control_there.send(packet(Ping(), number=number))
            ends.here.poll(0)
    assert "more pings than can be answered" in str(ends.here.closed)


def test_messages_that_were_not_asked_for_are_bounded(ends: Ends) -> None:
    ends.control_there.setblocking(True)

    def send_on() -> None:
        try:
            for number in range(1, 10 * MAX_ASIDE):
                ends.control_there.send(packet(Say(), number=number))
        except OSError:  # closed, as it should be
            pass

    thread = threading.Thread(target=send_on)
    thread.start()
    with pytest.raises(ChannelClosed, match=f"more than {MAX_ASIDE} messages that were not asked"):
        ends.here.call(Say(), Heard, deadline_s=DEADLINE_S)
    thread.join()


def test_traffic_is_counted(ends: Ends) -> None:
    send_bytes(ends.here, bytes(1000))
    take_bytes(ends.there, 1000)
    assert ends.here.traffic.payload_bytes_sent == 1000
    assert ends.there.traffic.payload_bytes_received == 1000
    assert ends.here.traffic.packets_sent == ends.there.traffic.packets_received == 1
    sent_bytes = ends.here.traffic.packet_bytes_sent
    assert 0 < sent_bytes == ends.there.traffic.packet_bytes_received < 64


def test_a_device_registers_payload_memory_until_the_channel_closes(ends: Ends) -> None:
    pinned: list[int] = []

    def register(view: memoryview):
        pinned.append(view.nbytes)
        return lambda: pinned.remove(view.nbytes)

    ends.here.register(register)
    assert sum(pinned) >= 2 * (1 << 16)
    ends.close()
    assert pinned == []


def test_a_ping_is_told_from_a_pong(ends: Ends) -> None:
    ends.here.send(Ping(), deadline_s=DEADLINE_S)
    assert not ends.there.poll(0)
    assert ends.here.receive(DEADLINE_S).message == Pong()


def test_no_descriptor_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    for transport in ("shared", "stream"):
        ends = make_ends(transport)
        send_bytes(ends.here, b"unread")
        ends.there.receive(DEADLINE_S)
        ends.close()
    assert os.listdir("/proc/self/fd") == before
    assert socket.socketpair  # the sockets were closed, and warned of nothing


def test_short_waits_are_spun_for() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    for _ in range(3):
        patience.waited(MAX_SPIN_S / 2)
        assert patience.spin_s == MAX_SPIN_S


def test_long_waits_are_slept_for_but_for_a_probe_now_and_then() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    spins = []
    for _ in range(10 * PROBE_EVERY):
        patience.waited(2 * MAX_SPIN_S)
        spins.append(patience.spin_s)
    assert sum(each > 0 for each in spins[MAX_CREDIT - 1 :]) == 10


def test_one_that_comes_late_now_and_then_ends_no_spinning() -> None:
    patience = WaitPolicy.brief(2)
    for _ in range(10):
        for _ in range(MAX_CREDIT - 1):
            patience.waited(2 * BRIEF_SPIN_S)
            assert patience.spin_s == BRIEF_SPIN_S
        for _ in range(MAX_CREDIT - 1):
            patience.waited(BRIEF_SPIN_S / 2)
    for _ in range(MAX_CREDIT):
        patience.waited(2 * BRIEF_SPIN_S)
    assert patience.spin_s == 0


def test_a_probe_that_pays_brings_spinning_back() -> None:
    patience = WaitPolicy.from_step_to_step(SPARE_CORES)
    for _ in range(MAX_CREDIT):
        patience.waited(2 * MAX_SPIN_S)
    assert patience.spin_s == 0
    patience.waited(1e-6)
    assert patience.spin_s == MAX_SPIN_S


def test_few_cores_are_kept_for_short_answers_alone() -> None:
    assert WaitPolicy.from_step_to_step(SPARE_CORES - 1).spin_s == BRIEF_SPIN_S
    assert WaitPolicy.from_step_to_step(1).spin_s == WaitPolicy.brief(1).spin_s == 0


def test_where_brief_spins_fail_short_waits_asleep_do_not_bring_them_back() -> None:
    patience = WaitPolicy.brief(2)
    patience.waited(BRIEF_SPIN_S / 2)
    assert patience.spin_s == BRIEF_SPIN_S
    spins = []
    for _ in range(MAX_CREDIT):
        patience.waited(2 * BRIEF_SPIN_S)
    for _ in range(10 * PROBE_EVERY):
        spins.append(patience.spin_s)
        patience.waited(2 * BRIEF_SPIN_S if patience.spin_s else BRIEF_SPIN_S / 10)
    assert sum(each > 0 for each in spins) == 10


def test_a_deadline_passes() -> None:
    assert Deadline(0).is_past
    assert Deadline(0).left_ms() == 0
    soon = Deadline(100)
    assert not soon.is_past
    assert 99_000 < soon.left_ms() <= 100_000


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_moment_is_no_deadline(seconds: float) -> None:
    with pytest.raises(ValueError, match="a deadline in"):
        Deadline(seconds)
