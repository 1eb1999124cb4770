"""The settings of the server, the last rows of the one table in luceasync.options."""

from __future__ import annotations

from luceasync import parsers
from luceasync.option import Option

LOG_LEVELS = ("debug", "info", "warning", "error")

SERVER_OPTIONS: tuple[Option, ...] = (
    Option(
        "host",
        "server",
        "host",
        parsers.text,
        "an address or host name",
        "ADDRESS",
        "Address to listen on; 0.0.0.0 or :: for every interface.",
    ),
    Option(
        "port",
        "server",
        "port",
        parsers.whole(0, 65535),
        "a whole number from 0 to 65535 (0: any free port)",
        "PORT",
        "Port to listen on.",
    ),
    Option(
        "api-key",
        "server",
        "api_keys",
        parsers.words,
        "keys with commas, none empty",
        "KEY",
        "Key that clients must send as a Bearer token; may be repeated. Other users of this "
        "machine see it in `ps`: rather use --api-key-file or LUCEASYNC_API_KEY.",
        secret=True,
        repeatable=True,
    ),
    Option(
        "api-key-file",
        "server",
        "api_keys",
        parsers.keys_in_file,
        "a readable file with one key a line ('#' starts a comment)",
        "FILE",
        "File with one API key a line, added to those of --api-key.",
    ),
    Option(
        "allow-host",
        "server",
        "allow_hosts",
        parsers.host_names,
        "names with commas, such as chat.lan, without scheme and port (*: any)",
        "NAME",
        "Name under which the server may be asked for beside local ones; may be repeated.",
        repeatable=True,
    ),
    Option(
        "allow-origin",
        "server",
        "allow_origins",
        parsers.origins,
        "origins with commas, such as http://localhost:3000 (*: every web page)",
        "ORIGIN",
        "Origin whose web pages may use the server and read its answers; may be repeated.",
        repeatable=True,
    ),
    Option(
        "max-body",
        "server",
        "max_body_bytes",
        parsers.whole(1),
        "a whole number of bytes, at least 1, such as 16M",
        "BYTES",
        "Largest request body; a larger one gets 413.",
    ),
    Option(
        "keep-alive",
        "server",
        "keep_alive_s",
        parsers.seconds(0.01),
        "seconds from 0.01 to 86400",
        "SECONDS",
        "Silence after which a stream gets a comment, so that no proxy cuts it.",
    ),
    Option(
        "graceful-timeout",
        "server",
        "graceful_timeout_s",
        parsers.seconds(0.0),
        "seconds from 0 to 86400",
        "SECONDS",
        "How long running requests may go on after SIGTERM.",
    ),
    Option(
        "log-level",
        "server",
        "log_level",
        parsers.one_of(*LOG_LEVELS),
        " | ".join(LOG_LEVELS),
        "LEVEL",
        "What is written to stderr: debug, info, warning or error.",
    ),
)
