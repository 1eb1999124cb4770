"""Which web pages may use the server: the Host that was asked for, and the Origin of the page.

Owns both rules. A page's name can be made to resolve to this machine (DNS rebinding): its Host
tells. A page of another site can send what needs no preflight: its Origin tells. Knows no keys.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from luceasync.config import ServerConfig
from luceasync.errors import RequestError

ANY = "*"
MAX_CHARS_TOLD = 100
# What a page may not read of another origin unless it is told so.
EXPOSED_HEADERS = ("Retry-After",)

Refuse = Callable[[Scope, Exception], Response]


def guards(config: ServerConfig, refuse: Refuse) -> list[Middleware]:
    """The middleware that keeps strangers out, and lets pages of allowed origins read answers."""
    middleware = [Middleware(RefuseStrangers, config=config, refuse=refuse)]
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


class RefuseStrangers:
    """Middleware: 403 for a Host that is not ours, and for an Origin that nobody allowed.

    Hosts are judged where the server listens on loopback, or where some are allowed by name.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse
        self._hosts = {*(name.lower() for name in config.allow_hosts), config.host.lower()}
        self._judges_hosts = ANY not in config.allow_hosts and (
            bool(config.allow_hosts) or listens_on_loopback(config.host)
        )
        self._origins = frozenset(config.allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._judge(scope)
            except RequestError as error:
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _judge(self, scope: Scope) -> None:
        """Raise RequestError for a stranger. Without a Host or an Origin it is no browser."""
        hosts = list(_values(scope, b"host"))
        if self._judges_hosts:
            for host in hosts:
                self._judge_host(host)
        for origin in _values(scope, b"origin"):
            self._judge_origin(origin, hosts)

    def _judge_host(self, host: str) -> None:
        name = name_of(host)
        if name not in self._hosts and not is_local(name):
            raise _stranger(
                f"The Host {_told(host)} is not served here; "
                "expected localhost, a loopback address, or a name given by --allow-host.",
                code="unknown_host",
            )

    def _judge_origin(self, origin: str, hosts: Iterable[str]) -> None:
        if ANY in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] in hosts:  # a page of this server itself
            return
        raise _stranger(
            f"Web pages of the Origin {_told(origin)} may not use this server; "
            "they may when it is started with --allow-origin and that origin.",
            code="foreign_origin",
        )


def name_of(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:80` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_local(name: str) -> bool:
    """Whether no DNS server is asked for `name`, and it is this machine."""
    return name == "localhost" or _is_loopback(name)


def listens_on_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`; False for one unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:  # whoever binds it says so in words
        return False
    return _is_loopback(str(found[0][4][0]))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _values(scope: Scope, name: bytes) -> Iterable[str]:
    for key, value in scope["headers"]:
        if key == name:
            yield value.decode("latin-1").strip().lower()


def _told(value: str) -> str:
    return repr(value[:MAX_CHARS_TOLD])


def _stranger(message: str, code: str) -> RequestError:
    return RequestError(message, code=code, status=403)
