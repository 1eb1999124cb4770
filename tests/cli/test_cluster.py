"""The commands of `luceasync cluster` where there is no Ray: one line, and status 2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from luceasync.cli.cluster import _show_counts, _table
from luceasync.cluster.manager import ManagerStatus
from tests.cli.forked import commands

pytestmark = pytest.mark.slow  # starts a process


def test_a_file_that_cannot_be_is_one_line_before_ray_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with commands("plan", "/none") as luceasync:
        for command, text, words in (
            ("up", "[replicas.a]\ncuont = 1\n", "a.cuont: unknown key; did you mean count?"),
            ("status", "[replicas.a]\ndrain-s = -1\n", "a.drain-s: -1; seconds from 0 to 86400"),
            ("down", "", "no replicas; a table such as [replicas.chat] is expected"),
        ):
            file.write_text(text)
            ended = luceasync.run("cluster", command, str(file))
            assert (ended.returncode, ended.loaded) == (2, []), ended.stderr
            [line] = ended.stderr.splitlines()
            assert line.startswith("luceasync: ") and words in line
        file.write_text('ray = "127.0.0.1:1"\n[replicas.a]\n')
        ended = luceasync.run("cluster", "up", str(file))
    [line] = ended.stderr.splitlines()
    has_ray = importlib.util.find_spec("ray") is not None
    expected = "no Ray cluster at 127.0.0.1:1" if has_ray else "pip install 'luceasync[ray]'"
    assert ended.returncode == 2 and expected in line


def test_servers_are_shown_in_columns_and_counted_by_phase(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = {"name": "chat.0", "phase": "ready", "node": "10.0.0.2", "url": "http://10.0.0.2:1"}
    server |= {"running": 1, "waiting": 0, "starts": 2, "detail": "two\nlines"}
    status = ManagerStatus({"chat": 1}, [server], False, fault="the disk is full")
    head, row, last = _table(status).splitlines()
    assert last == "manager: the disk is full"
    assert head.split()[:4] == ["server", "phase", "machine", "url"]
    assert row.split() == [*"chat.0 ready 10.0.0.2 http://10.0.0.2:1 1 0 2 two lines".split()]
    _show_counts(status)
    assert capsys.readouterr().err.endswith(" 1 ready\n")
