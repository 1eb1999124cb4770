"""The health command: whether the server of these settings is ready, for health checks.

Knows nothing of the engine; asks over HTTP.
"""

from __future__ import annotations

import ipaddress
import ssl
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from luceasync.cli.output import one_line
from luceasync.config import ServerConfig

TIMEOUT_S = 4.0


def run_health(config: ServerConfig) -> bool:
    """Print what `/ready` answers; returns whether the server is ready."""
    connection = _connection(config)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        answer = response.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        print(f"{config.host}:{config.port} does not answer: {one_line(error)}")
        return False
    finally:
        connection.close()
    print(one_line(answer))
    return response.status == 200


def _connection(config: ServerConfig) -> HTTPConnection:
    """A connection to the server's own address, whatever names its certificate is for."""
    host = _reachable(config.host)
    if config.tls_cert is None:
        return HTTPConnection(host, config.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, config.port, timeout=TIMEOUT_S, context=context)


def _reachable(host: str) -> str:
    """The loopback address in place of one that stands for every interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"
