"""A started process inherits what it was given and nothing else, and never outlives its parent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luceasync.errors import ChannelClosed, ConfigError, PeerMismatch, Unavailable
from luceasync.ipc import launcher as launcher_module
from luceasync.ipc.channel import Statement, greet
from luceasync.ipc.launcher import (
    LocalLauncher,
    LocalProcess,
    Program,
    child_environment,
    runs_our_python,
)
from luceasync.ipc.memory import SealedMemory
from luceasync.ipc.supervised import Heartbeat
from luceasync.ipc.wiring import VARIABLE, Rings, Wiring, open_rings
from tests.children import children, runs
from tests.ipc.echo_child import Ask, Tell
from tests.later import later

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("echo_child.py")
RING_BYTES = (1 << 20, 1 << 20)
DEADLINE_S = 30.0

Launch = Callable[..., LocalProcess]


@pytest.fixture(params=["shared", "stream"])
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Starts the child in a mode; in the end no process and no descriptor is left."""
    before = descriptors()
    rings = open_rings(request.param, RING_BYTES)
    launchers = []

    def start(mode: str = "echo", **more) -> LocalProcess:
        program = Program(
            Path(sys.executable),
            "the child",
            RING_BYTES,
            rings=rings,
            environment={"PYTHONPATH": str(ROOT)},
            **more,
        )
        launchers.append(LocalLauncher(program, lambda line: None))
        return launchers[-1].launch([str(CHILD), mode], (Tell,))

    yield start
    for each in launchers:
        each.close()
    if rings is not None:
        rings.close()
    assert descriptors() == before


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


def greeted(started: LocalProcess) -> LocalProcess:
    greet(started.channel, Statement(), DEADLINE_S)
    return started


def ask(started: LocalProcess, what: str) -> str:
    return started.channel.call(Ask(what), Tell, deadline_s=DEADLINE_S).message.words


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_process_answers_and_ends_with_its_channel(launch: Launch) -> None:
    started = greeted(launch())
    assert ask(started, "hello") == "hello"
    room = started.channel.reserve(100_000, DEADLINE_S)
    room.view[:] = content = os.urandom(100_000)
    got = started.channel.call(Ask(), Tell, room, deadline_s=DEADLINE_S)
    assert got.payload is not None
    assert bytes(got.payload.view(100_000)) == content
    got.payload.free()
    started.end(DEADLINE_S, DEADLINE_S)
    assert not started.is_alive()
    assert "status 1" in started.last_words()  # it only saw that this end is gone
    assert "it is gone" in started.last_words()
    started.end(0, 0)


def test_it_has_the_descriptors_it_was_given_and_no_other(launch: Launch) -> None:
    with open(__file__) as mine:
        os.set_inheritable(mine.fileno(), True)
        found = ask(greeted(launch()), "descriptors").split()
    assert len(found) <= 3 + 2 + 3 + 1  # standard, control and pulse, stream or memory, listing


def test_ctrl_c_at_a_terminal_is_for_its_parent_alone(launch: Launch) -> None:
    leads_group, parent, _ = ask(greeted(launch()), "signals").split(maxsplit=2)
    assert (leads_group, parent) == ("True", str(os.getpid()))


