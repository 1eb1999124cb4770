"""One listening socket, and Hypercorn serving an app on it.

Owns the binding of the port and Hypercorn's settings. Knows nothing of signals or of running
requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette

from luceasync.config import ServerConfig
from luceasync.errors import ConfigError

# Time for the last events and the closing of connections, after the running requests have ended.
LINGER_S = 2.0


async def run_hypercorn(app: Starlette, listener: socket.socket, closed: asyncio.Event) -> None:
    """Serve `app` on `listener`, which it owns from now on, until `closed` is set."""
    config = HypercornConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = logging.getLogger("luceasync.hypercorn")
    config.include_server_header = False
    config.backlog = 1024
    config.keep_alive_timeout = 75.0
    config.graceful_timeout = LINGER_S
    config.shutdown_timeout = LINGER_S
    await hypercorn_serve(app, config, shutdown_trigger=closed.wait)  # type: ignore[arg-type]


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


def url_of(listener: socket.socket) -> str:
    """The address to type into a client."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
