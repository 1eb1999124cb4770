"""A server's actor without Ray: what it reads on its machine, and how it runs its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from luceasync.cluster import replica as replica_module
from luceasync.cluster.replica import ReplicaServer, key_of, variables_in
from luceasync.cluster.settings import ReplicaSettings, ScaleSettings
from luceasync.errors import ConfigError

ONE = ScaleSettings(1, 1)


def replica(*flags: str) -> ReplicaSettings:
    return ReplicaSettings("chat", ONE, flags=flags, drain_s=1.0)


def test_variables_are_read_as_systemd_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("# keys\n\nLUCEASYNC_API_KEY=hush\nA='two words'\nEMPTY=\n")
    expected = {"LUCEASYNC_API_KEY": "hush", "A": "two words", "EMPTY": ""}
    assert variables_in(str(file)) == expected
    assert variables_in(None) == {}


@pytest.mark.parametrize("line", ["hush", "1A=hush", "A=hush hush", "A='hush"])
def test_a_line_that_is_none_is_named_without_its_words(tmp_path: Path, line: str) -> None:
    file = tmp_path / "env"
    file.write_text(f"A=1\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        variables_in(str(file))
    assert "line 2: NAME=VALUE is expected" in str(refused.value)
    assert "hush" not in str(refused.value)


def test_variables_that_are_not_on_this_machine_are_refused() -> None:
    with pytest.raises(ConfigError, match="environment-file /none: No such file"):
        variables_in("/none")


def test_the_server_is_asked_with_a_key_that_it_accepts(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for clients\nfirst\nsecond\n")
    file.chmod(0o600)
    assert key_of(replica(), {}) == ""
    assert key_of(replica(), {"LUCEASYNC_API_KEY": "a,b"}) == "a"
    assert key_of(replica("--api-key-file", str(file)), {}) == "first"
    assert key_of(replica(f"--api-key-file={file}"), {}) == "first"
    with pytest.raises(ConfigError, match="it has no key on this machine"):
        key_of(replica("--api-key-file", "/none"), {})


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1200):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it has not come within 60 s")


@pytest.mark.slow  # starts processes
def test_a_server_that_refuses_its_settings_is_told_and_started_again_until_it_leaves() -> None:
    server = ReplicaServer(replica("--max-queue", "junk"), 0, "127.0.0.1", "auto", "c.chat.0.x")
    until(lambda: server.state.status is not None)
    assert server.state.status == 2 and "--max-queue" in server.state.detail
    assert not server.state.is_ready and not server.state.was_ready
    until(lambda: server.state.starts >= 2)
    server.drain()
    assert server.state.is_leaving and not server.state.is_ready
    starts = server.state.starts
    server.drain()  # again
    assert server.state.starts == starts


@pytest.mark.slow  # starts processes
def test_a_server_that_the_system_does_not_start_now_is_tried_again(monkeypatch) -> None:
    real, refused = replica_module.LeashedProgram, []

    def start(*given):
        if not refused:
            refused.append(given)
            raise OSError(11, "Resource temporarily unavailable")
        return real(*given)

    monkeypatch.setattr(replica_module, "LeashedProgram", start)
    server = ReplicaServer(replica("--no-such-flag"), 0, "127.0.0.1", "127.0.0.1:1", "x")
    try:
        until(lambda: "Resource temporarily unavailable" in server.state.detail)
        until(lambda: server.state.status == 2)
        assert server.state.starts >= 2
    finally:
        server.drain()