def test_its_variables_are_those_of_its_own_environment(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    names = set(ask(greeted(launch()), "environment").split())
    assert {"OMP_WAIT_POLICY", "PYTHONPATH", "PATH"} <= names
    assert not names & {"LD_LIBRARY_PATH", "VIRTUAL_ENV", VARIABLE}


def test_what_is_added_to_the_environment_wins() -> None:
    wiring = Wiring(session=1, control=3, ring_bytes=(), written=1, read=0)
    own = {"PATH": "/bin", "PYTHONHOME": "/x", "OMP_WAIT_POLICY": "active"}
    made = child_environment(own, {"OMP_WAIT_POLICY": "mine", VARIABLE: "mine"}, wiring)
    assert made.pop(VARIABLE) != "mine"
    assert made == {"PATH": "/bin", "OMP_WAIT_POLICY": "mine"}


@pytest.mark.parametrize(
    ("first_line", "is_passed"),
    [
        (f"#!{sys.executable}", True),
        ("#!/other/bin/python", False),
        (f"#!/bin/sh {sys.executable}", False),
        ("\x7fELF", False),
    ],
)
def test_packages_found_by_a_variable_are_found_by_programs_of_the_same_python(
    tmp_path: Path, first_line: str, is_passed: bool
) -> None:
    program = tmp_path / "program"
    program.write_text(f"{first_line}\nimport luceasync\n")
    wiring = Wiring(session=1, control=3, ring_bytes=(), written=1, read=0)
    own = {"PYTHONPATH": "/packages", "PYTHONHOME": "/x"}
    made = child_environment(own, {}, wiring, same_python=runs_our_python(program))
    assert (made.get("PYTHONPATH") == "/packages") is is_passed
    assert "PYTHONHOME" not in made


def test_memory_that_is_lent_is_the_same_memory(launch: Launch) -> None:
    nodes = SealedMemory.create("nodes", 4096)
    ask(greeted(launch(lent={"nodes": nodes})), "lent")
    assert bytes(nodes.view[:5]) == b"child"
    nodes.close()


def test_another_version_is_refused_before_anything_else(launch: Launch) -> None:
    with pytest.raises(PeerMismatch, match=r"luceasync 0\.0 here, .* there"):
        greet(launch("version").channel, Statement(), DEADLINE_S)


def test_a_kill_is_noticed_at_once_and_told_with_the_last_lines(launch: Launch) -> None:
    started = greeted(launch())
    with (
        later(0.1, os.kill, started.child.pid, signal.SIGKILL),
        pytest.raises(ChannelClosed, match=r"it is gone|has ended|reset"),
    ):
        started.channel.receive(DEADLINE_S)
    assert started.last_words() == "its process was ended by SIGKILL"


def test_how_it_ended_is_told_with_its_last_lines(launch: Launch) -> None:
    started = greeted(launch())
    with pytest.raises(ChannelClosed):
        ask(started, "exit 3")
    words = "its process ended with status 3; its last lines:\n  going now"
    assert started.last_words() == words
    started.end(0, DEADLINE_S)
    assert started.last_words() == words


def test_a_log_that_is_not_read_stops_nothing(launch: Launch) -> None:
    started = greeted(launch("loud"))
    until(lambda: "line 199999" in started.last_words())
    assert started.last_words().count("\n") == 40


def test_a_stopped_process_is_noticed_by_its_heartbeat_and_ended(launch: Launch) -> None:
    started = greeted(launch())
    os.kill(started.child.pid, signal.SIGSTOP)
    with pytest.raises(ChannelClosed, match=r"silent for 0\.2 s"):
        started.channel.ping(0.2)
    assert started.is_alive()
    started.end(0, DEADLINE_S)
    assert started.last_words() == "its process was ended by SIGKILL"


def test_what_it_started_itself_ends_with_it(launch: Launch) -> None:
    started = greeted(launch("family"))
    [its_own] = children(of=started.child.pid)
    assert runs(its_own.pid)
    started.end(0, DEADLINE_S)
    until(lambda: not runs(its_own.pid))


def test_there_must_be_something_to_start() -> None:
    for path in ("/etc/passwd", "/nowhere", "/"):
        with pytest.raises(ConfigError, match=f"the child: {path} is not an executable file"):
            LocalLauncher(Program(Path(path), "the child", RING_BYTES))


def test_what_is_no_program_says_so_in_its_last_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF no program")
    broken.chmod(0o755)
    launcher = LocalLauncher(Program(broken, "the child", RING_BYTES), lambda line: None)
    started = launcher.launch([], ())
    with pytest.raises(ChannelClosed):
        started.channel.receive(DEADLINE_S)
    assert f"{broken}: Exec format error" in started.last_words()
    launcher.close()


@pytest.mark.parametrize("when", ["its process lives", "importing"])
def test_no_process_outlives_one_that_was_killed(when: str) -> None:
    """Killed as soon as its child is started, or while the child imports and hears nothing."""
    code = f"""
        import sys, time
        from pathlib import Path
        from luceasync.ipc.launcher import LocalLauncher, Program
        environment = {{"PYTHONPATH": {str(ROOT)!r}}}
        program = Program(Path(sys.executable), "x", {RING_BYTES}, environment=environment)
        started = LocalLauncher(program).launch([{str(CHILD)!r}, "import"], ())
        deadline = time.monotonic() + {DEADLINE_S}
        while {when!r} not in started.last_words():
            assert time.monotonic() < deadline, started.last_words()
        print(started.child.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    until(lambda: not runs(pid))


def test_a_process_lives_as_long_as_it_is_referenced() -> None:
    """Without a reference to its launcher, whose thread keeps the kernel from killing it."""
    program = Program(Path(sys.executable), "x", RING_BYTES, environment={"PYTHONPATH": str(ROOT)})
    started = LocalLauncher(program, lambda line: None).launch([str(CHILD), "import"], ())
    gc.collect()
    until(lambda: "importing" in started.last_words())
    time.sleep(0.1)
    assert started.is_alive()
    started.end(0, DEADLINE_S)


def test_rings_are_shared_or_not_as_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_rings("stream", RING_BYTES) is None
    shared = open_rings("shared", RING_BYTES)
    assert isinstance(shared, Rings)
    shared.close()

    def none(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none)
    assert open_rings("auto", RING_BYTES) is None
    with pytest.raises(ConfigError, match=r"--ipc-transport shared: .*Function not implemented"):
        open_rings("shared", RING_BYTES)
    with pytest.raises(ConfigError, match=r"--ipc-transport tcp: it must be auto\|shared\|stream"):
        open_rings("tcp", RING_BYTES)


def test_one_that_hangs_is_ended_while_it_is_waited_for(launch: Launch) -> None:
    started = greeted(launch(heartbeat=Heartbeat(interval_s=0.02, deadline_s=0.2)))
    until(lambda: started.vitals.age_s is not None)
    assert started.is_well
    assert started.vitals.resident_bytes > 1 << 20
    with (
        later(0.1, os.kill, started.child.pid, signal.SIGSTOP),
        pytest.raises(ChannelClosed),
    ):
        started.channel.receive(DEADLINE_S)
    words = "it gave no sign of life for 0.2 s; its process was ended by SIGKILL"
    assert started.last_words() == words
    assert not started.is_well
    started.end(0, DEADLINE_S)
    assert started.last_words() == words
    assert started.vitals.resident_bytes == 0


def test_what_the_system_does_not_begin_is_not_waited_for(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program on a disk that hangs."""
    hung = threading.Event()

    def hang(*arguments: object, **options: object) -> None:
        hung.wait(DEADLINE_S)
        raise OSError("at last")

    with monkeypatch.context() as patched:
        patched.setattr(launcher_module, "START_S", 0.01)
        patched.setattr(launcher_module.subprocess, "Popen", hang)
        with pytest.raises(Unavailable, match=r"did not begin within 0\.01 s"):
            launch()
        hung.set()
