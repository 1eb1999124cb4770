"""Requests and answers as lines of JSON: what a logging proxy would write.

Owns the format. Knows no client and no API.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer; `body` and `answer` as text."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int
    answer: str

    @property
    def events(self) -> Iterator[dict[str, Any]]:
        """The answer's JSON: one object, or that of each event."""
        if not self.answer.startswith(("data:", "event:", ":")):
            yield json.loads(self.answer)
            return
        for line in self.answer.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


class Recorder:
    """Middleware that writes a line for each request once it is answered."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent, said, status = bytearray(), bytearray(), 0

        async def hear() -> Message:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            said.extend(message.get("body", b""))
            await send(message)

        begun = time.monotonic()
        try:
            await self._app(scope, hear, tell)
        finally:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            headers.pop("authorization", None)
            line = {
                "method": scope["method"],
                "path": scope["path"],
                "headers": headers,
                "body": sent.decode(errors="replace"),
                "status": status,
                "answer": said.decode(errors="replace"),
                "seconds": round(time.monotonic() - begun, 3),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def exchanges(path: Path) -> list[Exchange]:
    """All recorded exchanges, by when they ended."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    fields = Exchange.__dataclass_fields__
    return [Exchange(**{name: line[name] for name in fields}) for line in lines]
