"""Processes that render chat templates, each used by one engine after the other: starting one takes
a tenth of a second of a core, and most tests of engines ask nothing of it but the same text. So
what one engine has had rendered, as each does with dozens of examples at its start, is not rendered
for the next.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from luceasync.errors import TemplateRefusal
from luceasync.text.isolation import RenderLimits, _Gone, _RenderProcess
from luceasync.text.template import TemplateSource

Key = tuple[Path, str, str | None, RenderLimits]

MOST_TEXTS = 1000  # that are held of a template


class Renderers:
    """In place of the class of such a process. Any thread may ask."""

    def __init__(self) -> None:
        self._idle: dict[Key, list[_RenderProcess]] = defaultdict(list)
        self._texts: dict[Key, dict[bytes, str]] = defaultdict(dict)
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, source: TemplateSource, limits: RenderLimits) -> Lent:
        key = source.path, source.default, source.tool_use, limits
        with self._lock:
            idle = [each for each in self._idle.pop(key, []) if each._popen.poll() is None]
            process = idle.pop() if idle else None
            self._idle[key] = idle
        process = process or _RenderProcess(source, limits)
        return Lent(process, self._texts[key], lambda: self._take_back(key, process))

    def close(self) -> None:
        """End all that are idle, and later those that come back. Idempotent."""
        with self._lock:
            self._is_closed = True
            for idle in self._idle.values():
                while idle:
                    idle.pop()._finalizer()

    def _take_back(self, key: Key, process: _RenderProcess) -> None:
        with self._lock:
            if self._is_closed or process._popen.poll() is not None:
                process._finalizer()
            else:
                self._idle[key].append(process)


class Lent:
    """A process until its user ends it. One that did anything but render is not used again, nor is
    one that is ended while it renders. `texts`: what the template has made of earlier orders.
    """

    def __init__(
        self, process: _RenderProcess, texts: dict[bytes, str], give_back: Callable[[], None]
    ) -> None:
        self._process = process
        self._texts = texts
        self._give_back = give_back
        self._lock = threading.Lock()
        self._is_busy = self._is_ended = self._has_failed = False

    def compiled(self) -> str:
        return self._using(self._process.compiled)

    def rendered(self, order: bytes) -> str:
        with self._lock:
            if order in self._texts and not self._is_ended:
                return self._texts[order]
        text = self._using(lambda: self._process.rendered(order))
        if len(self._texts) < MOST_TEXTS:
            self._texts[order] = text
        return text

    def end(self) -> None:
        with self._lock:
            was_ended, self._is_ended = self._is_ended, True
            if self._is_busy or self._has_failed:
                self._process.end()
            elif not was_ended:
                self._give_back()

    def _using(self, ask: Callable[[], str]) -> str:
        with self._lock:
            if self._is_ended:
                raise _Gone("it was given back")
            self._is_busy = True
        try:
            return ask()
        except TemplateRefusal:
            raise
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._is_busy = False
