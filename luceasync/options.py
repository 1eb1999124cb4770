"""The one table of settings: flag, variable, TOML key, parser and help of each.

Owns names and ranges. Knows nothing of the command line's library, and of which source wins.
"""

from __future__ import annotations

import logging
import math
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_PREFIX = "LUCEASYNC_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

Parser = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One setting and its names: flag `--a-b`, variable `LUCEASYNC_A_B`, TOML `section.a_b`.

    `parse` takes text (flag, variable) or a TOML value and raises ValueError; `allowed` ends the
    sentence "allowed: ..." of the ConfigError that follows. A `secret` value is never shown.
    """

    name: str
    section: str
    field: str
    parse: Parser
    allowed: str
    metavar: str
    help: str
    secret: bool = False
    repeatable: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _path(value: object) -> Path:
    return Path(_text(value)).expanduser()


def _one_of(*choices: str) -> Parser:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError
        return _text(value)

    return parse


def _whole(least: int, most: int = 2**48) -> Parser:
    """An integer; text may end in K, M or G (powers of 1024)."""

    def parse(value: object) -> int:
        if isinstance(value, str):
            digits = value.strip().upper()
            power = {"K": 1, "M": 2, "G": 3}.get(digits[-1:], 0)
            value = int(digits[:-1] if power else digits) * 1024**power
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return parse


def _seconds(least: float) -> Parser:
    def parse(value: object) -> float:
        seconds = _number(value)
        if not least <= seconds <= 86400:
            raise ValueError
        return seconds

    return parse


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _words(value: object) -> tuple[str, ...]:
    """Words from a list, or from text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    words = tuple(_text(part).strip() for part in parts)
    if not words or not all(words):
        raise ValueError
    return words


def _weights(value: object) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    weights = tuple(_number(part) for part in parts)
    if not weights or min(weights) <= 0:
        raise ValueError
    return weights


def _keys_in_file(value: object) -> tuple[str, ...]:
    """API keys of a file: one a line, `#` starts a comment line."""
    path = _path(value)
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logging.getLogger("luceasync").warning(
            "%s can be read by other users: chmod 600 it, it holds API keys", path
        )
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError
    return keys


LOG_LEVELS = ("debug", "info", "warning", "error")
DTYPES = ("auto", "bf16", "fp32")
PEER_ACCESS = ("auto", "on", "off")

OPTIONS: tuple[Option, ...] = (
    Option(
        "model-dir",
        "model",
        "model_dir",
        _path,
        "the path of a Hugging Face model directory",
        "DIR",
        "Hugging Face model directory; without it the bundled model is served.",
    ),
    Option(
        "model-name",
        "model",
        "name",
        _text,
        "a name",
        "NAME",
        "Name under which the model is served; default: the directory's name.",
    ),
    Option(
        "dtype",
        "model",
        "dtype",
        _one_of(*DTYPES),
        " | ".join(DTYPES),
        "|".join(DTYPES),
        "Precision of weights and keys/values; auto: bf16 where the device computes it, else fp32.",
    ),
    Option(
        "target-device",
        "placement",
        "device",
        _text,
        "a device name, such as cuda:0 or cpu",
        "DEVICE",
        "The one device to use; the same as --target-devices with one name.",
    ),
    Option(
        "target-devices",
        "placement",
        "devices",
        _words,
        "device names with commas, such as cuda:0,cuda:1 or cpu",
        "LIST",
        "Devices in layer order, such as cuda:0,cuda:1,cpu; default: the best one here.",
    ),
    Option(
        "target-layer-split",
        "placement",
        "layer_split",
        _weights,
        "one weight above 0 for each device, with commas",
        "LIST",
        "Share of the layers for each device, such as 0.3,0.7; default: by free memory.",
    ),
    Option(
        "peer-access",
        "placement",
        "peer_access",
        _one_of(*PEER_ACCESS),
        " | ".join(PEER_ACCESS),
        "|".join(PEER_ACCESS),
        "Copies from GPU to GPU: directly where they can (auto), always (on), over the host (off).",
    ),
    Option(
        "parallel",
        "engine",
        "parallel",
        _whole(1, 1024),
        "a whole number from 1 to 1024",
        "N",
        "Sequences decoded together (lanes); default: what fits, at most 4.",
    ),
    Option(
        "max-ctx",
        "engine",
        "max_ctx_tokens",
        _whole(64),
        "a whole number of tokens, at least 64, such as 32768 or 32K",
        "TOKENS",
        "Context of one lane; default: what the model knows and the memory holds.",
    ),
    Option(
        "prefill-chunk",
        "engine",
        "prefill_chunk_tokens",
        _whole(1),
        "a whole number of tokens, at least 1",
        "TOKENS",
        "Prompt tokens computed between two decode steps; default: by device.",
    ),
    Option(
        "max-queue",
        "engine",
        "max_queue",
        _whole(0, 2**20),
        "a whole number from 0 to 1048576",
        "N",
        "Requests that may wait for a lane; further ones get 429.",
    ),
    Option(
        "host",
        "server",
        "host",
        _text,
        "an address or host name",
        "ADDRESS",
        "Address to listen on; 0.0.0.0 or :: for every interface.",
    ),
    Option(
        "port",
        "server",
        "port",
        _whole(0, 65535),
        "a whole number from 0 to 65535 (0: any free port)",
        "PORT",
        "Port to listen on.",
    ),
    Option(
        "api-key",
        "server",
        "api_keys",
        _words,
        "keys with commas, none empty",
        "KEY",
        "Key that clients must send as a Bearer token; may be repeated.",
        secret=True,
        repeatable=True,
    ),
    Option(
        "api-key-file",
        "server",
        "api_keys",
        _keys_in_file,
        "a readable file with one key a line ('#' starts a comment)",
        "FILE",
        "File with one API key a line, added to those of --api-key.",
    ),
    Option(
        "max-body",
        "server",
        "max_body_bytes",
        _whole(1),
        "a whole number of bytes, at least 1, such as 16M",
        "BYTES",
        "Largest request body; a larger one gets 413.",
    ),
    Option(
        "keep-alive",
        "server",
        "keep_alive_s",
        _seconds(0.01),
        "seconds from 0.01 to 86400",
        "SECONDS",
        "Silence after which a stream gets a comment, so that no proxy cuts it.",
    ),
    Option(
        "graceful-timeout",
        "server",
        "graceful_timeout_s",
        _seconds(0.0),
        "seconds from 0 to 86400",
        "SECONDS",
        "How long running requests may go on after SIGTERM.",
    ),
    Option(
        "log-level",
        "server",
        "log_level",
        _one_of(*LOG_LEVELS),
        " | ".join(LOG_LEVELS),
        "|".join(LOG_LEVELS),
        "What is written to stderr.",
    ),
)
