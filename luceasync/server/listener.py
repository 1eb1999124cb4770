"""One listening socket, and Hypercorn serving an app on it.

Owns the binding of the port and Hypercorn's settings. Knows nothing of signals or of running
requests.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from functools import partial

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette

from luceasync.config import ServerConfig
from luceasync.errors import ConfigError
from luceasync.server.connection import Connection
from luceasync.server.connections import Connections
from luceasync.server.turns import Turns

# Time for the last events and the closing of connections, after the running requests have ended.
LINGER_S = 2.0
BACKLOG = 1024
UNSENT_BYTES = 64 << 10  # that the kernel takes of an answer before the client makes room for them
MAX_DESCRIPTORS = 16384
RESERVED_DESCRIPTORS = 192  # for weights, node files, devices and what libraries open


async def run_hypercorn(
    app: Starlette,
    listener: socket.socket,
    closed: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` on `listener`, which it owns from now on, until `closed` is set."""
    config = HypercornConfig()
    config.errorlog = logging.getLogger("luceasync.hypercorn")
    config.include_server_header = False
    config.keep_alive_timeout = 75.0  # longer than proxies keep theirs: they close it, not we
    context = WorkerContext(None)
    wrapped = ASGIWrapper(app)  # type: ignore[arg-type]
    make = partial(Connection, wrapped, config, context, Turns())
    connections = Connections(make, max_connections(), tls)
    async with app.router.lifespan_context(app):
        listener.listen(BACKLOG)
        connections.accept_from(listener)
        try:
            await closed.wait()
        finally:
            await context.terminated.set()
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            await connections.end(LINGER_S)


def listen(config: ServerConfig) -> socket.socket:
    """Bind the port. Raises ConfigError: taken, not ours, or no such address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port}: cannot listen there ({error.strerror}); "
            "allowed: an address of this machine and a free port (0: any)"
        ) from None
    return listener


def max_connections() -> int:
    """As many as this process may have open, after it has asked for more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(1, most - RESERVED_DESCRIPTORS)


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """The address to type into a client."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
