"""The health command: whether this user's server is ready, for health checks.

Finds out where the server listens, and sends it a request. Independent of the engine.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import PurePath

import psutil

from luceasync.cli.flags import config_of
from luceasync.cli.output import one_line
from luceasync.server_config import ServerConfig

TIMEOUT_S = 4.0


def run_health(config: ServerConfig) -> bool:
    """Print the answer of `/ready`. Returns whether the server is ready."""
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


def running_server(processes: Sequence[psutil.Process]) -> ServerConfig | None:
    """The settings of the only server among `processes`; None if there is none, or several."""
    found = running_servers(processes)
    return found[0] if len(found) == 1 else None


def running_servers(processes: Sequence[psutil.Process]) -> list[ServerConfig]:
    """The settings of the servers among `processes`, from their flags and variables."""
    found = {}
    for process in processes:
        try:
            words = words_of_serve(process.cmdline())
            if words is not None:
                found[tuple(words)] = process.environ()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return [config_of(words, environ).server for words, environ in found.items()]


def words_of_serve(command: Sequence[str]) -> list[str] | None:
    """The words after `luceasync serve` in a command line, also below an init; None for other
    commands.
    """
    for place, word in enumerate(command[:-1]):
        if PurePath(word).name == "luceasync" and command[place + 1] == "serve":
            return list(command[place + 2 :])
    return None


def _connection(config: ServerConfig) -> HTTPConnection:
    """A connection to the server's own address, whatever names its certificate is for."""
    host = reachable_host(config.host)
    if config.tls_cert is None:
        return HTTPConnection(host, config.port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, config.port, timeout=TIMEOUT_S, context=context)


def reachable_host(host: str) -> str:
    """The loopback address if `host` stands for all interfaces, otherwise `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"
