"""Runs commands as a shell would, each in a fork of one process that has already run one: what that
process imported is not imported again, and any further import is the command's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 60
HEAVY = ("numpy", "starlette", "torch", "transformers")


@dataclass(frozen=True)
class Ended:
    """The result of a command; `loaded`: which of HEAVY it imported."""

    returncode: int
    stdout: str
    stderr: str
    loaded: list[str]


class Commands:
    """A `luceasync` process that forks for each command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *arguments: str, **environ: str) -> Ended:
        """Run `luceasync ARGUMENTS` with `environ` as its environment."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            order = {"arguments": arguments, "environ": environ, "folder": folder}
            print(json.dumps(order), file=self._process.stdin, flush=True)
            code = int(self._process.stdout.readline())
            outputs = [Path(folder, name).read_text() for name in ("stdout", "stderr", "loaded")]
        return Ended(code, outputs[0], outputs[1], json.loads(outputs[2] or "[]"))


@contextmanager
def commands(*first: str) -> Iterator[Commands]:
    """`first`: the arguments of a command that is run beforehand and refused."""
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, __file__, *first]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, env=env) as process:
        yield Commands(process)


def _fork_for_each() -> None:
    _run(sys.argv[1:])
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(DEADLINE_S)
            _become(order)
            code = _run(order["arguments"])
            loaded = [name for name in HEAVY if name in sys.modules]
            Path(order["folder"], "loaded").write_text(json.dumps(loaded))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # all output has been written
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(arguments: list[str]) -> int:
    """Run a command and return its exit status."""
    from luceasync.cli import app

    sys.argv = ["luceasync", *arguments]
    try:
        app.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _become(order: dict) -> None:
    """Take over the environment and the files of the ordered command."""
    folder = Path(order["folder"])
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", **order["environ"]})
    for number, name in enumerate((os.devnull, folder / "stdout", folder / "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    (folder / "loaded").touch()


if __name__ == "__main__":
    _fork_for_each()
