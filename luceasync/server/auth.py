"""Who may come in: API keys as Bearer tokens or `x-api-key`.

Owns the comparison of keys. Knows nothing of tenants or rights: a key opens everything.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.errors import RequestError
from luceasync.server.failures import describe

OPEN_PATHS = frozenset({"/", "/health", "/ready"})


class RequireApiKey:
    """Middleware: everything but OPEN_PATHS needs one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(_key_in(scope)):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            status=401,
        )
        await describe(error).response()(scope, receive, send)

    def _knows(self, key: bytes) -> bool:
        # Every key is compared, so that the time tells nothing of which one was near.
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0


def _key_in(scope: Scope) -> bytes:
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")
