"""Serves the web page at / and its files: a chat, and a view of the server's status.

Its policy lets a browser load from this server alone. Knows nothing of what the page does.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = resources.files("luceasync.server") / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def wants_page(request: Request) -> bool:
    """Whether a browser asks: programs do not accept HTML."""
    return "text/html" in request.headers.get("accept", "")


class WebPage:
    """The page's files, read once."""

    def __init__(self) -> None:
        self._files = {
            entry.name: entry.read_bytes()
            for entry in FOLDER.iterdir()
            if PurePath(entry.name).suffix in TYPES
        }

    @property
    def routes(self) -> list[Route]:
        """A route for each file except the page itself."""
        return [
            Route(f"/web/{name}", self._file, name=name, include_in_schema=False)
            for name in self._files
            if name != INDEX
        ]

    def index(self, request: Request) -> Response:
        """The page itself."""
        return self._answer(request, INDEX)

    async def _file(self, request: Request) -> Response:
        return self._answer(request, PurePath(request.url.path).name)

    def _answer(self, request: Request, name: str) -> Response:
        content = self._files[name]
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {**HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=TYPES[PurePath(name).suffix])
