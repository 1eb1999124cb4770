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
from pathlib import Path

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette

from luceasync.config import ServerConfig
from luceasync.errors import ConfigError
from luceasync.server.http.connection import Connection, Turns
from luceasync.server.http.connections import Connections

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


# The certificate and the key that the server shows, checked before anything else is done. Owns
# what TLS we speak and the words for files that do not do. Knows no connection.


ALPN = ("http/1.1",)
ALLOWED = "a PEM file"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the files of `config`, None where it names none. Raises ConfigError."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    _refuse_other("--tls-cert", cert, "CERTIFICATE", "a certificate, or a chain of them")
    if "ENCRYPTED" in _refuse_other("--tls-key", key, "PRIVATE KEY", "a private key"):
        raise ConfigError(
            f"--tls-key {key}: the key is encrypted, and nobody would be asked for its password; "
            "allowed: a PEM file with a key that is not (`openssl pkey -in KEY -out PLAIN_KEY`)"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--tls-key {key}: the key is not that of the certificate {cert}; "
                "allowed: the key for which the first certificate in that file was made"
            ) from None
        raise ConfigError(
            f"--tls-cert {cert} --tls-key {key}: OpenSSL does not take them "
            f"({error.reason or error}); allowed: PEM files with a certificate and its key"
        ) from None
    return context


def _refuse_other(flag: str, path: Path, what: str, words: str) -> str:
    """The text of `path`, which holds a `what`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read ({error.strerror}); allowed: {ALLOWED} with {words}"
        ) from None
    if "-----BEGIN " not in text or f"{what}-----" not in text:
        raise ConfigError(f"{flag} {path}: holds none; allowed: {ALLOWED} with {words}")
    return text
