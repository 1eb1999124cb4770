"""A link carries every socket whole and in order, none waits for another, and what is not allowed
ends it.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from luceasync.ipc import tcp
from luceasync.ipc.certificates import make_pair, tls_context
from luceasync.ipc.tcp import WINDOW_BYTES, Carried, Link, LinkEnd, frame

DEADLINE_S = 10.0
BYTES = (Carried.PAYLOADS, Carried.LOG)


class LinkedEnds:
    """Both ends of a link in threads, and the far sides of the sockets that they carry."""

    def __init__(self, box1: Path, box2: Path) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        accepted: list = []

        def accept() -> None:
            context = tls_context(box2, "--tls", is_server=True)
            accepted.append(context.wrap_socket(server.accept()[0], server_side=True))

        thread = threading.Thread(target=accept)
        thread.start()
        context = tls_context(box1, "--tls", is_server=False)
        self.raw = tcp.dial(server.getsockname(), context, "box2", DEADLINE_S)
        thread.join()
        server.close()
        self.here, mine = _sockets()
        self.there, its = _sockets()
        self.link, self.far = Link(self.raw, mine, "box2"), Link(accepted[0], its, "box1")
        self.ends: dict[str, LinkEnd] = {}
        self._threads = [
            threading.Thread(target=self._run, args=pair)
            for pair in (("here", self.link), ("there", self.far))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, name: str, link: Link) -> None:
        self.ends[name] = link.run()
        link.finish(f"words of {name}")

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def close(self) -> None:
        for sock in (*self.here.values(), *self.there.values()):
            sock.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(DEADLINE_S)


def _sockets() -> tuple[dict[Carried, socket.socket], dict[Carried, socket.socket]]:
    ours, its = {}, {}
    for what in Carried:
        kind = socket.SOCK_STREAM if what in BYTES else socket.SOCK_SEQPACKET
        ours[what], its[what] = socket.socketpair(socket.AF_UNIX, kind)
        ours[what].settimeout(DEADLINE_S)
    return ours, its


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_pair(tmp_path_factory.mktemp("machines"), ["box1", "box2"])


@pytest.fixture
def ends(boxes: list[Path]) -> Iterator[LinkedEnds]:
    made = LinkedEnds(*boxes)
    yield made
    made.close()


def test_packets_and_bytes_arrive_whole_and_in_order_both_ways(ends: LinkedEnds) -> None:
    ends.start()
    packets = [random.randbytes(random.randint(1, 60_000)) for _ in range(40)]
    content = random.randbytes(3 << 20)
    sending = [
        threading.Thread(target=each[Carried.PAYLOADS].sendall, args=(content,))
        for each in (ends.here, ends.there)
    ]
    for thread in sending:
        thread.start()
    for packet in packets:
        for source, target in ((ends.here, ends.there), (ends.there, ends.here)):
            source[Carried.CONTROL].send(packet)
            assert target[Carried.CONTROL].recv(1 << 17) == packet
    for target in (ends.here, ends.there):
        found = bytearray()
        while len(found) < len(content):
            found += target[Carried.PAYLOADS].recv(1 << 20)
        assert found == content
    for thread in sending:
        thread.join()


def test_a_sign_of_life_does_not_wait_for_a_payload_that_nobody_reads(
    ends: LinkedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in (ends.link, ends.far):
        branch = link._branches[Carried.PAYLOADS]
        branch.window_bytes = branch.credit_bytes = 1 << 20
    ends.start()
    sending = ends.here[Carried.PAYLOADS]
    sending.setblocking(False)
    num_sent, idle = 0, 0
    while idle < 20:  # until nothing is taken any more
        try:
            num_sent += sending.send(bytes(1 << 16))
            idle = 0
        except BlockingIOError:
            idle += 1
            time.sleep(0.005)
    assert num_sent < 4 << 20  # the window, and what sockets hold
    for number in range(2000):
        ends.here[Carried.PULSE].send(b"%d" % number)
        assert ends.there[Carried.PULSE].recv(64) == b"%d" % number
    num_read = 0
    while num_read < num_sent:
        num_read += len(ends.there[Carried.PAYLOADS].recv(1 << 20))
    sending.send(b"more")
    assert ends.there[Carried.PAYLOADS].recv(64) == b"more"


def test_the_last_words_and_lines_of_a_process_come_through(ends: LinkedEnds) -> None:
    ends.start()
    ends.there[Carried.CONTROL].send(b"the last packet")
    ends.there[Carried.LOG].sendall(b"the last line\n")
    for sock in ends.there.values():  # it has ended
        sock.close()
    ends.wait()
    assert ends.ends["there"].is_local
    assert ends.ends["here"] == LinkEnd("words of there")
    assert ends.here[Carried.CONTROL].recv(64) == b"the last packet"
    assert ends.here[Carried.LOG].recv(64) == b"the last line\n"


def test_a_link_that_is_stopped_or_closed_ends_both_ends(ends: LinkedEnds) -> None:
    ends.start()
    ends.link.stop()
    ends.wait()
    assert ends.ends["here"] == LinkEnd("another connection took its place")
    assert ends.ends["there"] == LinkEnd("box1 closed the link")
    assert ends.there[Carried.CONTROL].recv(64) == b""


def test_silence_ends_it_and_beats_do_not(
    boxes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "BEAT_S", 0.05)
    monkeypatch.setattr(tcp, "SILENCE_S", 0.4)
    ends = LinkedEnds(*boxes)
    ends.start()
    time.sleep(0.8)
    assert ends.ends == {}
    ends.close()
    ends.wait()

    ends = LinkedEnds(*boxes)
    silent = threading.Thread(target=ends._run, args=("there", ends.far))
    silent.start()  # the other end does not run
    silent.join(DEADLINE_S)
    assert ends.ends == {"there": LinkEnd("no sign of box1 for 0.4 s")}
    ends.link.close()
    ends.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (frame(99), "a frame of kind 99"),
        (frame(9), "a frame of kind 9"),
        (b"\x00\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (frame(Carried.CONTROL), "0 bytes of CONTROL, beyond its window"),
        (frame(tcp.IS_CREDIT + Carried.CONTROL, b"\0"), "a credit of 1 bytes"),
        (
            frame(tcp.IS_CREDIT + Carried.CONTROL, tcp.CREDIT.pack(9)),
            f"credit for {WINDOW_BYTES[Carried.CONTROL] + 9} bytes of CONTROL",
        ),
    ],
)
def test_what_is_not_allowed_ends_it(ends: LinkedEnds, sent: bytes, words: str) -> None:
    ends.raw.setblocking(True)
    ends.raw.sendall(sent)
    ends.raw.setblocking(False)
    ends.start()
    ends.wait()
    assert words in ends.ends["there"].words


def test_more_than_the_window_ends_it(ends: LinkedEnds) -> None:
    ends.far._branches[Carried.LOG].window_bytes = 1 << 10
    ends.there[Carried.LOG].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    ends.start()
    with pytest.raises(OSError):
        while True:
            ends.here[Carried.LOG].sendall(bytes(1 << 16))
    ends.wait()
    assert "LOG, beyond its window" in ends.ends["there"].words
