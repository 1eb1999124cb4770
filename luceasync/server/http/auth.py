"""Who may come in: API keys as Bearer tokens or `x-api-key`.

Owns the comparison of keys. Knows nothing of tenants or rights: every key opens everything.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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


# Whose request it is: what was computed for one tenant is never given to another, and clients
# have equal shares. Owns how a key and a salt make a tenant's name, and a key or an address a
# client's. Knows nothing of headers or of what is kept.


MAX_SALT_CHARS = 256
# No HTTP header can hold it, so no key does: where the key ends is certain, whatever the salt is.
_SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the API key that let it in ("" where none is asked for), whether its
    salts are trusted, and the address of the connection, which nobody can invent as a header.
    """

    key: str = field(default="", repr=False)
    may_salt: bool = False
    address: str = ""

    @property
    def client(self) -> str:
        """Among whom lanes and places in the queue are shared: its key, else its address."""
        return self.key or network_of(self.address)

    def tenant(self, salt: str | None) -> str:
        """The tenant that `salt` narrows this caller to; without one, all that the key shares.

        Raises RequestError for a salt that is not trusted, or not 1 to MAX_SALT_CHARS long.
        """
        if salt is None:
            return self.key
        if not self.may_salt:
            raise RequestError(
                "Invalid value for 'cache_salt': this server takes none; "
                "it does when it is started with --trust-cache-salt.",
                param="cache_salt",
            )
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            raise RequestError(
                f"Invalid value for 'cache_salt': it has {len(salt)} characters; "
                f"expected 1 to {MAX_SALT_CHARS}.",
                param="cache_salt",
            )
        return self.key + _SEPARATOR + salt


def network_of(address: str) -> str:
    """What one host has for itself: an IPv4 address, or the first 64 bits of an IPv6 address, below
    which it may have any.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a socket that is no network's
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))
