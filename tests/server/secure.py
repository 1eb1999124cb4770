"""A certificate for localhost, and connections that trust it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from luceasync.server_config import ServerConfig

FILES = Path(__file__).parent / "tls"
CERT, KEY = FILES / "cert.pem", FILES / "key.pem"
SECURE = ServerConfig(tls_cert=CERT, tls_key=KEY)
DEADLINE_S = 20.0


def trusting(*protocols: str) -> ssl.SSLContext:
    """A client's context that trusts the certificate and offers `protocols`."""
    context = ssl.create_default_context(cafile=CERT)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An encrypted connection, after its handshake."""
    return await asyncio.open_connection(host, port, ssl=trusting("http/1.1"))
