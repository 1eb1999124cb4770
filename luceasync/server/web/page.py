"""Serves the web page at / and its files: a chat, and a view of the server's status.

Its content security policy restricts the page to files from this server. Independent of what the
page does.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = resources.files("luceasync.server") / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
INDEX = "index.html"
VERSIONED = "vendor/"  # these files have the version in their names
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
FOREVER = "public, max-age=31536000, immutable"


def wants_page(request: Request) -> bool:
    """Whether the client is a browser: programs do not accept HTML."""
    return "text/html" in request.headers.get("accept", "")


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page. `zipped` None: compression gains nothing."""

    content: bytes
    zipped: bytes | None
    tag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> PageFile:
        """Compress the file and compute its ETag once."""
        zipped = None if suffix == ".woff2" else gzip.compress(content, 6, mtime=0)
        return cls(content, zipped, hashlib.sha256(content).hexdigest()[:32])


class WebPage:
    """The page's files, each read and compressed on the first request for it."""

    def __init__(self) -> None:
        self._sources = dict(_files_below(FOLDER))
        self._files: dict[str, PageFile] = {}

    @property
    def routes(self) -> list[Route]:
        """The route of all files except the page itself."""
        return [Route("/web/{name:path}", self._file, include_in_schema=False)]

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return await self._answer(request, INDEX)

    async def _file(self, request: Request) -> Response:
        return await self._answer(request, request.path_params["name"])

    async def _answer(self, request: Request, name: str) -> Response:
        if name not in self._sources:
            raise HTTPException(404)
        suffix = PurePosixPath(name).suffix
        if name not in self._files:
            content = await asyncio.to_thread(self._sources[name].read_bytes)
            self._files[name] = await asyncio.to_thread(PageFile.of, content, suffix)
        file = self._files[name]
        is_zipped = file.zipped is not None and "gzip" in request.headers.get("accept-encoding", "")
        tag = f'"{file.tag}{"-gzip" if is_zipped else ""}"'
        headers = {**HEADERS, "etag": tag, "vary": "accept-encoding"}
        if name.startswith(VERSIONED):
            headers["cache-control"] = FOREVER
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        content = file.content
        if is_zipped and file.zipped is not None:
            content, headers["content-encoding"] = file.zipped, "gzip"
        return Response(content, headers=headers, media_type=TYPES[suffix])


def _files_below(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    """The files that are served, with their paths below `folder`."""
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _files_below(entry, f"{name}/")
        elif PurePosixPath(name).suffix in TYPES:
            found.append((name, entry))
    return found
