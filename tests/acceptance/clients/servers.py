"""A recording server as a process, which may be killed and started again over the same files.

Owns the process. Knows no client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

READY_S = 300.0
WRITTEN_S = 60.0
END_S = 60.0


class RecordedServer:
    """A server that is ready, with its files in `folder`; `flags`: which model
    (clients/serve.py).
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    @property
    def log(self) -> Path:
        """Where its requests are recorded."""
        return self._folder / "requests.jsonl"

    def __enter__(self) -> RecordedServer:
        self._start(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(END_S)

    def kill(self) -> None:
        """Kill it once nothing is left to be written, and start another one at its address."""
        assert self._process is not None
        _wait(WRITTEN_S, "has written all", lambda: not self._num_unwritten())
        self._process.kill()
        self._process.wait(END_S)
        self._start(urlsplit(self.url).port or 0)

    def _start(self, port: int) -> None:
        module = "tests.acceptance.clients.serve"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(self._folder), "--port", str(port), *self._flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["url"]
        _wait(READY_S, "is ready", lambda: self._get("/ready") is not None)

    def _num_unwritten(self) -> int:
        found: int = (self._get("/status") or {})["cache"]["num_unwritten"]
        return found

    def _get(self, path: str) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as response:
                found: dict[str, Any] = json.loads(response.read())
                return found
        except OSError:
            return None


def _wait(seconds: float, what: str, holds: Any) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s it is not so that the server {what}")
        time.sleep(0.3)
