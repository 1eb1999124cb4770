"""The server's end of a link to another machine: a process that stands for the one there.

`bring` runs in the place of that process, and carries its sockets. Knows no message of a channel.
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from luceasync import __version__
from luceasync.backend.listen import (
    HANDSHAKE_S,
    LINK_PROTOCOL,
    RETRY_S,
    STARTING_S,
    Opened,
    Opening,
    wiring_in,
)
from luceasync.errors import ConfigError
from luceasync.ipc.certificates import tls_context
from luceasync.ipc.packets import WireError
from luceasync.ipc.tcp import Address, Carried, Link, dial, receive_opening, send_opening
from luceasync.ipc.wiring import Wiring

# OpenSSL's X509_V_ERR_CERT_SIGNATURE_FAILURE, two for self-signed ones, and for an unknown issuer.
OTHER_AUTHORITY = frozenset({7, 18, 19, 20})


@dataclass(frozen=True, slots=True)
class Box:
    """Another machine as a server sees it. `place`: see Opening. `patience_s`: how long to try to
    connect.
    """

    address: Address
    name: str
    tls: Path
    place: str = ""
    patience_s: float = 5.0


def bring(
    box: Box,
    model_dir: Path | None,
    dtype: str,
    layers: str,
    environ: MutableMapping[str, str] = os.environ,
) -> str:
    """Be the process of another machine for the process that started this one, until it ends.
    Returns how it ended. Raises ConfigError if the machine cannot be reached, or refuses.
    """
    wiring = wiring_in(environ)
    opening = Opening(
        protocol=LINK_PROTOCOL,
        version=__version__,
        place=box.place or secrets.token_hex(8),
        session=wiring.session,
        ring_bytes=wiring.ring_bytes,
        written=wiring.written,
        read=wiring.read,
        model_dir="" if model_dir is None else str(model_dir),
        dtype=dtype,
        layers=layers,
    )
    sockets = _inherited(wiring)
    tls = _connect(box, opening)
    log_here, log_there = socket.socketpair()
    copying = threading.Thread(target=_copy_log, args=(log_there,), daemon=True)
    copying.start()
    link = Link(tls, {**sockets, Carried.LOG: log_here}, box.name)
    end = link.run()
    link.close()
    copying.join()
    return "the server is gone" if end.is_local else f"{box.name}: {end.words}"


def _inherited(wiring: Wiring) -> Mapping[Carried, socket.socket]:
    fds = {
        Carried.PULSE: wiring.pulse,
        Carried.COMPLETIONS: wiring.completions,
        Carried.CONTROL: wiring.control,
        Carried.PAYLOADS: wiring.stream,
    }
    if min(fds.values()) < 0:
        raise ConfigError("memory is not shared between machines: --ipc-transport stream is needed")
    return {what: socket.socket(fileno=fd) for what, fd in fds.items()}


def _copy_log(sock: socket.socket) -> None:
    """Write the lines of the process there as this process's own."""
    while some := sock.recv(1 << 16):
        os.write(2, some)


def _connect(box: Box, opening: Opening) -> ssl.SSLSocket:
    """A connection over which the other machine has started the process."""
    context = tls_context(box.tls, "--target-shard-tls", is_server=False)
    where, content = f"{box.name} ({box.address})", msgspec.msgpack.encode(opening)
    until_s = time.monotonic() + box.patience_s
    while True:
        try:
            tls = dial(box.address, context, box.name, HANDSHAKE_S)
            try:
                send_opening(tls, content)
                tls.settimeout(STARTING_S)
                answer = msgspec.msgpack.decode(receive_opening(tls), type=Opened)
                if not answer.refusal:
                    return tls
            except BaseException:
                tls.close()
                raise
            tls.close()
            words, may_pass = answer.refusal, answer.is_busy
        except ssl.SSLCertVerificationError as error:
            words = error.verify_message
            if error.verify_code in OTHER_AUTHORITY:
                words = "it is of another authority"
            words, may_pass = f"its certificate does not match: {words}", False
        except ssl.SSLError as error:
            words, may_pass = f"it refuses our certificate, or speaks no TLS 1.3: {error}", False
        except (OSError, WireError, msgspec.DecodeError) as error:
            words, may_pass = f"cannot be reached: {error}", True
        if not may_pass or time.monotonic() >= until_s:
            raise ConfigError(f"{where}: {words}")
        time.sleep(RETRY_S)
