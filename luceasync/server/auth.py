"""Who may come in: API keys as Bearer tokens or `x-api-key`.

Owns the comparison of keys. Knows nothing of tenants or rights: every key opens everything.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.errors import RequestError

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
OPEN_FOLDER = "/web/"  # files of the page, the same for everybody
_ACCEPTED_KEY = "luceasync.accepted_key"


def accepted_key(scope: Scope) -> str:
    """The key that let this request in; "" where none was asked for."""
    key: str = scope.get(_ACCEPTED_KEY, "")
    return key


class RequireApiKey:
    """Middleware: all but OPEN_PATHS needs one of `keys`; `accepted_key` tells which it was, and
    `refusal` words the 401.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        refusal: Callable[[Scope, Exception], Response],
    ) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = self._find(key_in(scope))
        if key is not None:
            scope[_ACCEPTED_KEY] = key
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            status=401,
        )
        await self._refusal(scope, error)(scope, receive, send)

    def _find(self, sent: bytes) -> str | None:
        # Every key is compared, so that the time tells nothing of which one was near.
        found = [key for key in self._keys if hmac.compare_digest(sent, key.encode())]
        return found[0] if found else None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def key_in(scope: Scope) -> bytes:
    """What was sent as a key; nothing where none was."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")
