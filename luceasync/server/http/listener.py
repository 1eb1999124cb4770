"""Binds the port, loads the certificate, and runs Hypercorn with an app.

Independent of signals and of running requests.
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

from luceasync.errors import ConfigError
from luceasync.server.http.connection import Connection, LoopThrottle
from luceasync.server.http.connections import Connections
from luceasync.server_config import ServerConfig

LINGER_S = 2.0  # for last events and closing connections, after the running requests have ended
BACKLOG = 1024
UNSENT_BYTES = 64 << 10  # of an answer that the kernel buffers beyond the client's window
MAX_DESCRIPTORS = 16384
RESERVED_DESCRIPTORS = 192  # for weights, node files, devices and libraries
ALPN = ("http/1.1",)


async def run_hypercorn(
    app: Starlette,
    listener: socket.socket,
    closed: asyncio.Event,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` on `listener` until `closed` is set, then close the listener."""
    config = HypercornConfig()
    config.errorlog = logging.getLogger("luceasync.hypercorn")
    config.include_server_header = False
    config.keep_alive_timeout = 75.0  # longer than that of proxies, so that they close first
    context = WorkerContext(None)
    wrapped = ASGIWrapper(app)  # type: ignore[arg-type]
    make = partial(Connection, wrapped, config, context, LoopThrottle())
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
    """Bind the port. Raises ConfigError if it is taken or the address is not this machine's."""
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
    """How many connections this process may have, after raising its limit of file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(1, most - RESERVED_DESCRIPTORS)


def url_of(listener: socket.socket, tls: ssl.SSLContext | None = None) -> str:
    """The URL for clients."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate of `config`, None without one. Raises ConfigError."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    _read_pem("--tls-cert", cert, "CERTIFICATE", "a certificate, or a chain of them")
    if "ENCRYPTED" in _read_pem("--tls-key", key, "PRIVATE KEY", "a private key"):
        raise ConfigError(
            f"--tls-key {key}: the key is encrypted, and the server cannot ask for a password; "
            "allowed: a PEM file with a plain key (`openssl pkey -in KEY -out PLAIN_KEY`)"
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
                f"--tls-key {key}: the key does not belong to the certificate {cert}; "
                "allowed: the key of the first certificate in that file"
            ) from None
        raise ConfigError(
            f"--tls-cert {cert} --tls-key {key}: OpenSSL does not accept them "
            f"({error.reason or error}); allowed: PEM files with a certificate and its key"
        ) from None
    return context


def _read_pem(flag: str, path: Path, label: str, allowed: str) -> str:
    """The text of a PEM file that contains a `label`. Raises ConfigError, which states what is
    `allowed`.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read ({error.strerror}); allowed: a PEM file with {allowed}"
        ) from None
    if "-----BEGIN " not in text or f"{label}-----" not in text:
        raise ConfigError(f"{flag} {path}: holds none; allowed: a PEM file with {allowed}")
    return text
