"""Settings of the HTTP server; luceasync.config has the other sections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luceasync import parsers
from luceasync.parsers import Setting, choice, setting, value

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP settings.

    Without API keys every client is served; without `admin_keys` the cache cannot be inspected.
    `allow_hosts` are Host names to accept besides local ones; `allow_origins` are origins of web
    pages that may use the server. `client_secrets` are those of routers that may name their
    clients. `tls_cert` and `tls_key`, both or neither: HTTPS.
    """

    host: str = value(
        "127.0.0.1",
        "host",
        parsers.text,
        "an address or host name",
        "ADDRESS",
        "Address to listen on; 0.0.0.0 or :: for every interface.",
    )
    port: int = value(
        8000,
        "port",
        parsers.integer(0, 65535),
        "an integer from 0 to 65535 (0: any free port)",
        "PORT",
        "Port to listen on.",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        Setting(
            "api-key",
            parsers.comma_separated,
            "comma-separated keys, none empty",
            "KEY",
            "Key that clients must send as a Bearer token; may be repeated. Other users of this "
            "machine can see it in `ps`: prefer --api-key-file or LUCEASYNC_API_KEY.",
            secret=True,
            repeatable=True,
        ),
        Setting(
            "api-key-file",
            parsers.keys_in_file,
            "a readable file with one key per line ('#' starts a comment)",
            "FILE",
            "File with one API key per line, in addition to those of --api-key.",
        ),
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        Setting(
            "admin-key",
            parsers.comma_separated,
            "comma-separated keys, none empty",
            "KEY",
            "Key that may list and drop cached prefixes (/admin/cache); may be repeated. Other "
            "users of this machine can see it in `ps`: prefer LUCEASYNC_ADMIN_KEY.",
            secret=True,
            repeatable=True,
        ),
    )
    client_secrets: tuple[str, ...] = setting(
        (),
        Setting(
            "client-secret-file",
            parsers.keys_in_file,
            "a readable file with one secret per line ('#' starts a comment)",
            "FILE",
            "Take the client's name from a router that signs it with one of these secrets "
            "(x-luceasync-client), for fairness.",
            secret=True,
        ),
    )
    tls_cert: Path | None = value(
        None,
        "tls-cert",
        parsers.path,
        "a PEM file with a certificate and its chain",
        "FILE",
        "Certificate for HTTPS; needs --tls-key.",
        needs="tls-key",
    )
    tls_key: Path | None = value(
        None,
        "tls-key",
        parsers.private_path,
        "a PEM file with the certificate's unencrypted private key",
        "FILE",
        "Private key of that certificate, without a password.",
        needs="tls-cert",
    )
    allow_hosts: tuple[str, ...] = value(
        (),
        "allow-host",
        parsers.host_names,
        "comma-separated names, such as chat.lan, without scheme and port (*: any)",
        "NAME",
        "Host name to accept besides local ones; may be repeated.",
        repeatable=True,
    )
    allow_origins: tuple[str, ...] = value(
        (),
        "allow-origin",
        parsers.origins,
        "comma-separated origins, such as http://localhost:3000 (*: any web page)",
        "ORIGIN",
        "Origin whose web pages may use the server and read its answers; may be repeated.",
        repeatable=True,
    )
    max_body_bytes: int = value(
        16 * 2**20,
        "max-body",
        parsers.integer(1),
        "an integer number of bytes, at least 1, such as 16M",
        "BYTES",
        "Largest request body; a larger one gets 413.",
    )
    keep_alive_s: float = value(
        15.0,
        "keep-alive",
        parsers.seconds(0.01),
        "seconds from 0.01 to 86400",
        "SECONDS",
        "Send a comment on a stream after so long a silence, so that no proxy drops it.",
    )
    graceful_timeout_s: float = value(
        30.0,
        "graceful-timeout",
        parsers.seconds(0.0),
        "seconds from 0 to 86400",
        "SECONDS",
        "How long running requests may continue after SIGTERM.",
    )
    log_level: LogLevel = choice(
        "info",
        "log-level",
        LogLevel,
        "What to log on stderr: debug, info, warning or error.",
        metavar="LEVEL",
    )
