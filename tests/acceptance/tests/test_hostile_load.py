"""The load drivers do what they say, and count refusals."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.acceptance.hostile.connections import KINDS, Opener
from tests.acceptance.soak import slope_per_minute

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def answering():
    """The port of a listener that answers every client."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with client:
                try:
                    if client.recv(100).endswith(b"\r\n\r\n"):
                        client.sendall(ANSWER)
                        client.recv(1)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def turned(opener: Opener) -> dict[str, int]:
    while len(opener):
        opener.turn(1.0)
    return dict(opener.counts)


def test_each_kind_of_connection_is_counted(answering):
    opener = Opener(answering)
    for kind in KINDS * 2:
        opener.open(kind)
    expected = {"closed": 2, "reset": 2, "left after half a request": 2, "answered": 2}
    assert turned(opener) == expected


def test_who_is_refused_is_counted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    opener = Opener(port)
    for kind in KINDS:
        opener.open(kind)
    counts = turned(opener)
    assert sum(counts.values()) == len(KINDS)
    assert all(what.startswith("refused") for what in counts)


def test_who_gets_no_answer_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opener = Opener(listener.getsockname()[1])
        opener.open("asks")
        opener.turn(1.0)
        opener.give_up()
    assert [what.startswith("refused") for what in opener.counts] == [True]


def test_a_slope_is_that_of_the_line():
    assert slope_per_minute([(m / 10, 400 + 0.7 * m) for m in range(100)]) == pytest.approx(7.0)
