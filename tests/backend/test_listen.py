"""Stages on another machine compute what one process does; whatever the wire does, a stage is away
or back, and nobody else gets in.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from luceasync import __version__
from luceasync.backend.listen import (
    LINK_PROTOCOL,
    MAX_STRANGERS,
    Opened,
    Opening,
    serve_host,
)
from luceasync.errors import ChannelClosed, ConfigError, PlacementError, StageFailed
from luceasync.host_cache.nodes import Span
from luceasync.ipc.certificates import make_pair, tls_context
from luceasync.ipc.launcher import LocalLauncher
from luceasync.ipc.supervised import Heartbeat
from luceasync.ipc.tcp import (
    HEADER,
    OPENING,
    Address,
    dial,
    is_reachable,
    receive_opening,
    send_opening,
)
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.remote import fleet, wire
from luceasync.pipeline.remote.discovery import choose_processes, describe_devices
from luceasync.pipeline.remote.fleet import Fleet
from tests.backend.machine import Machine, is_closed_within
from tests.children import children
from tests.later import later
from tests.processes import backend_program
from tests.test_stages import SPAN, life, turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_family,
    pytest.mark.usefixtures("forked_backends"),
]

NODE_BYTES = 16 << 20
SOON_S = 60.0  # on loaded cores
TAPS = (0, 3)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return backend_program(tmp_path_factory.mktemp("program"))


@pytest.fixture
def box2(program: Path, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path, program, ["hip:0=cpu:0", "hip:1=cpu:1"])
    yield machine
    machine.close()


class Split:
    """A model over this machine and another one."""

    def __init__(self, model_dir: Path, machine: Machine, devices: str) -> None:
        placement = machine.placement(devices)
        if "box2" not in devices:
            placement = replace(placement, ipc_bins=())
        chosen = choose_processes(
            placement.devices, placement, lambda name: name.startswith("cpu"), machine.program
        )
        offers = [
            replace(offer_of("cpu:0", 2**33), name=name, process=process)
            for name, process in zip(placement.devices, chosen.of_devices, strict=True)
        ]
        plan = make_plan(
            read_spec(model_dir),
            offers,
            precision=Precision.of("fp32"),
            weights=None,
            parallel=4,
            max_ctx_tokens=256,
            prefill_chunk_tokens=None,
            verify_rows=[6],
        )
        self.fleet = Fleet(ModelFiles(model_dir), plan, chosen.programs, "auto", NODE_BYTES)
        self.backend = LayerSplitBackend.open(
            ModelFiles(model_dir), plan, taps=TAPS, open_remote=self.fleet.open_stage
        )

    def close(self) -> None:
        self.backend.close()
        self.fleet.close()


@pytest.fixture
def split(tiny_dir: Path, box2: Machine) -> Iterator:
    opened: list[Split] = []

    def open_split(devices: str = "cpu:0,box2/hip:0,box2/hip:1") -> LayerSplitBackend:
        opened.append(Split(tiny_dir, box2, devices))
        return opened[-1].backend

    open_split.opened = opened
    yield open_split
    for each in opened:
        each.close()


def processes() -> set[int]:
    """The processes of the machine there."""
    return {child.pid for child in children("--wait")}


def wait_until(is_so, words: str) -> None:
    until_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < until_s, words
        time.sleep(0.01)


@pytest.mark.parametrize("devices", ["cpu:0,box2/hip:0,box2/hip:1", "box2/hip:0,cpu:0,box2/hip:1"])
def test_the_numbers_are_those_of_one_process(split, devices: str):
    here, there = split("cpu:0,cpu:1,cpu:2"), split(devices)
    assert torch.equal(life(there), life(here))
    assert torch.equal(turn(there), turn(here))
    life(here), life(there)
    for source, target in ((here, there), (there, here)):
        target.nodes.adopt("other", SPAN, source.nodes.export("n"))
        assert torch.equal(life(target, "other"), life(target, "n"))


def test_two_chunks_are_under_way_beside_the_one_that_is_computed_here(split, box2: Machine):
    backend = split()
    life(backend)
    box2.wire.is_cut = True
    chunks = [(i * 64, range(3, 67)) for i in range(4)]
    for begin, tokens in chunks[:2]:
        backend.prefill(0, begin, tokens, project=False)  # nothing is waited for
    third = threading.Thread(
        target=torch.inference_mode()(backend.prefill),
        args=(0, *chunks[2]),
        kwargs={"project": False},
    )
    third.start()
    third.join(0.3)
    assert third.is_alive()
    box2.wire.mend()
    third.join(SOON_S)
    assert not third.is_alive()
    found = backend.prefill(0, *chunks[3], project=True).clone()
    one = split("cpu:0,cpu:1,cpu:2")
    for begin, tokens in chunks[:3]:
        one.prefill(0, begin, tokens, project=False)
    assert torch.equal(found, one.prefill(0, *chunks[3], project=True))


def test_a_save_is_not_waited_for_while_a_chunk_is_under_way(split, box2: Machine):
    here, there = split("cpu:0,cpu:1,cpu:2"), split()
    here.prefill(0, 0, range(3, 67), project=False)
    here.nodes.save(0, "new", Span(0, 64, with_state=True)).wait()
    box2.wire.is_cut = True
    there.prefill(0, 0, range(3, 67), project=False)
    saved = there.nodes.save(0, "new", Span(0, 64, with_state=True))
    assert not saved.is_done
    box2.wire.mend()
    there.prefill(0, 64, range(3, 67), project=False)  # what comes later is not in it
    saved.wait()
    tensors, others = (backend.nodes.export("new") for backend in (here, there))
    assert {*tensors} and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_process_that_dies_there_is_a_failed_stage_and_comes_back(split, box2: Machine):
    backend = split()
    expected = life(backend)
    [pid] = processes()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StageFailed, match=r"box2: its process there was ended by SIGKILL"):
        for _ in range(100):
            backend.prefill(0, 0, [3, 4, 5], project=True)
    lost: list = []
    assert backend.restart_failed(lost.extend)
    assert lost == ["n"]  # it lay in the memory of the process there
    assert torch.equal(life(backend), expected)
    assert box2.sessions() == 1 and processes() - {pid} == processes()


@pytest.mark.parametrize("breaks", [True, False])
def test_a_cut_link_is_a_failed_stage_until_it_is_mended(
    split, box2: Machine, monkeypatch, breaks: bool
):
    """`breaks`: both ends are told. Otherwise the machine there still runs the process that was
    before, when the new one is asked for.
    """
    monkeypatch.setattr(fleet, "HEARTBEAT", Heartbeat(0.1, 3.0))
    backend = split()
    expected = life(backend)
    before = processes()
    if breaks:
        box2.wire.break_all()
    else:
        box2.wire.is_cut = True
    with pytest.raises(StageFailed, match=r"closed the link|no sign of life for 3 s"):
        while True:
            backend.prefill(0, 0, [3, 4, 5], project=True)
    began_s = time.monotonic()
    with later(0.2, box2.wire.mend):
        assert backend.restart_failed(lambda nodes: None)
    assert time.monotonic() - began_s < SOON_S
    assert torch.equal(life(backend), expected)
    wait_until(lambda: not processes() & before, "the process before has not been ended")
    assert box2.sessions() == 1


def test_a_link_that_breaks_again_and_again_is_soon_tried_again(split, monkeypatch):
    split()
    [stage] = split.opened[-1].fleet._stages.values()

    def breaks(*_) -> None:
        raise ChannelClosed("the link to box2 broke")

    monkeypatch.setattr(LocalLauncher, "launch", breaks)
    for _ in range(8):
        with pytest.raises(StageFailed, match="the link to box2 broke"):
            stage.process.open(wire.Synchronize())
    told = stage.process.status.detail
    assert re.search(r"\(failure 8 in a row\) and will be restarted (now|in [12] s)", told), told


def test_a_slow_wire_changes_no_number(split, box2: Machine):
    box2.wire.delay_s = 0.002
    assert torch.equal(life(split()), life(split("cpu:0,cpu:1,cpu:2")))


def test_the_process_there_ends_with_the_server(split, box2: Machine):
    split()
    assert len(processes()) == 1
    split.opened.pop().close()
    wait_until(lambda: not processes() and not box2.sessions(), "it runs on")


def test_a_process_waits_for_the_next_stage(tiny_dir: Path, program: Path, tmp_path: Path):
    machine = Machine(tmp_path, program, ["hip:0=cpu:0"], keeps_one=True)
    try:
        wait_until(lambda: len(processes()) == 1, "none waits")
        before = processes()
        opened = Split(tiny_dir, machine, "cpu:0,box2/hip:0")
        wait_until(lambda: len(processes()) == 2, "no other one waits")
        assert before < processes()  # the first one runs the layers
        opened.close()
        wait_until(lambda: len(processes()) == 1 and not before & processes(), "it runs on")
    finally:
        machine.close()
    assert not processes()


def test_another_model_there_is_refused_with_both_digests(
    tiny_dir: Path, program: Path, tmp_path: Path
):
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_dir.iterdir():
        content = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            content[-1] ^= 1
        (other / path.name).write_bytes(content)
        os.utime(other / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    machine = Machine(tmp_path, program, ["hip:0=cpu:0"], model_dir=other)
    try:
        with pytest.raises(StageFailed, match=r"weights: [0-9a-f]{32} here, [0-9a-f]{32} there"):
            Split(tiny_dir, machine, "cpu:0,box2/hip:0")
    finally:
        machine.close()


# --- who gets in ----------------------------------------------------------------------------------


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not let in: .*SSL"),
        (b"\x16\x03\x01\x00\x05hello", "not let in: .*SSL"),
        (b"\x16", "not let in: "),
    ],
)
def test_a_stranger_is_one_line_and_no_process(box2: Machine, caplog, said: bytes, words: str):
    before = processes()
    with socket.create_connection(("127.0.0.1", box2.wire.port)) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert is_closed_within(sock, SOON_S)
    wait_until(lambda: warnings_in(caplog), "nothing was logged")
    [line] = warnings_in(caplog)
    assert pytest.raises(AssertionError, match=words).matches(AssertionError(line))
    assert "\n" not in line and processes() == before and box2.sessions() == 0


def test_a_server_that_looks_whether_it_can_be_reached_is_no_stranger(box2: Machine, caplog):
    caplog.set_level(logging.INFO)
    host, port = box2.listener._sock.getsockname()
    assert is_reachable(Address(host, port), SOON_S)
    wait_until(lambda: caplog.records, "nothing was logged")
    [record] = caplog.records
    assert record.levelno == logging.INFO and "closed without a word" in record.getMessage()
    assert not box2.sessions()


def test_a_model_that_is_not_there_is_an_error_before_anyone_asks(box2: Machine):
    here = Address("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"^--model-dir /missing: there is no such"):
        serve_host(here, box2.box1, [], Path("/missing"))


def test_a_file_of_the_pair_that_others_may_read_is_named(box2: Machine, caplog):
    box2.box1.chmod(0o644)
    taken = Address("127.0.0.1", box2.wire.port)
    with pytest.raises(ConfigError, match=rf"^--listen {taken}: Address already in use$"):
        serve_host(taken, box2.box1, [], None)
    assert f"{box2.box1} holds a private key and is accessible to other users" in caplog.text


def test_one_that_says_nothing_is_dropped(box2: Machine, caplog, monkeypatch):
    monkeypatch.setattr("luceasync.backend.listen.HANDSHAKE_S", 0.1)
    with socket.create_connection(("127.0.0.1", box2.wire.port)) as sock:
        assert is_closed_within(sock, SOON_S)
    wait_until(lambda: warnings_in(caplog), "nothing was logged")
    assert "timed out" in warnings_in(caplog)[0]


def test_a_server_gets_in_beside_a_flood_of_connections_that_say_nothing(box2: Machine, caplog):
    address = box2.listener._sock.getsockname()
    with ExitStack() as closing:
        flood = [
            closing.enter_context(socket.create_connection(address))
            for _ in range(MAX_STRANGERS + 8)
        ]
        assert is_closed_within(flood[0], SOON_S)
        [offer] = describe_devices(box2.program_for(), ["box2/hip:0"])
    assert offer.name == "box2/hip:0"
    assert f"closed: more than {MAX_STRANGERS} others say nothing" in warnings_in(caplog)[0]


def test_an_opening_that_comes_byte_by_byte_has_one_deadline(box2: Machine, caplog, monkeypatch):
    monkeypatch.setattr("luceasync.backend.listen.HANDSHAKE_S", 0.5)
    context = tls_context(box2.box1, "--tls", is_server=False)
    with dial(Address("127.0.0.1", box2.wire.port), context, "box2", SOON_S) as tls:
        tls.sendall(HEADER.pack(OPENING, 1000))
        until_s = time.monotonic() + SOON_S
        while not is_closed_within(tls, 0.1):
            assert time.monotonic() < until_s, "it still listens"
            with suppress(OSError):  # it has just been closed
                tls.sendall(b"\0")
    assert "timed out" in warnings_in(caplog)[0]


@pytest.mark.parametrize(
    ("who", "name", "words"),
    [
        ("stranger", "box2", "its certificate does not match: it is of another authority"),
        ("box1", "box3", "its certificate does not match: Hostname mismatch"),
    ],
)
def test_a_certificate_that_does_not_match_is_one_line(
    box2: Machine, who: str, name: str, words: str
):
    with pytest.raises(PlacementError, match=words) as caught:
        describe_devices(box2.program_for(getattr(box2, who), name), [f"{name}/hip:0"])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--target-shard-ipc-bin hip@{name}=tls://127.0.0.1:")


def test_the_listener_lets_no_stranger_in_whatever_that_believes(box2: Machine, caplog):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(box2.stranger)
    tls = dial(Address("127.0.0.1", box2.wire.port), context, "box2", SOON_S)
    with tls, pytest.raises(ssl.SSLError):
        send_opening(tls, b"")
        receive_opening(tls)
    wait_until(lambda: warnings_in(caplog), "nothing was logged")
    assert box2.sessions() == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\xc1", "does not speak protocol 1 of luceasync"),
        (b"\x83\xa8protocol\x02", "does not speak protocol 1 of luceasync"),
    ],
)
def test_an_old_protocol_is_refused_in_words(box2: Machine, caplog, said: bytes, words: str):
    context = tls_context(box2.box1, "--tls", is_server=False)
    with dial(Address("127.0.0.1", box2.wire.port), context, "box2", SOON_S) as tls:
        send_opening(tls, said)
        answer = msgspec.msgpack.decode(receive_opening(tls), type=Opened)
    assert words in answer.refusal
    assert words in warnings_in(caplog)[0] and box2.sessions() == 0


@pytest.mark.parametrize(
    ("sizes", "written", "words"),
    [
        ((1 << 60, 4096), 0, f"a ring of {1 << 60} bytes; at most"),
        ((4096, 4096), 2, "rings 2 and 1 of 2"),
    ],
)
def test_rings_that_are_not_there_are_refused(
    box2: Machine, sizes: tuple[int, int], written: int, words: str
):
    context = tls_context(box2.box1, "--tls", is_server=False)
    asked = Opening(LINK_PROTOCOL, __version__, "here", 1, sizes, written, 1, "", "fp32", "")
    with dial(Address("127.0.0.1", box2.wire.port), context, "box2", SOON_S) as tls:
        send_opening(tls, msgspec.msgpack.encode(asked))
        answer = msgspec.msgpack.decode(receive_opening(tls), type=Opened)
    assert words in answer.refusal and box2.sessions() == 0


def test_one_server_is_served_at_a_time(split, box2: Machine, tmp_path: Path, caplog):
    split()
    [box3] = make_pair(tmp_path / "machines", ["box3"])
    with pytest.raises(PlacementError, match=r"it serves box1 now"):
        asked = box2.program_for(box3)
        patient = replace(asked, arguments=(*asked.arguments, "--patience", "0.5"))
        describe_devices(patient, ["box2/hip:0"])  # which tries again until then
    assert len([line for line in warnings_in(caplog) if "it serves box1 now" in line]) == 1
    [offer] = describe_devices(box2.program_for(), ["box2/hip:0"])  # box1 may have more stages
    assert offer.name == "box2/hip:0"


def test_a_machine_that_cannot_be_reached_is_one_line(box2: Machine):
    box2.close()
    asked = box2.program_for()
    program = replace(asked, arguments=(*asked.arguments, "--patience", "0.1"))
    with pytest.raises(
        PlacementError, match=r"box2 \(127.0.0.1:\d+\): cannot be reached"
    ) as caught:
        describe_devices(program, ["box2/hip:0"])
    assert "\n" not in str(caught.value)
