"""API keys as Bearer tokens or `x-api-key`, and the tenant and the client that follow from a key.

State computed for one tenant is never reused for another; clients get equal shares of the server.
Every key opens every route.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.errors import RequestError

OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/health", "/ready"})
OPEN_FOLDER = "/web/"  # static files
MAX_SALT_CHARS = 256
# Cannot occur in a header and thus in a key, so key and salt remain distinct.
_SEPARATOR = "\0"
_ACCEPTED_KEY = "luceasync.accepted_key"


class RequireApiKey:
    """Middleware: every path that is not open requires one of `keys`; `refusal` makes the 401."""

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
        key = matching_key(scope, self._keys)
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


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def matching_key(scope: Scope, keys: Iterable[str]) -> str | None:
    """The one of `keys` that the request carries, if any."""
    sent = _sent_key(scope)
    # Compare with all keys, so that timing does not reveal which one was close.
    matching = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    return matching[0] if matching else None


def _sent_key(scope: Scope) -> bytes:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"")


def accepted_key(scope: Scope) -> str:
    """The key that RequireApiKey accepted; "" if the server needs none."""
    key: str = scope.get(_ACCEPTED_KEY, "")
    return key


CLIENT_HEADER = b"x-luceasync-client"
MAX_CLIENT_CHARS = 256


def client_named_by_router(scope: Scope, secrets: Iterable[str]) -> str:
    """The client named by a trusted router in a header "NAME SIGNATURE", where the signature is the
    HMAC-SHA256 of the name under one of `secrets`, in hexadecimal digits. "" without such a header
    or without `secrets`. Raises RequestError for a wrong signature: otherwise fairness would
    silently count all clients as one.
    """
    secrets = tuple(secrets)
    headers: dict[bytes, bytes] = dict(scope["headers"])
    sent = headers.get(CLIENT_HEADER, b"")
    if not secrets or not sent:
        return ""
    name, _, signature = sent[: MAX_CLIENT_CHARS + 80].strip().partition(b" ")
    made = [hmac.new(secret.encode(), name, "sha256").hexdigest() for secret in secrets]
    signed = [hmac.compare_digest(each.encode(), signature.strip().lower()) for each in made]
    if not any(signed) or not 1 <= len(name) <= MAX_CLIENT_CHARS:
        raise RequestError(
            "Invalid header 'x-luceasync-client': its signature is not that of a secret in "
            "--client-secret-file.",
            code="invalid_client_signature",
            status=401,
        )
    return name.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the accepted API key ("" if the server needs none), whether the
    caller's salts are trusted, the peer address of the connection, which no header can forge, and
    the client that a trusted router names instead ("": none).
    """

    key: str = field(default="", repr=False)
    may_salt: bool = False
    address: str = ""
    named: str = ""

    @property
    def client(self) -> str:
        """The unit of fairness for lanes and the queue: the client that a trusted router names,
        otherwise the key, otherwise the address.
        """
        if self.named:
            return f"{self.key}{_SEPARATOR}{self.named}"
        return self.key or network_of(self.address)

    def tenant(self, salt: str | None) -> str:
        """The tenant that `salt` narrows this caller to; without a salt, the tenant of the key.

        Raises RequestError for a salt that is not trusted, or not 1 to MAX_SALT_CHARS long.
        """
        if salt is None:
            return self.key
        if not self.may_salt:
            raise RequestError(
                "Invalid value for 'cache_salt': this server does not accept it; "
                "start it with --trust-cache-salt to allow it.",
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
    """The addresses that a single host controls: its IPv4 address, or the /64 network of its IPv6
    address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # not an IP socket
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
