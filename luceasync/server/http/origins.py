"""Which web pages may use the server, decided by the Host header and the Origin of the page.

DNS rebinding lets a page's own name resolve to this machine; the Host header reveals it. A page of
another site can send requests that need no preflight; the Origin header reveals it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.errors import RequestError
from luceasync.server_config import ServerConfig

ANY = "*"
MAX_ECHO_CHARS = 100
# CORS hides these from a page of another origin unless they are listed.
EXPOSED_HEADERS = ("Retry-After",)

Refusal = Callable[[Scope, Exception], Response]


def origin_middleware(config: ServerConfig, refusal: Refusal) -> list[Middleware]:
    """The check of hosts and origins, and CORS for the origins that are allowed."""
    middleware = [Middleware(CheckHostAndOrigin, config=config, refusal=refusal)]
    if config.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allow_origins,
                allow_methods=(ANY,),
                allow_headers=(ANY,),
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )
        )
    return middleware


class CheckHostAndOrigin:
    """Middleware: 403 for a Host that is not this server's, and for an Origin that is not allowed.

    Hosts are checked if the server listens on loopback, or if some are allowed by name.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, refusal: Refusal) -> None:
        self._app = app
        self._refusal = refusal
        self._hosts = {*(name.lower() for name in config.allow_hosts), config.host.lower()}
        self._checks_hosts = ANY not in config.allow_hosts and (
            bool(config.allow_hosts) or listens_on_loopback(config.host)
        )
        self._origins = frozenset(config.allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RequestError as error:
                await self._refusal(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raise RequestError for a bad Host or Origin. A request without both is not from a
        browser.
        """
        hosts = list(_values(scope, b"host"))
        if self._checks_hosts:
            for host in hosts:
                self._check_host(host)
        for origin in _values(scope, b"origin"):
            self._check_origin(origin, hosts)

    def _check_host(self, host: str) -> None:
        name = name_of(host)
        if name not in self._hosts and not is_local(name):
            raise _forbidden(
                f"The Host {_echo(host)} is not served here; "
                "expected localhost, a loopback address, or a name given by --allow-host.",
                code="unknown_host",
            )

    def _check_origin(self, origin: str, hosts: Iterable[str]) -> None:
        if ANY in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] in hosts:  # a page of this server
            return
        raise _forbidden(
            f"Web pages of the Origin {_echo(origin)} may not use this server; "
            "start it with --allow-origin and that origin to allow them.",
            code="foreign_origin",
        )


def name_of(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_local(name: str) -> bool:
    """Whether `name` is known to be this machine, without a DNS lookup."""
    return name == "localhost" or _is_loopback(name)


def listens_on_loopback(host: str) -> bool:
    """Whether a server on `host` is reachable only from this machine; False for unknown hosts."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:  # binding it will report the error
        return False
    return _is_loopback(str(addresses[0][4][0]))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _values(scope: Scope, name: bytes) -> Iterable[str]:
    for key, value in scope["headers"]:
        if key == name:
            yield value.decode("latin-1").strip().lower()


def _echo(value: str) -> str:
    return repr(value[:MAX_ECHO_CHARS])


def _forbidden(message: str, code: str) -> RequestError:
    return RequestError(message, code=code, status=403)
