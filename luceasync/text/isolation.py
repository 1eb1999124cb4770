"""A chat template in a process that can be killed: no template can hang or fill this process.

Owns that process and the limits of a rendering. The program is luceasync.text.sandbox.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

import luceasync
from luceasync.errors import ModelError, TemplateOverrun, TemplateRefusal, Unavailable
from luceasync.text import sandbox
from luceasync.text.template import TemplateSource

# Isolated from everything but luceasync and jinja2, wherever they are installed; this also makes it
# start fast.
START = "import sys; sys.path += sys.argv[1:]; from luceasync.text.sandbox import main; main()"
END_S = 2.0


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of one rendering: processor time, memory of the process, bytes of text. The limit
    of wall time is much longer, since the machine may be busy. `wait_s` limits the wait for other
    renderings.
    """

    cpu_s: float = 3.0
    wall_s: float = 30.0
    wait_s: float = 30.0
    memory_bytes: int = 1 << 30
    max_text_bytes: int = 64 << 20


class IsolatedTemplate:
    """Renders like ChatTemplate, in another process. Thread-safe; one rendering runs at a time."""

    is_here = False

    def __init__(self, source: TemplateSource, limits: RenderLimits | None = None) -> None:
        """Start the process without waiting for it."""
        self.source: TemplateSource | None = source
        self._source = source
        self._limits = limits or RenderLimits()
        self._turn = threading.Lock()
        self._is_closed = False
        self._process: _RenderProcess | None = _RenderProcess(source, self._limits)

    def close(self) -> None:
        """Stop the process and any rendering in it. Idempotent; callable from any thread."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.end()

    def check(self) -> None:
        """Raise ModelError if the template does not compile within the limits."""
        try:
            with self._my_turn():
                self._at_second_try(lambda process: process.compiled())
        except TemplateOverrun as error:
            raise ModelError(
                f"{self._source.path}: the chat template {error.excess} to compile."
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Like ChatTemplate.render. Raises TemplateOverrun at a limit, Unavailable if other
        renderings take too long or the engine is shutting down.
        """
        variables = self._source.variables(messages, tools, add_generation_prompt, kwargs)
        try:
            order = sandbox.order_bytes(variables)
        except (ValueError, RecursionError) as error:
            raise sandbox.refusal(f"they cannot be written as JSON: {error}") from error
        with self._my_turn():
            return self._at_second_try(lambda process: process.rendered(order))

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._limits.wait_s):
            raise Unavailable("Other chats take long to render.")
        try:
            yield
        finally:
            self._turn.release()

    def _at_second_try(self, ask: Any) -> str:
        """The answer of the process, with one retry: the system may have killed it for lack of
        memory. Raises TemplateOverrun, TemplateRefusal, ModelError and Unavailable.
        """
        how = ""
        for _ in range(2):
            if self._is_closed:
                raise Unavailable("The server is shutting down.")
            if self._process is None:
                self._process = _RenderProcess(self._source, self._limits)
            try:
                text: str = ask(self._process)
                return text
            except _Gone as gone:
                self._process, how = None, str(gone)
            except TemplateOverrun:
                self._process = None
                raise
        raise Unavailable(f"The process that renders chats ended: {how}.")


class _Gone(Exception):
    """The process has ended; the message describes how."""


class _RenderProcess:
    """One process, from its start to its end. Used by one thread at a time, except for `end`."""

    def __init__(self, source: TemplateSource, limits: RenderLimits) -> None:
        self._source = source
        self._limits = limits
        self._is_compiled = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START, *_roots()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self._socket = ours
        self._finalizer = weakref.finalize(self, _end, self._popen, ours, os.getpid())
        sources = {"default": source.default}
        if source.tool_use is not None:
            sources["tool_use"] = source.tool_use
        self._begun: dict[str, Any] | None = {
            "sources": sources,
            "limit_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "max_text_bytes": limits.max_text_bytes,
        }

    def end(self) -> None:
        """Kill the process. Idempotent; callable from any thread: another thread's wait for it
        ends.
        """
        with suppress(ProcessLookupError):
            self._popen.kill()

    def compiled(self) -> str:
        """Wait until the template is compiled. Returns no text. Raises ModelError, and the
        exceptions of `rendered`.
        """
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._ask(json.dumps(begun).encode())
        return ""

    def rendered(self, order: bytes) -> str:
        """The text of an order. Raises TemplateOverrun, TemplateRefusal and _Gone."""
        self.compiled()
        return self._ask(order)

    def _ask(self, order: bytes) -> str:
        deadline = time.monotonic() + self._limits.wall_s
        try:
            self._socket.settimeout(self._limits.wall_s)
            self._socket.sendall(sandbox.message(sandbox.ORDER, order))
            most_bytes = max(self._limits.max_text_bytes, sandbox.MAX_REFUSAL_BYTES)
            kind, payload = sandbox.receive(
                self._socket, most_bytes, partial(self._set_deadline, deadline)
            )
        except TimeoutError:
            self._finalizer()
            raise TemplateOverrun(f"takes more than {self._limits.wall_s:g} s") from None
        except (OSError, EOFError):
            self._finalizer()
            raise self._ended() from None
        return self._read(kind, payload.decode("utf-8", "surrogatepass"))

    def _set_deadline(self, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))

    def _ended(self) -> Exception:
        """The exception that corresponds to how the process ended."""
        code = self._popen.returncode
        if code == -signal.SIGPROF:
            return TemplateOverrun(f"takes more than {self._limits.cpu_s:g} s")
        return _Gone(f"exit status {code}" if code is None or code >= 0 else f"signal {-code}")

    def _read(self, kind: bytes, text: str) -> str:
        """The text of an answer. Raises the exceptions that other kinds of answers represent."""
        match kind:
            case sandbox.TEXT:
                return text
            case sandbox.REFUSED:
                raise TemplateRefusal(text, param="messages")
            case sandbox.BROKEN:
                raise ModelError(f"{self._source.path}: {text}")
            case sandbox.MEMORY:
                self._finalizer()  # how much of the message is left is unknown
                raise TemplateOverrun(
                    f"takes more than {self._limits.memory_bytes >> 20} MiB of memory"
                )
            case _:
                most = f"{self._limits.max_text_bytes >> 20} MiB"
                raise TemplateOverrun(f"writes more than {most} of text")


def _roots() -> list[str]:
    """The directories with the modules of the program."""
    packages = (luceasync, jinja2, markupsafe)
    return list({str(Path(str(package.__file__)).parents[1]): None for package in packages})


def _end(popen: subprocess.Popen[bytes], ours: socket.socket, owner_pid: int) -> None:
    """Kill the process and wait for its end, unless this is a forked copy of its owner."""
    ours.close()
    if os.getpid() != owner_pid:
        return
    with suppress(ProcessLookupError):
        popen.kill()
    with suppress(subprocess.TimeoutExpired):  # it ends when it leaves the kernel
        popen.wait(END_S)
