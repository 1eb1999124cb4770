"""An answer is what was asked for, or the stage has failed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luceasync.errors import StageFailed
from luceasync.ipc.channel import OutgoingPayload, ProcessVitals
from luceasync.ipc.local import LocalChannel
from luceasync.ipc.packets import Message
from luceasync.ipc.supervised import CallDeadlines, CallKind, ProcessLife
from luceasync.pipeline.remote import answers, wire
from luceasync.pipeline.remote.connection import BackendConnection
from luceasync.pipeline.remote.tensors import payload_bytes
from tests.ipc.ends import DEADLINE_S, Ends, make_ends, packet

SPECS = [((4, 8), torch.float32), ((3,), torch.int32)]
EXPECTED_BYTES = payload_bytes(SPECS)
LITTLE_BYTES = 1 << 20
KIND = CallKind("synchronize")

ANSWERS: st.SearchStrategy[Message] = st.one_of(
    st.just(answers.Result()),
    st.builds(answers.NodeRoom, st.booleans(), st.booleans()),
    st.builds(answers.Scalar, st.floats()),
    st.builds(answers.CommandFailure, st.text(max_size=20)),
    st.builds(answers.LoadProgress, st.integers(0, (1 << 62) - 1)),
)
SIZES = st.sampled_from([0, 1, EXPECTED_BYTES - 1, EXPECTED_BYTES, EXPECTED_BYTES + 1, 60_000])


class There:
    """See Started: a process that is this one."""

    def __init__(self, channel: LocalChannel[Any]) -> None:
        self.channel = channel
        self.is_well = True
        self.vitals = ProcessVitals(None, 0)

    def is_alive(self) -> bool:
        return True

    def expect(self, number: int, call: Callable[[bool], None]) -> None:
        raise AssertionError("nothing completes beside the channel")

    def last_words(self) -> str:
        return "its process lives"

    def end(self, grace_s: float, deadline_s: float) -> None:
        self.channel.close()


def linked(transport: str) -> tuple[BackendConnection, Ends]:
    ends = make_ends(transport, messages=(*wire.COMMANDS, *answers.ANSWERS))
    return BackendConnection(
        ProcessLife(There(ends.here), CallDeadlines()), None, partial(StageFailed, 3)
    ), ends


def answered(ends: Ends, message: Message, num_bytes: int) -> None:
    """Answer the last command, at the other end."""
    got = ends.there.receive(DEADLINE_S)
    room = None
    if num_bytes:
        room = ends.there.reserve(num_bytes, DEADLINE_S)
        room.view[:] = bytes(num_bytes)
    ends.there.send(message, room, answers=got.number, deadline_s=DEADLINE_S)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "stream"])
@given(message=ANSWERS, num_bytes=SIZES)
@settings(max_examples=60)
def test_tensors_are_those_that_were_asked_for_or_it_has_failed(transport, message, num_bytes):
    connection, ends = linked(transport)
    try:
        number = connection.send(wire.Synchronize())
        answered(ends, message, num_bytes)
        is_right = type(message) is answers.Result and num_bytes == EXPECTED_BYTES
        tracemalloc.start()
        if is_right:
            assert [
                (tuple(t.shape), t.dtype) for t in connection.result(number, SPECS, KIND)
            ] == SPECS
        else:
            with pytest.raises(StageFailed, match=r"stage 3 of the model failed: .*process lives"):
                connection.result(number, SPECS, KIND)
        assert tracemalloc.get_traced_memory()[1] < LITTLE_BYTES
        assert connection.is_open == is_right
    finally:
        tracemalloc.stop()
        ends.close()


def damaged(body: bytes) -> bytes:
    """The next packet of the session, with a body that is no answer."""
    return packet(b"\x91" + body, answers=1)


@pytest.mark.parametrize("transport", ["shared", "stream"])
@given(content=st.binary(min_size=1, max_size=300) | st.binary(max_size=99).map(damaged))
@settings(max_examples=60)
def test_any_bytes_in_place_of_an_answer_are_a_failure(transport, content):
    connection, ends = linked(transport)
    try:
        number = connection.send(wire.Synchronize())
        ends.there.receive(DEADLINE_S)
        ends.control_there.send(content)
        with pytest.raises(StageFailed):
            connection.answer(number, answers.Result, KIND)
        assert not connection.is_open
        with pytest.raises(StageFailed):
            connection.raise_if_failed()
        connection.send_if_open(wire.ResetLane(0))
    finally:
        ends.close()


class Later:
    """See Event: a copy that has arrived when it is waited for, or when the test says so."""

    def __init__(self) -> None:
        self.is_there = False

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self.is_there = True


def heard(ends: Ends) -> list[Message]:
    """What has come to the other end so far."""
    found = []
    while ends.there.poll(0.0):
        found.append(ends.there.receive(DEADLINE_S).message)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Later]:
    """Of tensors that a device would still compute, in order."""
    begun: list[Later] = []

    def put_soon(room: OutgoingPayload, tensor: torch.Tensor) -> Later:
        begun.append(Later())
        return begun[-1]

    monkeypatch.setattr("luceasync.pipeline.remote.connection.put_soon", put_soon)
    return begun


CHUNKS = [wire.ProposeTokens(1, number, None) for number in (1, 2)]


def test_a_chunk_is_sent_when_it_is_there_and_what_follows_waits_for_its_turn(copies):
    connection, ends = linked("shared")
    connection.send_soon(CHUNKS[0], torch.zeros(4))
    connection.send_soon(wire.ResetLane(0))
    assert heard(ends) == []
    copies[0].is_there = True
    connection.send_soon(wire.ResetLane(1))
    assert heard(ends) == [CHUNKS[0], wire.ResetLane(0), wire.ResetLane(1)]
    connection.send_soon(wire.ResetLane(2))
    assert heard(ends) == [wire.ResetLane(2)]
    ends.close()


def test_a_chunk_is_sent_before_another_one_and_before_a_call(copies):
    connection, ends = linked("shared")
    connection.send_soon(CHUNKS[0], torch.zeros(4))
    connection.send_soon(CHUNKS[1], torch.zeros(4))
    assert [each.is_there for each in copies] == [True, False]
    assert heard(ends) == [CHUNKS[0]]
    connection.send(wire.Synchronize())
    assert heard(ends) == [CHUNKS[1], wire.Synchronize()]
    ends.close()


def test_of_a_process_that_is_gone_no_copy_is_left_under_way(copies):
    connection, ends = linked("shared")
    connection.send_soon(CHUNKS[0], torch.zeros(4))
    connection.close()
    assert copies[0].is_there
    ends.close()
